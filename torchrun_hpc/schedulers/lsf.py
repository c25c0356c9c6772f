"""IBM Spectrum LSF: written from documentation, not tried with a real one.

Source: IBM's "Environment variables set for job execution".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import jsrun
from torchrun_hpc.schedulers.detector import (
    Allocation,
    Detector,
    Variables,
    hosts_in,
)
from torchrun_hpc.schedulers.job import as_identifier
from torchrun_hpc.schedulers.openmpi import MPIRUN

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process

# The job's number.
JOB_ID = "LSB_JOBID"
# Place of the job in its array, or 0 without an array.
ARRAY_INDEX = "LSB_JOBINDEX"
# Files of the job's hosts. Each line is a host per slot, or a host and its number of
# slots.
HOST_FILES = ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE")
# The job's hosts, each with its number of slots.
HOST_COUNTS = "LSB_MCPU_HOSTS"
# The job's hosts, one per slot. LSF leaves it empty if it would be too long.
HOSTS = "LSB_HOSTS"


def allocation(process: Process) -> Allocation:
    """Return the nodes of the LSF job."""
    lsf = Variables(process.environ, "LSF", "LSB_*")
    hosts, source = _hosts(lsf, process)
    if lsf.first(jsrun.RANK, jsrun.ALLOCATION_ID):
        hosts = hosts[1:]  # only the script runs on the first one
    launch_id, id_source = lsf.first(JOB_ID), JOB_ID
    if lsf.first(ARRAY_INDEX) not in {"", "0"}:
        launch_id += f"_{lsf.first(ARRAY_INDEX)}"
        id_source += f", {ARRAY_INDEX}"
    return Allocation(
        scheduler="LSF",
        launch_id=as_identifier(launch_id),
        nodes=hosts,
        provenance={"nodes": source, "launch_id": id_source},
        host_file=f"${HOST_FILES[1]}",
    )


def detect(process: Process) -> Job:
    """Describe the job of a script that LSF started."""
    has_jsrun = process.environ.get(jsrun.ALLOCATION_ID)
    launcher = jsrun.JSRUN if has_jsrun else MPIRUN
    return allocation(process).job_of_script(process.hostname, launcher)


def _hosts(lsf: Variables, process: Process) -> tuple[tuple[str, ...], str]:
    """Return the hosts, each once, and their variable; without hosts, all variables."""
    for name in HOST_FILES:
        lines = (process.read(lsf.first(name)) or "").splitlines()
        hosts = hosts_in(lines, name, counts=True)
        if hosts:
            break
    else:
        name = HOST_COUNTS if lsf.first(HOST_COUNTS) else HOSTS
        words = lsf.first(name).split()  # with counts: a host, its slots, and so on
        hosts = hosts_in(words[::2] if name == HOST_COUNTS else words, name)
    if not hosts:
        name = f"{', '.join([*HOST_FILES, HOST_COUNTS])} or {HOSTS}"
    return tuple(dict.fromkeys(hosts)), name


DETECTOR = Detector(
    name="LSF",
    markers=(JOB_ID,),
    prefixes=("LSB_",),
    daemons=("res", "sbatchd", "blaunch", "jsmd"),
    launcher=MPIRUN,
    detect=detect,
    allocation=allocation,
)
