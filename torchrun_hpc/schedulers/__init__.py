"""Recognition of the job: one file and one `Detector` per launcher or scheduler.

`weigh` removes stale variables; all other functions take its result. They are pure.
Only a `Process` reads files and asks a process manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import flux, hydra, jsrun, lsf, openmpi, pals, pbs, slurm
from torchrun_hpc.schedulers.detector import whole_number
from torchrun_hpc.schedulers.evidence import without_leftovers
from torchrun_hpc.schedulers.job import Promise
from torchrun_hpc.schedulers.launched_job import NO_SCHEDULER, launched_job
from torchrun_hpc.schedulers.process import WeighedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.schedulers.detector import Allocation, Detector
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

# The first that started this process wins. So a launcher comes before the scheduler in
# whose jobs it runs. One that also sets another's variables comes before that other.
# The first scheduler that knows the job's nodes supplies them.
DETECTORS: tuple[Detector, ...] = (
    jsrun.DETECTOR,  # also sets Open MPI's variables
    openmpi.DETECTOR,  # runs inside a Slurm, PBS or LSF job
    hydra.DETECTOR,  # the same
    flux.DETECTOR,  # the same; also sets PALS's variables
    slurm.DETECTOR,  # srun with Cray's plugin also sets PALS's variables
    pals.DETECTOR,  # runs inside a PBS job
    pbs.DETECTOR,
    lsf.DETECTOR,
)


def weigh(process: Process) -> WeighedProcess:
    """Return the process without stale variables; refuse an unclear choice."""
    return WeighedProcess(without_leftovers(process, DETECTORS))


def detect(process: WeighedProcess) -> Job | None:
    """Describe the job; ``None`` if no launcher or scheduler started this process."""
    for detector in DETECTORS:
        if detector.task_layout is not None and detector.has_rank(process.environ):
            layout = detector.task_layout(process)
            allocation = _allocation(process) or NO_SCHEDULER
            return launched_job(detector, layout, allocation, process)
        if detector.detect is not None and detector.is_set(process.environ):
            job = detector.detect(process)
            if job is not None:
                return job
    return None


def _allocation(process: WeighedProcess) -> Allocation | None:
    jobs = (
        detector.allocation(process)
        for detector in DETECTORS
        if detector.allocation is not None and detector.is_set(process.environ)
    )
    return next(filter(None, jobs), None)


def nodes_of_job(process: WeighedProcess) -> tuple[str, ...]:
    """Return the nodes of the scheduler's job, for a message; empty if unknown."""
    try:
        allocation = _allocation(process)
    except LaunchError:
        return ()
    return allocation.nodes if allocation else ()


def promise(process: WeighedProcess) -> Promise:
    """Return the scheduler's promises, whatever started this process."""
    environ = process.environ
    promises = (
        d.promise(environ) for d in DETECTORS if d.promise and d.is_set(environ)
    )
    return next(promises, Promise())


def job_number(environ: Mapping[str, str]) -> str:
    """Return the number of the scheduler's job; empty without one."""
    numbers = (d.number(environ) for d in DETECTORS if d.detect)
    return next(filter(None, numbers), "")


def task_rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank of this task; ``None`` if it has none, or the rank is unclear."""
    variable = next((d.rank[0] for d in DETECTORS if d.has_rank(environ)), "")
    return whole_number(environ.get(variable, ""))
