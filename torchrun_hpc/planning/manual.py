"""The meeting of several machines without a scheduler: the user names the endpoint.

Two things differ from torchrun. The owner of the endpoint's address hosts c10d, instead
of the machine with its name. gloo and NCCL get the interface with this machine's
address toward the endpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.options.values import C10D, STATIC
from torchrun_hpc.planning import head_node, messages, network_env
from torchrun_hpc.planning.head_node import C10D_PORT, LOOPBACK, STATIC_PORT
from torchrun_hpc.planning.meeting import Meeting, key_file, with_environment

if TYPE_CHECKING:
    from torchrun_hpc.planning.head_node import HeadNode
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
    head = head_node.explicit(options, LOOPBACK, port)
    is_host, derived = True, {}
    if head.setting is not None:
        head_node.check_resolves(inputs, head)
        head = replace(head, local_address=inputs.network.address_near(head.host))
        is_host = inputs.network.local_address(head.host) is not None
        if options.backend == C10D:
            derived = _c10d_options(inputs, head)
    address = head.local_address
    listen = inputs.network.own_address(head.host) if "rdzv_conf" in derived else None
    meeting = Meeting(
        backend=options.backend,
        nodes=options.nnodes.high,
        node_rank=options.node_rank,
        report_rank=options.node_rank if options.is_static else int(not is_host),
        fewest=options.nnodes.low,
        may_grow=True,
        key=key_file(inputs),
        endpoint=str(head) if head.setting else options.rdzv_endpoint,
        connect_host=head.host if head.setting else "",
        ports=(head.port,) if head.setting else (),
        local_address=None if address is None else str(address),
        listen=(str(listen), head.port) if listen else None,
        may_join=head_node.may_join(options),
        options=derived,
        notes=messages.unused_on_one_node(inputs, "without a scheduler"),
        warnings=_warning_of_node_0(inputs, head.setting, is_host=is_host),
    )
    environment = network_env.network(replace(inputs, site=None), address)
    return with_environment(inputs, meeting, environment)


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


def _c10d_options(inputs: Inputs, head: HeadNode) -> dict[str, Setting]:
    """Return options that torch derives wrongly on a machine with several networks.

    Torch recognises this machine by the addresses to which its host name resolves.
    ``is_host`` is set only if that is not enough: with it, torch would not join another
    agent of this machine.
    """
    options = {}
    address, conf = inputs.network.own_address(head.host), inputs.options.rdzv_conf
    is_recognised = address in inputs.network.addresses_of(inputs.hostname)
    if address is not None and not is_recognised and not conf.uses_file:
        text = conf.filled(is_host=1)
        options["rdzv_conf"] = Setting(text, "owner of the address")
    if head.local_address is not None and "local_addr" not in inputs.options:
        options["local_addr"] = Setting(str(head.local_address), "this node's address")
    return options
