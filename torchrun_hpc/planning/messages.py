"""What several plans tell a person in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning import network_env
from torchrun_hpc.schedulers.job import LaunchContext, Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.local_endpoint import LocalEndpoint
    from torchrun_hpc.schedulers.job import Job

NO_SCHEDULER = "no scheduler"

# Where the options of an agent have no effect.
DIRECT_MODE = "direct mode, where each worker is a task"

# What an agent, or direct mode, sets for a worker.
RUN_ID, RANK = "TORCHELASTIC_RUN_ID", "RANK"


def title(inputs: Inputs, nodes: int) -> str:
    """Return what was started by whom, for the start line."""
    job = inputs.job
    if job is None or job.scheduler == NO_SCHEDULER:
        return NO_SCHEDULER
    text = f"{job.scheduler} {job.launch_id}"
    if job.context is LaunchContext.STEP and nodes < job.allocated_nodes:
        text += f" ({nodes} of {count(job.allocated_nodes, 'node')})"
    return text


def interactive_note(inputs: Inputs) -> tuple[Message, ...]:
    """Return a note if this is an interactive step, and the job has more nodes."""
    job = inputs.job
    if job is None or job.context is not LaunchContext.INTERACTIVE_STEP:
        return ()
    total = job.allocated_nodes
    if total == 1:
        return ()
    line = job.once_per_node(inputs.command, nodes=total)
    text = f"this is 1 of {total} nodes of the job; for all of them: {line}"
    return (Message("HPC073", text),)


def unused(inputs: Inputs, where: str, names: Sequence[str]) -> tuple[Message, ...]:
    """Name the options of ours that have no effect."""
    useless = [str(inputs.options[name]) for name in names if name in inputs.options]
    return tuple(
        Message("HPC077", f"{option} has no effect on {where}") for option in useless
    )


def unused_on_one_node(inputs: Inputs, where: str) -> tuple[Message, ...]:
    """Name the options of ours that only nodes of a job can follow."""
    is_useless = inputs.site is not None and not inputs.site.options
    useless = ("hpc_site",) if is_useless else ()
    numbered = inputs.options.hpc_rendezvous == SCHEDULER
    return unused(inputs, where, useless + (("hpc_rendezvous",) if numbered else ()))


def warnings(inputs: Inputs, here: LocalEndpoint, host: str) -> tuple[Message, ...]:
    """Return what is wrong on this node, and was worked around."""
    found = [*here.warnings, *network_env.warnings(inputs)]
    interface = inputs.network.owner(here.local_address)
    if here.local_address is None:
        text = (
            f"no address of {host} is known that other nodes could reach: no interface "
            f"is derived for {network_env.GLOO} and {network_env.NCCL}, and torch "
            "listens on all interfaces"
        )
        found.append(Message("HPC057", text))
    elif interface and not interface.up:
        text = (
            f"interface {interface.name}, which has {here.local_address}, is down: no "
            "other node can reach this one by it. Report it, and leave this node out "
            "until then"
        )
        found.append(Message("HPC165", text))
    elif "local_addr" not in inputs.options and is_foreign(inputs, here.name):
        known = ", ".join(map(str, inputs.network.addresses_of(here.name)))
        text = (
            f"{here.name} is {known}, which no interface of this node has. Others are "
            f"told {here.local_address}; if they cannot reach that, this is a "
            "container with a network of its own: let it use the host's"
        )
        found.append(Message("HPC136", text))
    return tuple(found)


def is_foreign(inputs: Inputs, host: str) -> bool:
    """Return whether a name of this node has addresses, but none of its interfaces'."""
    known = inputs.network.addresses_of(host)
    return bool(known) and not any(map(inputs.network.owner, known))


def fail_together(launcher: Launcher) -> str:
    """Return which command and option end all tasks of a launch, if there are any."""
    option = launcher.fail_together
    return f"{option} ends all tasks when one fails" if option else ""


def place_of(job: Job) -> tuple[int, int]:
    """Return the rank of this node, and its index in the job's nodes.

    Raises:
        LaunchError: This process is on none of them.
    """
    if job.node_rank is None or job.index is None:
        raise LaunchError("HPC068", "this process is not on one of the job's nodes")
    return job.node_rank, job.index


def nested(environ: Mapping[str, str], run_id: str) -> LaunchError | None:
    """Return why a worker of a launch cannot launch for all its nodes once more.

    The variables of a worker alone prove nothing: sbatch passes them to another job.

    Args:
        environ: Environment of this process.
        run_id: Rendezvous id of the launch that this one would meet.
    """
    if not environ.get(RANK) or environ.get(RUN_ID) != run_id:
        return None
    return LaunchError(
        "HPC164",
        f"this was started inside worker {environ[RANK]} of the same launch "
        f"({RUN_ID}={run_id}), and would be one more of its agents or workers. For "
        "workers on this node alone type --standalone; otherwise take one of the two "
        "launchers out",
        others_know=True,  # its agents are at work
    )
