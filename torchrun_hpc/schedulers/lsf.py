"""IBM Spectrum LSF, and jsrun. Not tried on the real thing: from documentation.

Sources: IBM's "Environment variables set for job execution", and its "jsrun" page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.allocation import (
    Allocation,
    as_launch_id,
    hosts_in,
    script,
    unique,
)
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.process import Variables
from torchrun_hpc.schedulers.task_layout import TaskLayout

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

JOB_ID = "LSB_JOBID"
ARRAY_INDEX = "LSB_JOBINDEX"  # 0 if the job is no array
# One host on a line for each slot, or host and number of slots. LSB_HOSTS is empty
# where it would be too long.
HOST_FILES = ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")
HOST_COUNTS = "LSB_MCPU_HOSTS"
HOSTS = "LSB_HOSTS"

RANK = "JSM_NAMESPACE_RANK"
SIZE = "JSM_NAMESPACE_SIZE"
LOCAL_RANK = "JSM_NAMESPACE_LOCAL_RANK"
LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_SIZE"
INSTANCE = "PMIX_NAMESPACE"

# Of systems with jsrun. There the first host is that of the script, and no task runs
# on it.
JSRUN_JOB = "CSM_ALLOCATION_ID"

JSRUN = Launcher(
    name="jsrun",
    line="jsrun --nrs={nodes} --rs_per_host=1 --tasks_per_rs=1 --cpu_per_rs=ALL_CPUS "
    "--gpu_per_rs=ALL_GPUS {command}",
    cpus="--bind=none",
    block="--launch_distribution=packed",
)


def task_layout(process: Process) -> TaskLayout | None:
    """Say where jsrun has put this task; ``None`` if it did not start it.

    Raises:
        LaunchError: The variables are there but cannot be read.
    """
    jsm = Variables(process.environ, "jsrun", "JSM_* and LSB_*")
    if not jsm.first(RANK):
        return None
    return TaskLayout(
        name="jsrun",
        launcher=JSRUN,
        task=jsm.task(RANK, SIZE, LOCAL_RANK, LOCAL_SIZE),
        provenance={"tasks": SIZE, "task": RANK, "launch_id": INSTANCE},
        instance=jsm.first(INSTANCE),
    )


def allocation(process: Process) -> Allocation | None:
    """Return the nodes of the LSF job; ``None`` if there is none."""
    lsf = Variables(process.environ, "LSF", "LSB_*")
    if not lsf.first(JOB_ID):
        return None
    hosts, source = _hosts(lsf, process)
    if lsf.first(RANK, JSRUN_JOB):
        hosts = hosts[1:]
    launch_id, by = lsf.first(JOB_ID), JOB_ID
    if lsf.first(ARRAY_INDEX) not in {"", "0"}:
        launch_id, by = f"{launch_id}_{lsf.first(ARRAY_INDEX)}", f"{by}, {ARRAY_INDEX}"
    return Allocation(
        scheduler="LSF",
        launch_id=as_launch_id(launch_id),
        nodes=hosts,
        provenance={"nodes": source, "launch_id": by},
        host_file=f"${HOST_FILES[1]}",
    )


def detect(process: Process) -> Job | None:
    """Describe the LSF job of a script; ``None`` if this is none.

    Raises:
        LaunchError: The variables are there but cannot be read.
    """
    found = allocation(process)
    if found is None:
        return None
    if not found.nodes:
        raise LaunchError(
            "HPC139",
            f"{JOB_ID}={found.launch_id}, but the job's hosts cannot be read "
            f"({', '.join([*HOST_FILES, HOST_COUNTS, HOSTS])}). In a container, let "
            "these through; or type --standalone for one node",
        )
    is_jsrun = bool(process.environ.get(JSRUN_JOB))
    return script(found, process.hostname, JSRUN if is_jsrun else MPIRUN)


def _hosts(lsf: Variables, process: Process) -> tuple[tuple[str, ...], str]:
    """Return the hosts of the job, each once, and what names them."""
    for name in HOST_FILES:
        text = process.read(lsf.first(name)) if lsf.first(name) else None
        hosts = hosts_in((text or "").splitlines(), name, counts=True)
        if hosts:
            return unique(hosts), name
    name = HOST_COUNTS if lsf.first(HOST_COUNTS) else HOSTS
    words = lsf.first(name).split()
    words = words[::2] if name == HOST_COUNTS else words
    return unique(hosts_in(words, name)), name
