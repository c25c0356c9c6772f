"""The choice between variables of several schedulers or launchers.

If ``qsub -V`` or ``sbatch`` runs inside another job or an mpirun task, it passes that
job's variables to the new job. Two facts decide: which daemon is above this process,
and whether this host is one of the job's. If a container or the system hides processes,
usually only the host is left.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, to_copy
from torchrun_hpc.schedulers.job import node_index, same_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.schedulers.detector import Detector
    from torchrun_hpc.schedulers.process import Process


def without_leftovers(process: Process, detectors: Sequence[Detector]) -> Process:
    """Return the process without stale variables; refuse an unclear choice."""
    present = [d for d in detectors if d.daemons and d.is_set(process.environ)]
    launchers = [detector for detector in present if detector.task_layout]
    schedulers = [detector for detector in present if detector.detect]
    if len(schedulers) > 1:
        scheduler = _scheduler(schedulers, process)
        process = _without([s for s in schedulers if s is not scheduler], process)
        schedulers = [scheduler]
    # mpirun inside a job is no contradiction, unless the scheduler is nearer.
    if nearest := _nearest([*launchers, *schedulers], process):
        return _without([each for each in launchers if each is not nearest], process)
    if len(launchers) > 1:
        raise _unclear(launchers, process, "no parent process belongs to one of them")
    return process


def _scheduler(schedulers: Sequence[Detector], process: Process) -> Detector:
    if nearest := _nearest(schedulers, process):
        return nearest
    has_host = [(scheduler, _has_host(scheduler, process)) for scheduler in schedulers]
    owners = [scheduler for scheduler, has in has_host if has]
    if len({s.number(process.environ).partition(".")[0] for s in owners}) == 1:
        return owners[0]  # one job: a site's prolog sets the others' variables
    unknown = [scheduler for scheduler, has in has_host if has is None]
    # PBS writes the node file only on the head node.
    if len(unknown) == 1 and not owners and not process.may_be_renamed:
        return unknown[0]
    number = "several" if owners else "none"
    text = f"{process.hostname} appears to be a node of {number} of them"
    raise _unclear(schedulers, process, text)


def _nearest(detectors: Sequence[Detector], process: Process) -> Detector | None:
    """Return the detector whose daemon or task is nearest to this process, if any."""
    above = zip_longest(process.ancestors, process.ancestor_pids, fillvalue="")
    for name, pid in [("", process.pid), *above]:
        for detector in detectors:
            is_daemon = str(name).partition(".")[0] in detector.daemons
            # A started task is proof even if the daemon, which is root's, is hidden.
            if is_daemon or (pid and str(pid) == _task_pid(detector, process)):
                return detector
    return None


def _task_pid(detector: Detector, process: Process) -> str:
    """Return the pid of the task that it started on this node; empty without one."""
    is_on_node = _is_on_its_node(detector, process)
    return process.environ.get(detector.task_pid, "") if is_on_node else ""


def _is_on_its_node(detector: Detector, process: Process) -> bool:
    node = process.environ.get(detector.node_name, "")
    return bool(node) and same_host(node, process.hostname)


def _has_host(scheduler: Detector, process: Process) -> bool | None:
    """Return whether this host is a node of a scheduler's job; ``None`` if unknown."""
    if _is_on_its_node(scheduler, process):
        return True
    try:
        job = scheduler.allocation(process) if scheduler.allocation else None
    except LaunchError:
        return None
    nodes = job.nodes if job else ()
    return node_index(process.hostname, nodes) is not None if nodes else None


def _without(detectors: Sequence[Detector], process: Process) -> Process:
    """Return the process without the variables of these detectors."""
    prefixes = tuple(prefix for d in detectors for prefix in d.prefixes)
    kept = {k: v for k, v in process.environ.items() if not k.startswith(prefixes)}
    return replace(process, environ=kept) if prefixes else process


def _unclear(detectors: Sequence[Detector], process: Process, why: str) -> LaunchError:
    names = " and ".join(d.shown(process.environ) for d in detectors)
    bash = [" ".join(f"${{!{p}*}}" for p in d.prefixes) for d in detectors]
    unset = to_copy("\n".join(f"unset {variables}" for variables in bash))
    return LaunchError(
        "HPC142",
        f"the variables of both {names} are set, and it is not clear which job this "
        f"is: {why}. qsub -V, sbatch or a container can pass stale variables on. "
        f"Remove those of the other job, in bash with one of these lines:{unset}",
    )
