"""Who started this process: one file per launcher or scheduler.

Launchers (mpirun and its like) have ``placement(process)``: which task this is, among
how many. The job's nodes and its number they get from the first of `SCHEDULERS` that
knows them. Schedulers have ``detect(process)``, for what they start themselves: srun's
tasks, a batch script, a shell.

Each is a pure function of a `Process`. It returns ``None`` when its variables are not
there, and raises `LaunchError` when they are there but contradict each other or cannot
be read: no network, no printing, no torch. Only a `Process` reads files, and talks to
a process manager.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import flux, hydra, lsf, openmpi, pals, pbs, pmi, slurm
from torchrun_hpc.schedulers.evidence import SCHEDULERS, weigh
from torchrun_hpc.schedulers.process import this_process
from torchrun_hpc.schedulers.task_layout import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.allocation import Allocation
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process
    from torchrun_hpc.schedulers.task_layout import TaskLayout


__all__ = [
    "detect",
    "environment",
    "is_first_task",
    "is_reporter",
    "nodes_of_job",
    "weigh",
]


def _placed(
    task_layout: Callable[[Process], TaskLayout | None], process: Process
) -> Job | None:
    """Take ranks from the launcher of this process, nodes and job from a scheduler."""
    place = task_layout(process)
    if place is None:
        return None
    return job_of(place, _allocation(process), process.hostname, process.command)


def _allocation(process: Process) -> Allocation | None:
    found = (one.allocation(process) for one in SCHEDULERS if one.allocation)
    return next(filter(None, found), None)


def nodes_of_job(process: Process) -> tuple[str, ...]:
    """Return the nodes of the scheduler's job, for a message; empty if not known."""
    try:
        found = _allocation(weigh(process))
    except LaunchError:
        return ()
    return found.nodes if found else ()


# Asked in this order, when `weigh` has removed what is left over, and the first that
# knows this process wins: whoever started it, not whoever started that. jsrun sets the
# variables of Open MPI too; Flux, and srun with Cray's plugin, those of PALS; mpirun
# and Flux run inside Slurm.
DETECTORS: tuple[Callable[[Process], Job | None], ...] = (
    partial(_placed, lsf.task_layout),
    partial(_placed, openmpi.task_layout),
    partial(_placed, hydra.task_layout),
    partial(_placed, flux.task_layout),
    slurm.detect,
    partial(_placed, pals.task_layout),
    pbs.detect,
    lsf.detect,
)

# In the same order: the rank, and what has to be there too.
_RANKS = (
    (lsf.RANK, lsf.RANK),
    (openmpi.RANK, openmpi.RANK),
    (pmi.RANK, hydra.LOCAL_RANK),
    (flux.RANK, flux.RANK),
    (slurm.TASK_RANK, slurm.STEP_NODES),
    (pals.RANK, pals.RANK),
    (pbs.NODE_NUMBER, pbs.NODE_NUMBER),
)


def detect(process: Process) -> Job | None:
    """Ask every source in order.

    Raises:
        LaunchError: The variables of a source are contradictory or unreadable, or there
            are those of several, and nothing shows whose count.
    """
    process = weigh(process)
    found = (source(process) for source in DETECTORS)
    return next((job for job in found if job is not None), None)


def environment() -> Mapping[str, str]:
    """Return the variables of this process without those that are left over.

    All of them, where nothing shows whose count.
    """
    process = this_process()
    try:
        return weigh(process).environ
    except LaunchError:
        return process.environ


def is_reporter(process: Process) -> bool:
    """Say whether this process reports what all tasks find; also if that is unclear."""
    try:
        return is_first_task(weigh(process).environ)
    except LaunchError:
        return True


def is_first_task(environ: Mapping[str, str]) -> bool:
    """Say whether these variables, of which none is left over, are the first task's."""
    ranks = (environ.get(name, "") for name, sign in _RANKS if environ.get(sign))
    return re.fullmatch("0*[1-9][0-9]{0,8}", next(ranks, "")) is None
