"""The first stage: look at this process, and at the job that it belongs to.

It starts nothing, and imports no torch.
"""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.host import procfs
from torchrun_hpc.names import fold
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.job import Promise
from torchrun_hpc.schedulers.process import this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

# Seconds in which all tasks have to start, and all nodes to join. Torch's 600 are too
# few for a container that is pulled, or a Python that is imported from a busy file
# system, on hundreds of nodes.
JOIN_TIMEOUT = 900


@dataclass(frozen=True)
class Preflight:
    """The facts of this process: its environment, and its job.

    Attributes:
        job: What the scheduler says; ``None`` without one.
        problem: Why the job could not be found out; not raised yet, because a user who
            asks for one node needs no job.
        environ: Environment of this process, without the variables that another job
            or launcher has left over.
        hostname: Name of this machine.
        command: The user's command, for messages.
        promise: What the scheduler promises, also if it did not start this process.
        task_rank: Rank of this task; ``None`` without one, and where it is unclear.
    """

    job: Job | None
    problem: LaunchError | None
    environ: Mapping[str, str]
    hostname: str
    command: str
    promise: Promise = field(default_factory=Promise)
    task_rank: int | None = None

    @property
    def site_host(self) -> str:
        """Name by which the site is recognised: all nodes of a job have the same."""
        return self.job.a_node if self.job else self.hostname


def preflight(command: str, tell: Callable[[Message], None] | None = None) -> Preflight:
    """Look at this process.

    Args:
        command: The user's command, for messages.
        tell: Reports that other tasks are waited for. With it, the tasks exchange names
            if they have a process manager (PMI): all of them have to, so it is for a
            launch only.
    """
    exchange = functools.partial(_exchange, tell) if tell else None
    return of_process(this_process(exchange, command))


def of_process(process: Process) -> Preflight:
    """Find out to which job a process belongs, if to any."""
    seen = Preflight(None, None, process.environ, process.hostname, process.command)
    try:
        weighed = schedulers.weigh(process)
        seen = replace(
            seen,
            environ=weighed.environ,
            promise=schedulers.promise(weighed),
            task_rank=schedulers.task_rank(weighed.environ),
        )
        return replace(seen, job=schedulers.detect(weighed))
    except LaunchError as fault:
        return replace(seen, problem=fault)


def _exchange(
    tell: Callable[[Message], None], environ: Mapping[str, str]
) -> pmi.Exchanged | None:
    """Ask the process manager, and say so if others are late.

    Raises:
        LaunchError: There should be one, and it does not answer.
    """

    def wait(seconds: float) -> None:
        waited = f"for {_other_tasks(environ)} to start, for {seconds:.0f} s"
        if seconds > JOIN_TIMEOUT:
            raise LaunchError(
                "HPC166",
                f"waited {waited}: one of them has ended, or its node does not answer. "
                "Look at what each node printed. The launcher must start torchrun_hpc "
                "in all of its tasks",
            )
        if not schedulers.task_rank(environ):
            text = f"waiting {waited}; the limit is {JOIN_TIMEOUT} s"
            tell(Message("HPC131", text))

    # Machines may all be called localhost.
    boot = procfs.read(procfs.BOOT_ID) or ""
    exchanged = pmi.exchange(environ, socket.gethostname(), wait, boot)
    if exchanged is None and pmi.is_announced(environ):
        name = pmi.DESCRIPTOR if environ.get(pmi.DESCRIPTOR) else pmi.PORT
        raise LaunchError(
            "HPC138",
            f"{name}={environ[name]} does not lead to a process manager that answers, "
            "so the tasks cannot exchange their hosts. Perhaps a container or wrapper "
            "has closed it. Pass it on, or unset it and export MASTER_ADDR",
        )
    return exchanged


def _other_tasks(environ: Mapping[str, str]) -> str:
    """Return the number of other tasks, and the nodes on which they may be."""
    tasks = count(int(environ[pmi.SIZE]) - 1, "other task")
    nodes = schedulers.nodes_of_job(schedulers.weigh(this_process()))
    return f"{tasks} on the nodes of the job ({fold(nodes)})" if nodes else tasks
