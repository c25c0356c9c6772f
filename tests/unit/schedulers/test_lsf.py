"""LSF: documented, not recorded.

As in IBM's "Environment variables set for job execution".
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.detection import changed, detected, outcome
from tests.support.launch_examples import Batch, launch
from torchrun_hpc.schedulers import jsrun, openmpi
from torchrun_hpc.schedulers.detector import Allocation
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.schedulers.process import Process

TWO = ("hostA", "hostB")
LSF = {
    "LSB_JOBID": "1234",
    "LSB_JOBINDEX": "0",
    "LSB_HOSTS": "hostA hostA hostB hostB",
    "LSB_MCPU_HOSTS": "hostA 2 hostB 2",
    "LSB_DJOB_HOSTFILE": "/home/user/.lsbatch/1.1234.hostfile",
    "LSB_DJOB_RANKFILE": "/home/user/.lsbatch/1.1234.hostfile",
}
FILE = LSF["LSB_DJOB_RANKFILE"]
FILES = {FILE: "hostA\nhostA\nhostB\nhostB\n"}

SHORT = {name: LSF[name] for name in ("LSB_JOBID", "LSB_DJOB_HOSTFILE")}
EXAMPLES = {
    "bsub": Batch(
        [(SHORT, "hostA")],
        ("1.1234", "res", "sbatchd"),
        {FILE: "hostA\nhostB\n"},
        is_left=True,
    )
}

SUMMIT = LSF | {
    "CSM_ALLOCATION_ID": "42",
    "LSB_HOSTS": "batch5 a01n01 a01n01 a01n02 a01n02",
    "LSB_MCPU_HOSTS": "batch5 1 a01n01 2 a01n02 2",
}
SUMMIT_FILES = {FILE: "batch5\na01n01\na01n01\na01n02\na01n02\n"}


def script(changes=None, hostname="hostA", files=FILES, environ=LSF):
    return outcome(Process(changed(environ, changes or {}), hostname, read=files.get))


BY = {"nodes": "LSB_DJOB_RANKFILE", "launch_id": "LSB_JOBID"}


# The package makes its job with job_of_script too: these two test what it passes there.


def test_script():
    job = Allocation("LSF", "1234", TWO, BY, "$LSB_DJOB_HOSTFILE")
    assert script() == job.job_of_script("hostA", openmpi.MPIRUN)


def test_script_on_a_system_with_jsrun():
    """It runs on a host of its own, and starts nothing there."""
    job = Allocation("LSF", "1234", ("a01n01", "a01n02"), BY)
    on_summit = script(None, "batch5", SUMMIT_FILES, SUMMIT)
    assert on_summit == job.job_of_script("batch5", jsrun.JSRUN)
    assert on_summit.context is LaunchContext.ALLOCATION_SHELL


# Changed variables, the files, and the source of the nodes.
PLACES = {
    "a file": ({}, FILES, "LSB_DJOB_RANKFILE"),
    "the other file": ({"LSB_DJOB_RANKFILE": None}, FILES, "LSB_DJOB_HOSTFILE"),
    "a file that cannot be read": ({}, {}, "LSB_MCPU_HOSTS"),
    "an empty file": ({}, {FILE: "\n"}, "LSB_MCPU_HOSTS"),
    "a file with counts": ({}, {FILE: "hostA 2\nhostB 2\n"}, "LSB_DJOB_RANKFILE"),
    "hosts only": ({"LSB_MCPU_HOSTS": ""}, {}, "LSB_HOSTS"),
}


@pytest.mark.parametrize(("changes", "files", "source"), PLACES.values(), ids=PLACES)
def test_where_the_nodes_are_named(changes, files, source):
    job = script(changes, files=files)
    assert (job.nodes, job.provenance["nodes"]) == (TWO, source)


# Changed variables, the file's text, and the shown source and entry.
WRONG_LISTS = {
    "words in a file": ({}, "hostA slots=2", "RANKFILE", "1 is 'hostA slots=2'"),
    "too many counts": ({}, "hostA 1 2", "RANKFILE", "1 is 'hostA 1 2'"),
    "a binary file": ({}, "hostA\n\0\1", "RANKFILE", r"2 is '\x00\x01'"),
    "counts": (
        {"LSB_MCPU_HOSTS": "hostB 2 hostA\0 2"}, "",
        "LSB_MCPU_HOSTS", r"2 is 'hostA\x00'",
    ),
    "hosts": (
        {"LSB_MCPU_HOSTS": "", "LSB_HOSTS": f"hostA {'b' * 300}"}, "",
        "LSB_HOSTS", f"2 is '{'b' * 40}...'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text", "source", "shown"), WRONG_LISTS.values(), ids=WRONG_LISTS
)
def test_a_list_of_hosts_that_is_none(changes, text, source, shown):
    found = script(changes, files={FILE: text})
    assert found.startswith("HPC140 LSB_")
    assert f"{source} does not list the job's hosts: entry {shown}" in found
    assert found.isprintable()
    assert len(found) < 400


def test_no_job():
    for number in None, "":
        assert script({"LSB_JOBID": number}, files={}) is None


def test_a_job_whose_hosts_nothing_names():
    changes = {"LSB_HOSTS": "", "LSB_MCPU_HOSTS": None}
    found = script(changes, files={})
    assert found.startswith("HPC035 LSB_DJOB_RANKFILE, LSB_DJOB_HOSTFILE, LSB_MCPU")
    assert " or LSB_HOSTS names the nodes of LSF job" in found


@pytest.mark.parametrize(
    ("index", "launch_id", "source"),
    [
        (None, "1234", "LSB_JOBID"),
        ("", "1234", "LSB_JOBID"),
        ("0", "1234", "LSB_JOBID"),
        ("7", "1234_7", "LSB_JOBID, LSB_JOBINDEX"),
    ],
)
def test_launch_id(index, launch_id, source):
    job = script({"LSB_JOBINDEX": index})
    assert (job.launch_id, job.provenance["launch_id"]) == (launch_id, source)


def test_mpirun_in_a_job_of_lsf():
    task = launch("Open MPI 5", [0, 1], LSF, FILES)[1]
    job = detected(replace(task, hostname="hostB"))
    assert (job.scheduler, job.launcher) == ("Open MPI in LSF", openmpi.MPIRUN)
    assert (job.nodes, job.node_rank, job.launch_id) == (
        TWO,
        1,
        "prterun-jwb0001-8511-1",
    )
