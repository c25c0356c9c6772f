"""Whose variables count, where there are those of several schedulers or launchers.

An environment is handed on: ``qsub -V`` or ``sbatch`` in a shell inside another job,
or inside a task of mpirun, leaves the variables of that in the new one. What they say
is compared with what can be seen: which daemon is above this process, and whether this
host is one of the job's. In a container with process numbers of its own, or where the
processes of others are hidden, mostly the host is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import flux, hydra, lsf, openmpi, pbs, slurm
from torchrun_hpc.schedulers.job import node_index, same_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.schedulers.allocation import Allocation
    from torchrun_hpc.schedulers.process import Process


@dataclass(frozen=True)
class Starter:
    """A scheduler or a launcher that may have started this process.

    Attributes:
        name: Its name, as a person writes it.
        signs: Variables of which it sets one at least.
        prefix: Beginning of the names of its variables.
        daemons: Names of the processes with which it starts others; empty if they are
            not known, so that their absence shows nothing.
        allocation: Returns the job's nodes; ``None`` for a launcher.
    """

    name: str
    signs: tuple[str, ...]
    prefix: str
    daemons: frozenset[str] = frozenset()
    allocation: Callable[[Process], Allocation | None] | None = None

    def is_set(self, process: Process) -> bool:
        """Say whether its variables are there."""
        return any(process.environ.get(name) for name in self.signs)

    def shown(self, process: Process) -> str:
        """Write its name, and the first of its variables."""
        name = next(name for name in self.signs if process.environ.get(name))
        return f"{self.name} ({name}={process.environ[name][:_SHOWN]!r})"


# How much of a value a message quotes.
_SHOWN = 40

# psid is ParaStation's, which stands in for slurmd at Jülich.
SLURM = Starter(
    "Slurm",
    (*slurm.JOB_ID, slurm.STEP_NODES),
    "SLURM",
    frozenset({"slurmstepd", "salloc", "psid", "psidforwarder"}),
    slurm.allocation,
)
SCHEDULERS = (
    SLURM,
    Starter("PBS", (pbs.JOB_ID,), "PBS_", frozenset({"pbs_mom"}), pbs.allocation),
    Starter(
        "LSF",
        (lsf.JOB_ID,),
        "LSB_",
        frozenset({"res", "sbatchd", "blaunch", "jsmd"}),
        lsf.allocation,
    ),
)
LAUNCHERS = (
    Starter(
        "Open MPI",
        (openmpi.RANK,),
        "OMPI_",
        frozenset(
            {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prte", "prted"}
        ),
    ),
    Starter(
        "Hydra",
        (hydra.LOCAL_RANK,),
        "MPI_LOCAL",
        frozenset({"hydra_pmi_proxy", "hydra_bstrap_pr"}),
    ),
    Starter("Flux", (flux.RANK,), "FLUX_", frozenset({"flux-shell"})),
)


def weigh(process: Process) -> Process:
    """Return the process without the variables that are left over.

    Raises:
        LaunchError: There are those of several, and nothing shows whose count.
    """
    jobs = [one for one in SCHEDULERS if one.is_set(process)]
    if len(jobs) > 1:
        jobs, others = _started_by(jobs, process)
        process = _without(others, process)
    launchers = [one for one in LAUNCHERS if one.is_set(process)]
    # mpirun inside a job is no contradiction, unless the scheduler is the nearer one.
    nearest = _nearest([*launchers, *jobs], process)
    if nearest is not None:
        return _without([one for one in launchers if one is not nearest], process)
    if len(launchers) > 1:
        raise _unclear(launchers, process, "no process above this one is theirs")
    return process


def _started_by(
    jobs: Sequence[Starter], process: Process
) -> tuple[list[Starter], list[Starter]]:
    """Return the scheduler of this process, and those whose variables are left over.

    Raises:
        LaunchError: Nothing shows it.
    """
    found = _nearest(jobs, process)
    if found is None:
        places = [(one, _is_here(one, process)) for one in jobs]
        here = [one for one, is_here in places if is_here]
        where = "several" if here else "none"
        if SLURM in here and len({_number(one, process) for one in here}) == 1:
            here = [SLURM]  # one job: a site's prolog sets the variables of the others
        elif not here and not process.may_be_renamed:
            # PBS writes the node file for the first host only.
            here = [one for one, is_here in places if is_here is None]
        if len(here) != 1:
            text = f"{process.hostname} is seen to be a node of {where} of them"
            raise _unclear(jobs, process, text)
        (found,) = here
    return [found], [one for one in jobs if one is not found]


def _nearest(starters: Sequence[Starter], process: Process) -> Starter | None:
    """Return the one whose process is the nearest above this one, if any shows."""
    is_here = SLURM in starters and _is_on_slurms_node(process)
    # What Slurm itself has started, where slurmstepd, which is root's, is hidden.
    task = process.environ.get(slurm.TASK_PID) if is_here else None
    above = zip_longest(process.ancestors, process.ancestor_pids, fillvalue="")
    for name, pid in [("", process.pid), *above]:
        for one in starters:
            if str(name).partition(".")[0] in one.daemons:
                return one
        if task and str(pid) == task:
            return SLURM
    return None


def _is_on_slurms_node(process: Process) -> bool:
    return same_host(process.environ.get(slurm.NODE_NAME, ""), process.hostname)


def _is_here(one: Starter, process: Process) -> bool | None:
    """Say whether this host is one of the job's; ``None`` if these are not known."""
    if one is SLURM and _is_on_slurms_node(process):
        return True
    try:
        found = one.allocation(process) if one.allocation else None
    except LaunchError:
        return None
    if found is None or not found.nodes:
        return None
    return node_index(process.hostname, found.nodes) is not None


def _number(one: Starter, process: Process) -> str:
    """Return the number of its job: of ``1473351.desched1`` the first part."""
    found = (process.environ.get(name) for name in one.signs)
    return next(filter(None, found), "").partition(".")[0]


def _without(starters: Sequence[Starter], process: Process) -> Process:
    prefixes = tuple(one.prefix for one in starters)
    kept = {k: v for k, v in process.environ.items() if not k.startswith(prefixes)}
    return replace(process, environ=kept) if prefixes else process


def _unclear(starters: Sequence[Starter], process: Process, reason: str) -> LaunchError:
    names = " and of ".join(one.shown(process) for one in starters)
    unset = "; or ".join(f"unset ${{!{one.prefix}*}}" for one in starters)
    return LaunchError(
        "HPC142",
        f"there are variables of {names}, and nothing shows whose count: {reason}. An "
        "environment is handed on by qsub -V, sbatch or a container. Remove those that "
        f"are left over, in bash: {unset}",
    )
