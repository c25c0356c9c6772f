"""The plan for several machines without a scheduler, on each of which it was typed.

That is left to torchrun, but for two things: which machine hosts c10d is decided by the
address of the endpoint, not by comparing names; and gloo and NCCL get the interface
that has this machine's address for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.planning import endpoints, messages, network_env, resources
from torchrun_hpc.planning.endpoints import C10D_PORT, LOOPBACK, STATIC_PORT
from torchrun_hpc.planning.inputs import C10D, STATIC
from torchrun_hpc.planning.launch_plan import LaunchPlan, Messages, Rendezvous, World
from torchrun_hpc.planning.local_endpoint import address_near
from torchrun_hpc.planning.mode import node_range
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Address
    from torchrun_hpc.planning.inputs import Inputs


def plan(inputs: Inputs) -> LaunchPlan:
    """Plan for one of several machines.

    Raises:
        LaunchError: Nothing says where they are to meet.
    """
    if not {"rdzv_endpoint", "master_addr"}.intersection(inputs.options):
        raise LaunchError(
            "HPC066",
            f"{inputs.options['nnodes']}, but no scheduler's variables are set and no "
            "head node was typed: every node would wait on its own. Start it with "
            "srun, or type on every node: --rdzv_backend=c10d "
            "--rdzv_endpoint=HOST:PORT",
        )
    fewest, nodes = node_range(inputs.options)
    backend = inputs.backend
    port = C10D_PORT if backend == C10D else STATIC_PORT
    host, port, setting = endpoints.explicit_endpoint(inputs, LOOPBACK, port)
    own, is_host, options = None, True, {}
    if setting is not None:
        endpoints.check_resolves(inputs, host, setting)
        own = address_near(inputs, host)
        is_host = inputs.network.local_address(host) is not None
        if backend == C10D:
            options = _c10d_options(inputs, own, host)
    listen = inputs.network.own_address(host) if "rdzv_conf" in options else None
    environment = network_env.network(replace(inputs, site=None), own)
    rank = inputs.explicit("node_rank") or 0
    where = join_endpoint(host, port) if setting else inputs.explicit("rdzv_endpoint")
    return LaunchPlan(
        mode=inputs.mode,
        world=World(
            nodes=nodes,
            node_rank=rank,
            workers=inputs.workers,
            report_rank=rank if backend == STATIC else int(not is_host),
            fewest=fewest,
            may_grow=True,
        ),
        rendezvous=Rendezvous(
            backend=backend,
            endpoint=where,
            local_address=None if own is None else str(own),
            listen=(str(listen), port) if listen else None,
            may_join=endpoints.may_join(inputs),
        ),
        interface=network_env.interface_name(inputs.environ, environment),
        options=options,
        environment=resources.worker_threads(inputs) | environment,
        messages=Messages(
            title=messages.title(inputs, nodes),
            notes=messages.unused_on_one_node(
                inputs, "nodes that no scheduler has named"
            ),
            advice=resources.advice(inputs, nodes),
            warnings=_warning_of_node_0(backend, rank, setting, is_host=is_host),
        ),
    )


def _warning_of_node_0(
    backend: str, rank: int, setting: Setting | None, *, is_host: bool
) -> tuple[Message, ...]:
    """Warn of a node 0 that is somewhere else."""
    if backend != STATIC or rank or is_host:
        return ()
    text = (
        f"{setting} is no address of this machine, but this is node 0, which hosts the "
        "static rendezvous. Type on each of the other machines: --node_rank=1, 2, ..."
    )
    return (Message("HPC137", text),)


def _c10d_options(inputs: Inputs, own: Address | None, host: str) -> dict[str, Setting]:
    """Return what torch gets wrong on a machine with several networks.

    It knows this machine by the addresses of its name. Only where that is not enough
    it is told: told, it would not join another agent of the same machine.
    """
    options = {}
    address = inputs.network.own_address(host)
    is_known = address in inputs.network.addresses_of(inputs.hostname)
    setting = inputs.options.get("rdzv_conf")
    if address is not None and not is_known and not rdzv_conf.uses_file(setting):
        conf = rdzv_conf.filled(setting, is_host=1)
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), "owner of the address")
    if own is not None and "local_addr" not in inputs.options:
        options["local_addr"] = Setting(str(own), "this node's address")
    return options
