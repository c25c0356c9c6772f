"""The first stage: the facts of this process and its job, without torch."""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc import limits, schedulers
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.host import procfs
from torchrun_hpc.names import fold
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.job import Promise
from torchrun_hpc.schedulers.process import this_process
from torchrun_hpc.variables import MASTER_ADDR

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process


@dataclass(frozen=True)
class Preflight:
    """The facts of this process: its environment, and its job.

    A launch on one node needs no job, so ``problem`` is not raised yet. ``promise`` is
    the scheduler's, even if a launcher started this process.
    """

    job: Job | None
    problem: LaunchError | None  # why the job is unclear
    environ: Mapping[str, str]  # without stale variables
    hostname: str
    command: str  # of the user, for messages
    promise: Promise = field(default_factory=Promise)
    task_rank: int | None = None  # ``None`` without a rank, or if it is unclear

    @property
    def site_host(self) -> str:
        """Host name by which the site is recognised, equal on all nodes of a job."""
        return self.job.first_known_node if self.job else self.hostname


def preflight(command: str, tell: Callable[[Message], None] | None = None) -> Preflight:
    """Return the facts of this process.

    With ``tell``, which reports a wait, the tasks exchange host names if they have a
    process manager (PMI). All tasks must do this, so it is only for a launch.
    """
    exchange = functools.partial(_exchange, tell) if tell else None
    return of_process(this_process(exchange, command))


def of_process(process: Process) -> Preflight:
    """Return the facts of a process; see `preflight`."""
    facts = Preflight(None, None, process.environ, process.hostname, process.command)
    try:
        weighed = schedulers.weigh(process)
        facts = replace(
            facts,
            environ=weighed.environ,
            promise=schedulers.promise(weighed),
            task_rank=schedulers.task_rank(weighed.environ),
        )
        return replace(facts, job=schedulers.detect(weighed))
    except LaunchError as fault:
        return replace(facts, problem=fault)


def _exchange(
    tell: Callable[[Message], None], environ: Mapping[str, str]
) -> pmi.Exchanged | None:
    def wait(seconds: float) -> None:
        tasks = f"{_other_tasks(environ)} to start"
        if seconds > limits.JOIN_TIMEOUT:
            raise LaunchError(
                "HPC166",
                f"waited {seconds:.0f} s for {tasks}. One of them has ended, or its "
                "node does not answer. Look at what each node printed. The launcher "
                "must start torchrun_hpc in all of its tasks",
            )
        if not schedulers.task_rank(environ):
            text = f"waiting for {tasks}, {seconds:.0f} s so far. The limit is "
            tell(Message("HPC131", f"{text}{limits.JOIN_TIMEOUT} s"))

    # All machines may be called localhost.
    boot = procfs.read(procfs.BOOT_ID) or ""
    exchanged = pmi.exchange(environ, socket.gethostname(), wait, boot)
    if exchanged is None and pmi.is_announced(environ):
        name = pmi.DESCRIPTOR if environ.get(pmi.DESCRIPTOR) else pmi.PORT
        raise LaunchError(
            "HPC138",
            f"{name}={environ[name]} does not lead to a process manager that answers, "
            "so the tasks cannot exchange their hosts. Perhaps a container or wrapper "
            f"has closed the connection. Keep it open, or unset {name} and export "
            f"{MASTER_ADDR}",
        )
    return exchanged


def _other_tasks(environ: Mapping[str, str]) -> str:
    tasks = count(int(environ[pmi.SIZE]) - 1, "other task")
    nodes = schedulers.nodes_of_job(schedulers.weigh(this_process()))
    return f"{tasks} on the nodes of the job ({fold(nodes)})" if nodes else tasks
