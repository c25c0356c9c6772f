"""PBS Pro and OpenPBS: the node file, and tasks of pbsdsh and pbs_tmrsh.

Sources: qsub(1B), pbsdsh(1B), OpenPBS's ``src/resmom/start_exec.c``, and jobs of a real
OpenPBS 23.06.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Setting, to_copy
from torchrun_hpc.schedulers.detector import (
    Allocation,
    Detector,
    Variables,
    hosts_in,
)
from torchrun_hpc.schedulers.job import (
    BY_NAME,
    LaunchContext,
    Launcher,
    Promise,
    Task,
    as_identifier,
)
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.pals import MPIEXEC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

# The job's number: 1473351.desched1, or 17[0].desched1 in an array.
JOB_ID = "PBS_JOBID"
# File of the job's hosts, with a line for each slot.
NODE_FILE = "PBS_NODEFILE"
# Kind of the job: PBS_BATCH or PBS_INTERACTIVE.
ENVIRONMENT = "PBS_ENVIRONMENT"
# Number of the task: 1 in the script, eight hexadecimal digits in tasks of pbsdsh and
# pbs_tmrsh.
TASK_NUMBER = "PBS_TASKNUM"
# Number of the host, right only in tasks of pbsdsh and pbs_tmrsh. The script has 0, and
# other launchers forward that.
NODE_NUMBER = "PBS_NODENUM"

# Number of threads, like OMP_NUM_THREADS. PBS sets both to the chunk's ompthreads,
# otherwise to its ncpus. It ignores mpiprocs. Source: OpenPBS's
# src/resmom/start_exec.c; seen with 23.06.
THREADS = "NCPUS"

_INTERACTIVE = "PBS_INTERACTIVE"  # a value of ENVIRONMENT

PBSDSH = Launcher(
    name="pbsdsh",
    template="pbsdsh -- {command}",
    ends_others=False,
    may_wait=True,
)

# Where PBS writes it. On the head node, pbsdsh does not set the variable.
USUAL_FILE = "/var/spool/pbs/aux/{}"
_NUMBER = r"[0-9]+(\[[0-9]*\])?"  # of a job, whose file is called NUMBER.SERVER

# It is unknown which mpiexec a script will use. Hydra (MPICH, Intel MPI) accepts PALS's
# options. Open MPI does not. If it was built without tm, it does not ask PBS for the
# hosts. There is no cpu_option: PALS and Hydra have different ones, and reject each
# other's. -x forwards the job's number, by which other nodes find the node file.
_WITH_NUMBER = f"${NODE_FILE} {MPIRUN.forward_option} {JOB_ID}"
_TO_MPIRUN = MPIRUN.once_per_node("{nodes}", "{command}", _WITH_NUMBER)
ANY_MPIEXEC = Launcher(
    name="mpiexec",
    template=MPIEXEC.template,
    other_template=f"{_TO_MPIRUN}   # with Open MPI",
)


def allocation(process: Process) -> Allocation:
    """Return the nodes of the PBS job."""
    pbs = Variables(process.environ, "PBS", "PBS_*")
    return _allocation(pbs, *_node_file(pbs, process, is_task=False))


def _allocation(pbs: Variables, lines: list[str], source: str) -> Allocation:
    """Return the nodes in the lines of a node file: one per slot, in any order."""
    number, _, _ = pbs.first(JOB_ID).partition(".")
    return Allocation(
        scheduler="PBS",
        launch_id=as_identifier(re.sub(r"\[([0-9]+)\]", r"_\1", number)),
        nodes=tuple(dict.fromkeys(lines)),
        provenance={"nodes": source, "launch_id": JOB_ID},
        host_file=f"${NODE_FILE}",
    )


def detect(process: Process) -> Job:
    """Describe the job of a script, or of a task that PBS itself started."""
    pbs = Variables(process.environ, "PBS", "PBS_*")
    is_task = bool(re.fullmatch("[0-9A-Fa-f]{8}", pbs.first(TASK_NUMBER)))
    lines, source = _node_file(pbs, process, is_task=is_task)
    job = _allocation(pbs, lines, source).job_of_script(process.hostname, ANY_MPIEXEC)
    if is_task:
        return _task(pbs, process, job, lines)
    if pbs.first(ENVIRONMENT) == _INTERACTIVE and job.node_rank is not None:
        context, node = LaunchContext.INTERACTIVE_STEP, job.nodes[job.node_rank]
        return replace(job, context=context, nodes=(node,), node_rank=0)
    return job


def promise(environ: Mapping[str, str]) -> Promise:
    """Return PBS's promises."""
    return Promise(threads=Setting(environ.get(THREADS, ""), f"{THREADS} is PBS's"))


