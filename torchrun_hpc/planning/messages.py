"""Messages that several modes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count, to_copy
from torchrun_hpc.options.command_line import variable_of
from torchrun_hpc.options.values import NONE, REQUIRE, SCHEDULER
from torchrun_hpc.planning import network_env
from torchrun_hpc.schedulers.job import LaunchContext, Launcher
from torchrun_hpc.variables import GLOO, NCCL, RANK, RUN_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchrun_hpc.planning.head_node import HeadNode
    from torchrun_hpc.planning.inputs import Inputs

NO_SCHEDULER = "no scheduler"

DIRECT_MODE = "in direct mode, where each task is a worker"


def title(inputs: Inputs, nodes: int) -> str:
    """Return the scheduler and the launch, for the start line."""
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
    line = to_copy(job.once_per_node(inputs.command, nodes=total))
    text = f"this is 1 of {total} nodes of the job. To use all of them, run:{line}"
    return (Message("HPC073", text),)


def unused(inputs: Inputs, reason: str, names: Iterable[str]) -> tuple[Message, ...]:
    """Return a note on each of our options that has no effect, with the reason.

    Modules set variables for all jobs, so there is no note on these. There is also none
    on an option that is switched off.
    """
    given = {name: inputs.options[name] for name in names if name in inputs.options}
    return tuple(
        Message("HPC077", f"{option} has no effect {reason}")
        for name, option in given.items()
        if option.value != NONE and variable_of(name) not in inputs.environ
    )


def unused_on_one_node(inputs: Inputs, reason: str) -> tuple[Message, ...]:
    """Return a note on each option that only works on several nodes of a job."""
    options, site = inputs.options, inputs.site
    is_useless = {
        "hpc_site": site is not None and not site.options,
        "hpc_rendezvous": options.hpc_rendezvous == SCHEDULER,
        "hpc_auth": options.hpc_auth == REQUIRE,
    }
    return unused(inputs, reason, [name for name in is_useless if is_useless[name]])


def warnings(inputs: Inputs, head: HeadNode, host: str) -> tuple[Message, ...]:
    """Return the problems of this node, ``host``, that the launch works around."""
    problems = [*head.warnings, *network_env.warnings(inputs)]
    address, name = head.local_address, head.local_name
    interface = inputs.network.owner(address)
    if address is None:
        text = (
            f"{host} has no known address that other nodes can reach, so "
            f"{GLOO} and {NCCL} are not set, and torch listens "
            "on all interfaces. In a container, use the host's network. Otherwise "
            "export both variables, and pass --local-addr"
        )
        problems.append(Message("HPC057", text))
    elif interface and not interface.up:
        text = (
            f"interface {interface.name}, which has {address}, is down, so no other "
            "node can reach this one. Report it to the centre, and exclude this node "
            "until it is repaired"
        )
        problems.append(Message("HPC165", text))
    elif "local_addr" not in inputs.options and is_foreign(inputs, name):
        used = f"The other nodes use {address}. If they cannot reach it"
        problems.append(foreign(inputs, name, used))
    return tuple(problems)


def foreign(inputs: Inputs, host: str, but: str) -> Message:
    """Return a warning that a name has only addresses of other machines.

    ``but`` begins the remedy.
    """
    network = inputs.network
    addresses = ", ".join(map(str, network.addresses_of(host)))
    text = (
        f"{host} resolves to {addresses}, which no interface of this node has "
        f"({network.own_addresses()}). {but}, let the container use the host's network"
    )
    return Message("HPC136", text)


def is_foreign(inputs: Inputs, host: str) -> bool:
    """Return whether a name of this node has only addresses of other machines."""
    addresses = inputs.network.addresses_of(host)
    return bool(addresses) and not any(map(inputs.network.owner, addresses))


def fail_together(launcher: Launcher) -> str:
    """Return the launcher's option that ends all tasks of a launch, if it has one."""
    option = launcher.fail_together
    return f"{option} ends all tasks when one fails" if option else ""


def nested(environ: Mapping[str, str], run_id: str) -> LaunchError | None:
    """Return why a worker of a launch cannot start the same launch again.

    The variables of a worker prove nothing without the id: sbatch forwards them to
    another job.
    """
    if not environ.get(RANK) or environ.get(RUN_ID) != run_id:
        return None
    text = (
        f"torchrun_hpc is already running: this is worker {environ[RANK]} of launch "
        f"{run_id} ({RUN_ID}). Pass --standalone to start workers on this node only, "
        "or remove one of the two launchers"
    )
    # The agents of this launch are at work.
    return LaunchError("HPC164", text, others_know=True)
