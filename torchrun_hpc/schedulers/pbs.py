"""PBS Pro and OpenPBS: the node file, and tasks that pbsdsh and pbs_tmrsh start.

Sources: qsub(1B), pbsdsh(1B), OpenPBS's ``src/resmom/start_exec.c``, and what jobs of
a real OpenPBS 23.06 have seen.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.allocation import (
    Allocation,
    as_launch_id,
    hosts_in,
    script,
    unique,
)
from torchrun_hpc.schedulers.job import (
    BY_NAME,
    LaunchContext,
    Launcher,
    Task,
    node_index,
)
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.pals import MPIEXEC
from torchrun_hpc.schedulers.process import Variables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

JOB_ID = "PBS_JOBID"  # 1473351.desched1, 17[0].desched1 in an array
NODE_FILE = "PBS_NODEFILE"
ENVIRONMENT = "PBS_ENVIRONMENT"
INTERACTIVE = "PBS_INTERACTIVE"

# 1 in the script, eight hexadecimal digits in what pbsdsh and pbs_tmrsh start.
TASK_NUMBER = "PBS_TASKNUM"
# Number of this host, in tasks of pbsdsh and pbs_tmrsh only: whoever forwards the
# script's environment forwards its 0.
NODE_NUMBER = "PBS_NODENUM"

# Where PBS writes it. pbsdsh does not set the variable on the first node.
USUAL_FILE = "/var/spool/pbs/aux/{}"

# A script does not show which one it will use. Hydra (MPICH, Intel MPI) takes PALS's
# options, Open MPI does not; without tm it does not ask PBS either. To bind to no CPU,
# PALS and Hydra have different options, and neither takes the other's.
_TO_MPIRUN = MPIRUN.once_on_each("{nodes}", "{command}", f"${NODE_FILE}")
ANY_MPIEXEC = Launcher(
    name="mpiexec",
    line=f"{MPIEXEC.line}   (with Open MPI: {_TO_MPIRUN})",
    cpus="",
    block="",
)


def allocation(process: Process) -> Allocation | None:
    """Return the nodes of the PBS job; ``None`` if there is none.

    The file has one line for each slot: a host may be there several times, also with
    others between. On the other nodes it need not be readable.
    """
    pbs = Variables(process.environ, "PBS", "PBS_*")
    return _allocation(pbs, *_node_file(pbs, process)) if pbs.first(JOB_ID) else None


def _allocation(pbs: Variables, lines: Sequence[str], source: str) -> Allocation:
    number, _, _ = pbs.first(JOB_ID).partition(".")
    return Allocation(
        scheduler="PBS",
        launch_id=as_launch_id(re.sub(r"\[([0-9]+)\]", r"_\1", number)),
        nodes=unique(lines),
        provenance={"nodes": source, "launch_id": JOB_ID},
        host_file=f"${NODE_FILE}",
    )


def detect(process: Process) -> Job | None:
    """Describe the job of a script, or of a task that PBS itself has started.

    Returns:
        The job; ``None`` without one, and in a login into one of its nodes.

    Raises:
        LaunchError: The variables are there but cannot be read, or do not say how many
            tasks there are.
    """
    pbs = Variables(process.environ, "PBS", "PBS_*")
    if not pbs.first(JOB_ID):
        return None
    lines, source = _node_file(pbs, process)
    found = _allocation(pbs, lines, source)
    if not found.nodes:
        raise LaunchError(
            "HPC035",
            f"{found.provenance['nodes']} cannot be read here, and names the nodes of PBS "
            f"job {found.launch_id}. In a container, mount its folder; or start this "
            "with mpiexec, or type --standalone for one node",
        )
    if re.fullmatch("[0-9A-Fa-f]{8}", pbs.first(TASK_NUMBER)):
        return _task(pbs, process, found, lines)
    is_shell = pbs.first(ENVIRONMENT) == INTERACTIVE
    job = script(found, process.hostname, ANY_MPIEXEC)
    if is_shell and job.node_rank is not None:
        here = job.nodes[job.node_rank]
        start = LaunchContext.INTERACTIVE_STEP
        return replace(job, start=start, nodes=(here,), node_rank=0)
    return job


def _task(
    pbs: Variables, process: Process, found: Allocation, lines: Sequence[str]
) -> Job:
    """Describe a task of pbsdsh or pbs_tmrsh, which gets no rank and no size."""
    source = found.provenance["nodes"]
    most = max(lines.count(node) for node in found.nodes)
    if most > 1:
        raise LaunchError(
            "HPC036",
            f"pbsdsh starts a task for each line of {source}, {most} on a node, and "
            "tells them no ranks. Select mpiprocs=1, or type: "
            f"{ANY_MPIEXEC.once_on_each(len(found.nodes), process.command)}",
            everywhere=True,
        )
    number = pbs.integer(NODE_NUMBER) if pbs.first(NODE_NUMBER) else -1
    # The name first: numbers count hosts, too, that have no line in the file.
    by_name = node_index(process.hostname, found.nodes)
    rank, rank_source = number, NODE_NUMBER
    if by_name is not None:
        rank, rank_source = by_name, BY_NAME
    if not 0 <= rank < len(found.nodes):
        raise LaunchError(
            "HPC037",
            f"{NODE_NUMBER}={pbs.first(NODE_NUMBER)}, and {process.hostname} is not "
            f"among the {len(found.nodes)} nodes of the job ({source}). Start this "
            f"with {ANY_MPIEXEC.name}",
        )
    job = script(found, process.hostname, ANY_MPIEXEC)
    return replace(
        job,
        start=LaunchContext.STEP,
        node_rank=rank,
        task=Task(rank, len(found.nodes)),
        provenance={
            **found.provenance,
            "tasks": source,
            "task": rank_source,
            "node_rank": rank_source,
        },
    )


def _node_file(pbs: Variables, process: Process) -> tuple[list[str], str]:
    """Return the lines of the node file, and which it is."""
    usual = USUAL_FILE.format(pbs.first(JOB_ID))
    shown = usual if usual.isprintable() else repr(usual)
    for path, source in ((pbs.first(NODE_FILE), NODE_FILE), (usual, shown)):
        text = process.read(path) if path else None
        lines = hosts_in((text or "").splitlines(), source)
        if lines:
            return lines, source
    path = pbs.first(NODE_FILE) or usual
    return [], path if path.isprintable() else repr(path)