def _task(pbs: Variables, process: Process, job: Job, lines: list[str]) -> Job:
    """Describe a task of pbsdsh or pbs_tmrsh, which set neither rank nor size."""
    nodes, source = job.nodes, job.provenance["nodes"]
    most = max(lines.count(node) for node in nodes)
    if most > 1:
        raise LaunchError(
            "HPC036",
            f"pbsdsh starts a task for each line of {source}, {most} on a node, and "
            "gives them no ranks. Select mpiprocs=1, or use mpiexec:"
            f"{to_copy(job.once_per_node(process.command))}",
            everywhere=True,
        )
    rank = pbs.integer(NODE_NUMBER) if pbs.first(NODE_NUMBER) else len(nodes)
    rank_source = NODE_NUMBER
    # The name comes first: numbers also count hosts without a line in the file.
    if job.node_rank is not None:
        rank, rank_source = job.node_rank, BY_NAME
    if rank >= len(nodes):
        raise LaunchError(
            "HPC037",
            f"{NODE_NUMBER}={pbs.first(NODE_NUMBER)}, and {process.hostname} is not "
            f"among the {len(nodes)} nodes of the job ({source}). Start this "
            f"with {ANY_MPIEXEC.name}",
        )
    return replace(
        job,
        context=LaunchContext.STEP,
        node_rank=rank,
        task=Task(rank, len(nodes)),
        started_by=PBSDSH,
        names_instance=False,
        provenance={
            **job.provenance,
            "tasks": source,
            "task": rank_source,
            "node_rank": rank_source,
        },
    )


def _node_file(
    pbs: Variables, process: Process, *, is_task: bool
) -> tuple[list[str], str]:
    """Return the lines of the node file, and its source.

    ``qsub -V`` inside another job forwards that job's variable. In pbsdsh's first task,
    PBS does not replace it, so in a task the files named after this job come first. A
    file named after another job never counts.
    """
    explicit, job = pbs.first(NODE_FILE), pbs.first(JOB_ID)
    folder, _, name = explicit.rpartition("/")
    number, _, server = name.partition(".")
    is_of_server = server == job.partition(".")[2]
    is_other = is_of_server and name != job and re.fullmatch(_NUMBER, number)
    usual = USUAL_FILE.format(job)
    named = [f"{folder}/{job}", usual] if folder else [usual]
    forwarded = [explicit] if explicit and not is_other else []
    for path in [*named, *forwarded] if is_task else [*forwarded, *named]:
        source = NODE_FILE if path == explicit else _shown(path)
        lines = hosts_in((process.read(path) or "").splitlines(), source)
        if lines:
            return lines, source
    shown = _shown(explicit or usual)
    if is_other:
        shown = f"{_shown(usual)} ({NODE_FILE}={shown} is another job's)"
    return [], shown


def _shown(path: str) -> str:
    return path if path.isprintable() else repr(path)


DETECTOR = Detector(
    name="PBS",
    markers=(JOB_ID,),
    rank=(NODE_NUMBER,),
    prefixes=("PBS_",),
    daemons=("pbs_mom",),
    launcher=ANY_MPIEXEC,
    detect=detect,
    allocation=allocation,
    promise=promise,
)
