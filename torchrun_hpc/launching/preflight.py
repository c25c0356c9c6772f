"""The first stage: look at this process, and at the job that it belongs to.

It starts nothing, and imports no torch.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.host import procfs
from torchrun_hpc.planning.preflight import Preflight
from torchrun_hpc.planning.several_nodes import JOIN_TIMEOUT
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.reporter import is_reporter
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.process import this_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.schedulers.process import Process

# How many names of nodes a message quotes.
_SHOWN = 10


def preflight(command: str, *, exchange: bool = False) -> Preflight:
    """Look at this process.

    Args:
        command: The command as typed, for messages.
        exchange: Whether to exchange names with the other tasks, where they have a
            process manager (PMI). All of them have to, and wait for each other, so it
            is for a launch only.
    """
    return of_process(this_process(_exchange if exchange else None, command))


def of_process(process: Process) -> Preflight:
    """Find out to which job a process belongs, if to any."""
    job, problem, environ, rank = None, None, process.environ, None
    try:
        weighed = schedulers.weigh(process)
        environ = weighed.environ
        rank = schedulers.task_rank(environ)
        job = schedulers.detect(weighed)
    except LaunchError as fault:
        problem = fault
    return Preflight(job, problem, environ, process.hostname, process.command, rank)


def _exchange(environ: Mapping[str, str]) -> pmi.Exchanged | None:
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
                "Look at what each node said. The launcher has to start torchrun_hpc "
                "in all of its tasks",
            )
        if is_reporter(schedulers.task_rank(environ) or 0):
            text = f"waiting {waited}; the limit is {JOIN_TIMEOUT} s"
            console.write(Message("HPC131", text))

    # Machines may all be called localhost.
    boot = procfs.read(procfs.BOOT_ID) or ""
    exchanged = pmi.exchange(environ, socket.gethostname(), wait, boot)
    if exchanged is None and pmi.is_announced(environ):
        name = pmi.DESCRIPTOR if environ.get(pmi.DESCRIPTOR) else pmi.PORT
        raise LaunchError(
            "HPC138",
            f"{name}={environ[name]} does not lead to a process manager that answers, "
            "so that the tasks cannot tell each other where they are: has a container "
            "or a wrapper closed it? Let it through; or unset it, and export "
            "MASTER_ADDR",
        )
    return exchanged


def _other_tasks(environ: Mapping[str, str]) -> str:
    """Say how many other tasks there are, and on which nodes they may be."""
    tasks = count(int(environ[pmi.SIZE]) - 1, "other task")
    nodes = schedulers.nodes_of_job(schedulers.weigh(this_process()))
    if not nodes:
        return tasks
    shown = ", ".join(nodes[:_SHOWN]) + (", ..." if len(nodes) > _SHOWN else "")
    return f"{tasks} on the nodes of the job ({shown})"
