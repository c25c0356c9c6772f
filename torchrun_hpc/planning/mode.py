"""The mode of a launch: how it starts its workers, decided before torch is imported.

All nodes choose the same mode, from the whole step and the command line.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, count, to_copy
from torchrun_hpc.names import fold
from torchrun_hpc.options.command_line import NO_SCRIPT, OURS, wrong_line
from torchrun_hpc.schedulers.job import LaunchContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.options.command_line import CommandLine
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.schedulers.job import Job

# Direct mode accepts ours, and these of torchrun. PET_STANDALONE can be 0.
_OF_WORKER = ("module", "no_python", "virtual_local_rank")
_OF_DIRECT_MODE = {*OURS, *_OF_WORKER, "nproc_per_node", "standalone"}


class Mode(Enum):
    """A way to start the workers, and to let them meet."""

    ONE_NODE = "one node"  # an agent, as with torchrun --standalone
    SEVERAL_NODES = "several nodes"  # an agent on each node of a step
    MANUAL = "manual"  # an agent on each of several machines without a scheduler
    DIRECT = "direct"  # no agent: each task of a step is a worker
    DIRECT_ONE_NODE = "direct, one node"  # the same with all tasks on one node

    @property
    def is_direct(self) -> bool:
        """Whether each task is a worker, without an agent."""
        return self in {Mode.DIRECT, Mode.DIRECT_ONE_NODE}


def choose_mode(
    preflight: Preflight,
    line: CommandLine,
    count_workers: Callable[[Options], int] = lambda _: 1,
    *,
    has_agent: bool = False,
) -> Mode:
    """Choose the mode, or refuse the launch with the line to use instead.

    ``count_workers`` returns the number of workers of ``--nproc-per-node`` on this
    node. ``has_agent`` is set if a program has called torch's agent itself.
    """
    job, options = preflight.job, line.options
    is_one_node = options.asks_for_one_node
    if not is_one_node:
        check_started_right(preflight)
    if job is not None and job.has_several_tasks and not is_one_node:
        if has_agent:
            raise _several_agents(job, preflight.command, options)
        agents_command = job.once_per_node(preflight.command)
        if problem := direct_mode_problem(line, agents_command):
            raise problem
        if "nproc_per_node" in options and count_workers(options) > 1:
            raise _several_agents(job, preflight.command, options)
        return direct_mode(job)
    if options.problem is not None:
        raise options.problem
    if is_one_node:
        return Mode.ONE_NODE
    most = options.nnodes.high
    if job is None:
        return Mode.ONE_NODE if most == 1 else Mode.MANUAL
    return Mode.ONE_NODE if len(job.nodes) == most == 1 else Mode.SEVERAL_NODES


def check_started_right(preflight: Preflight) -> None:
    """Check that a launcher has started this process, if the job has several nodes."""
    job = preflight.job
    if preflight.problem is not None:
        raise preflight.problem
    if job is None:
        return
    line = to_copy(job.once_per_node(preflight.command))
    nodes, source = count(len(job.nodes), "node"), job.provenance["nodes"]
    if job.context is LaunchContext.ALLOCATION_SHELL:
        text = f"this shell is not on the job's {nodes} ({fold(job.nodes)} by {source})"
        text += f". Start the command there:{line}"
        raise LaunchError("HPC060", text, everywhere=True)
    if job.context is LaunchContext.BATCH_SCRIPT and len(job.nodes) > 1:
        text = (
            f"this is the batch script of a job of {nodes} ({source}), and runs on the "
            "first node only. Pass --standalone for this node alone, or start the "
            f"command on all nodes:{line}"
        )
        raise LaunchError("HPC061", text, everywhere=True)


def direct_mode(job: Job | None) -> Mode:
    """Return the mode in which each task of a step is a worker."""
    is_on_several = job is not None and len(job.nodes) > 1
    return Mode.DIRECT if is_on_several else Mode.DIRECT_ONE_NODE


def direct_mode_problem(line: CommandLine, agents_command: str) -> LaunchError | None:
    """Return why a command line does not work in direct mode, which has few options."""
    if line.problem is not None:
        return line.problem
    given = line.options.given.items()
    others = [str(s) for name, s in given if name not in _OF_DIRECT_MODE]
    refused = [*line.unknown, *others]
    if refused:
        text = (
            f"{refused[0]} does not work with one task per worker (direct mode). An "
            "option of the script must come after the script. To use an option of "
            f"torchrun, start one task per node:{to_copy(agents_command)}"
        )
        return LaunchError("HPC134", text, everywhere=True)
    if not line.options.script:
        return wrong_line(NO_SCRIPT)
    return line.options.problem


def _several_agents(job: Job, command: str, options: Options) -> LaunchError:
    wanted = options.given.get("nproc_per_node", "an agent")
    tasks, nodes = count(job.task.size, "task"), count(len(job.nodes), "node")
    text = (
        f"{job.launcher.name} started {tasks} on {nodes} ({job.provenance['tasks']}), "
        f"and {wanted} on each would start more workers. Remove --nproc_per_node to "
        "make each task a worker, pass --standalone for one world per task, or start "
        f"one task per node:{to_copy(job.once_per_node(command))}"
    )
    return LaunchError("HPC062", text, everywhere=True)
