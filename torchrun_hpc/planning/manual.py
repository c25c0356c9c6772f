"""The meeting of several machines without a scheduler: the user names the endpoint.

Two things differ from torchrun. The owner of the endpoint's address hosts c10d, instead
of the machine with its name. gloo and NCCL get the interface with this machine's
address toward the endpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.options.values import C10D, STATIC
from torchrun_hpc.planning import head_node, messages, network_env
from torchrun_hpc.planning.head_node import C10D_PORT, LOOPBACK, STATIC_PORT
from torchrun_hpc.planning.meeting import Meeting, key_file
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Address
    from torchrun_hpc.planning.inputs import Inputs


def meet(inputs: Inputs) -> Meeting:
    """Return where one of several machines meets the others."""
    options = inputs.options
    if "rdzv_endpoint" not in options and "master_addr" not in options:
        raise LaunchError(
            "HPC066",
            f"{options['nnodes']}, but no scheduler's variables are set and no head "
            "node is given: every node would wait on its own. Start it with srun, or "
            "pass on every node: --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT",
        )
    port = C10D_PORT if options.backend == C10D else STATIC_PORT
    host, port, setting = head_node.explicit_endpoint(options, LOOPBACK, port)
    own, is_host, derived = None, True, {}
    if setting is not None:
        head_node.check_resolves(inputs, host, setting)
        own = inputs.network.address_near(host)
        is_host = inputs.network.local_address(host) is not None
        if options.backend == C10D:
            derived = _c10d_options(inputs, own, host)
    listen = inputs.network.own_address(host) if "rdzv_conf" in derived else None
    environment = network_env.network(replace(inputs, site=None), own)
    return Meeting(
        backend=options.backend,
        nodes=options.nnodes.high,
        node_rank=options.node_rank,
        report_rank=options.node_rank if options.is_static else int(not is_host),
        fewest=options.nnodes.low,
        may_grow=True,
        key=key_file(inputs),
        endpoint=join_endpoint(host, port) if setting else options.rdzv_endpoint,
        connect_host=host if setting else "",
        ports=(port,) if setting else (),
        local_address=None if own is None else str(own),
        listen=(str(listen), port) if listen else None,
        may_join=head_node.may_join(inputs),
        interface=network_env.interface_name(inputs.environ, environment),
        options=derived,
        environment=environment,
        notes=messages.unused_on_one_node(inputs, "without a scheduler"),
        warnings=_warning_of_node_0(inputs, setting, is_host=is_host),
    )


def _warning_of_node_0(
    inputs: Inputs, setting: Setting | None, *, is_host: bool
) -> tuple[Message, ...]:
    if inputs.options.backend != STATIC or inputs.options.node_rank or is_host:
        return ()
    text = (
        f"{setting} is not an address of this machine, but this is node 0, which hosts "
        "the static rendezvous. Pass --node_rank=1, 2, ... on the other machines"
    )
    return (Message("HPC137", text),)


def _c10d_options(inputs: Inputs, own: Address | None, host: str) -> dict[str, Setting]:
    """Return options that torch derives wrongly on a machine with several networks.

    Torch knows this machine by the addresses of its name. ``is_host`` is set only if
    that is not enough: with it, torch would not join another agent of this machine.
    """
    options = {}
    address, conf = inputs.network.own_address(host), inputs.options.rdzv_conf
    is_known = address in inputs.network.addresses_of(inputs.hostname)
    if address is not None and not is_known and not conf.uses_file:
        text = conf.filled(is_host=1)
        options["rdzv_conf"] = Setting(text, "owner of the address")
    if own is not None and "local_addr" not in inputs.options:
        options["local_addr"] = Setting(str(own), "this node's address")
    return options
