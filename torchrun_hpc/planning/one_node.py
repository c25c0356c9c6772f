"""The meeting on one node: torchrun --standalone, whatever the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.options.command_line import names_folder
from torchrun_hpc.options.values import C10D, STATIC
from torchrun_hpc.planning import head_node, messages, several_nodes
from torchrun_hpc.planning.head_node import C10D_PORT, LOOPBACK, STATIC_PORT
from torchrun_hpc.planning.meeting import Meeting

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs

_RULE = "one node"

# Options that need torch's own rendezvous.
_OF_RENDEZVOUS = {"rdzv_backend", "rdzv_endpoint", "rdzv_conf"}


def meet(inputs: Inputs) -> Meeting:
    """Return where the workers of one node meet."""
    options, job = inputs.options, inputs.job
    ignored = _ignored_node_rank(inputs)
    derived = {"node_rank": Setting(0, _RULE)} if ignored else {}
    if options.standalone and options.nnodes.low > 1:
        text = f"{options['nnodes']} and --standalone, which is one node. Remove one "
        raise LaunchError("HPC065", f"{text}of them", everywhere=True)
    has_endpoint = head_node.is_explicit(options) and not options.standalone
    listen = _listens(inputs) if has_endpoint else (LOOPBACK, 0)
    if options.standalone and "rdzv_backend" in options:
        derived["rdzv_backend"] = Setting(C10D, "--standalone")
        derived["rdzv_endpoint"] = Setting("localhost:0", "--standalone")
    if not options.standalone and not options.is_static:
        derived |= _c10d_options(inputs, is_host=has_endpoint and listen is not None)
    # Torch would publish getfqdn(), which does not always resolve: pytorch#174513.
    address = head_node.explicit_local_address(inputs)
    if address is None:
        derived["local_addr"] = Setting(LOOPBACK, _RULE)
    if "nnodes" not in options or options.nnodes.high > 1:
        derived["nnodes"] = Setting("1", _RULE)  # nobody can join
    hosts = () if job is None or job.node_rank is None else (job.own_name,)
    is_explicit = options.standalone or "nnodes" in options
    keeps_torchs = has_endpoint or not _OF_RENDEZVOUS.isdisjoint(options.given)
    in_process = several_nodes.meets_by_ours(inputs) and not keeps_torchs
    return Meeting(
        backend=options.backend,
        report_rank=0 if job is None else job.task.rank,
        hosts=hosts,
        fast_hosts=hosts,
        endpoint=options.rdzv_endpoint or "localhost",
        local_address=str(address or LOOPBACK),
        coordinator=0 if in_process else None,
        is_coordinator=in_process,
        listen=None if in_process else listen,
        options=derived,
        notes=(
            *_range_note(inputs),
            *(() if is_explicit else messages.interactive_note(inputs)),
            *messages.unused_on_one_node(inputs, "on a world of one node"),
        ),
        advice=ignored,
    )


def _ignored_node_rank(inputs: Inputs) -> tuple[Message, ...]:
    """Return a warning if a node rank has no effect; refuse one that waits forever."""
    options = inputs.options
    if not options.node_rank:
        return ()
    option, fact = options["node_rank"], "a world of one node has only node 0"
    has_port = options.is_static and "master_port" in options
    has_static_store = options.rdzv_backend == STATIC or has_port
    if has_static_store and not options.standalone:
        raise LaunchError("HPC064", f"{option}, but {fact}. Remove the option")
    text = f"{option} is ignored: {fact}. For several nodes, pass --nnodes"
    return (Message("HPC075", text),)


def _range_note(inputs: Inputs) -> tuple[Message, ...]:
    if inputs.options.nnodes.high == 1:
        return ()
    text = f"{inputs.options['nnodes']} counts as 1: nobody can join with --standalone"
    return (Message("HPC155", text),)


def _c10d_options(inputs: Inputs, *, is_host: bool) -> dict[str, Setting]:
    job, asked = inputs.job, inputs.options
    names = ("rdzv_backend", "rdzv_endpoint", "rdzv_id")
    if job is None and not any(name in asked for name in names):
        return {"standalone": Setting(value=True, source=_RULE)}
    options = {"rdzv_backend": Setting(C10D, _RULE)}
    if asked.is_c10d:
        options["rdzv_endpoint"] = Setting("localhost:0", _RULE)
    if job is not None:
        options["rdzv_id"] = Setting(job.launch_id, job.provenance["launch_id"])
    options = {k: v for k, v in options.items() if k not in asked}
    if not names_folder(asked.rdzv_id):
        options["rdzv_id"] = Setting("none", _RULE)  # torchrun makes one
    if asked.is_c10d and is_host:
        # Torch does not recognise the node by the name of a second interface.
        options["rdzv_conf"] = Setting(asked.rdzv_conf.filled(is_host=1), _RULE)
    return options


def _listens(inputs: Inputs) -> tuple[str, int] | None:
    options = inputs.options
    port = STATIC_PORT if options.is_static else C10D_PORT
    head = head_node.explicit(options, LOOPBACK, port)
    if not options.is_static and not options.is_c10d:
        return None
    head_node.check_resolves(inputs, head)
    if options.rdzv_conf.is_host is False:
        return None
    address = inputs.network.local_address(head.host)
    return None if address is None else (str(address), head.port)
