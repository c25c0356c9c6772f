"""PALS: documented, not recorded.

As in ALCF's and NCAR's documentation of mpiexec, and in Slurm's plugin cray_shasta,
which sets the same variables.
"""

from __future__ import annotations

import pytest
from nodes import changed, detected, outcome, reader, recorded, tasks_at

from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import pals
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.schedulers.process import Process

HOSTS = ("x3102c0s13b0n0", "x3102c0s13b1n0", "x3104c0s1b0n0")
DOMAIN = ".hsn.cm.polaris.alcf.anl.gov"
FILE = "/var/spool/pbs/aux/6826897.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov"
PBS = {
    "PBS_JOBID": f"6826897.polaris-pbs-01{DOMAIN}",
    "PBS_NODEFILE": FILE,
    # as in the script, whose environment mpiexec hands on
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
}


def launch(places, environ=None, lines=None, domain=""):
    """Return the processes of a launch; ``places`` has for each rank its node."""
    lines = [host + domain for host in HOSTS] if lines is None else lines
    read = reader({FILE: "\n".join(lines)})
    return [
        Process(
            {
                **(PBS if environ is None else environ),
                "PALS_RANKID": f"{task.rank}",
                "PALS_NODEID": f"{node}",
                "PALS_LOCAL_RANKID": f"{task.local_rank}",
                "PALS_LOCAL_SIZE": f"{task.local_size}",
                "PALS_APID": "5b0de0e3-7c5f-4b4c-9dc2-1f0b2a1c7d11",
                "PALS_SPOOL_DIR": "/var/run/palsd/5b0de0e3",
                "PMI_RANK": f"{task.rank}",
                "PMI_SIZE": f"{task.size}",
                "PMI_LOCAL_RANK": f"{task.local_rank}",
                "PMI_LOCAL_SIZE": f"{task.local_size}",
                "PMI_CONTROL_PORT": "20000",
            },
            HOSTS[node],
            read=read,
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def detect(process, **changes):
    changed_process = Process(
        changed(process.environ, changes), process.hostname, read=process.read
    )
    return outcome(changed_process)


EACH = [0, 1, 2]
BLOCK = [0, 0, 1, 1, 2, 2]
CYCLIC = [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("domain", ["", DOMAIN])
@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC])
def test_in_a_job_of_pbs(places, domain):
    found = [detected(task) for task in launch(places, domain=domain)]
    names = tuple(host + domain for host in HOSTS)
    assert found == [
        Job(
            scheduler="PALS in PBS",
            launch_id="6826897.5b0de0e3",
            context=LaunchContext.STEP,
            launcher=pals.MPIEXEC,
            nodes=names,
            node_rank=node,
            task=task,
            allocated_nodes=3,
            provenance={
                "nodes": "PBS_NODEFILE",
                "node_rank": "PALS_NODEID",
                "tasks": "PMI_SIZE",
                "task": "PALS_RANKID",
                "local_rank": "PALS_LOCAL_RANKID",
                "local_size": "PALS_LOCAL_SIZE",
                "launch_id": "PBS_JOBID, PALS_APID",
            },
            head_candidates=names[:1],
            hostname=HOSTS[node],
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


@pytest.mark.parametrize("places", [EACH, BLOCK])
def test_a_node_file_that_cannot_be_read(places):
    """Ranks are known and names are not: nobody shows a head."""
    jobs = [detected(task) for task in launch(places, lines=[])]
    assert [job.node_rank for job in jobs] == places
    assert {job.nodes for job in jobs} == {("", "", "")}
    assert {job.head_candidates for job in jobs} == {()}
    assert {job.launch_id for job in jobs} == {"6826897.5b0de0e3"}


def test_two_launches_in_one_job_differ():
    first, second = (
        detect(launch(EACH)[0], PALS_APID=apid).launch_id
        for apid in ("5b0de0e3-7c5f", "a1a2a3a4-7c5f")
    )
    assert first != second


@pytest.mark.parametrize("variable", ["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"])
def test_local_size_has_two_names(variable):
    job = detect(launch(BLOCK)[3], **{variable: None})
    assert job.task == tasks_at(BLOCK)[3]


def test_what_a_user_tells_mpiexec_says_nothing_of_a_task():
    environ = PBS | {"PALS_NRANKS": "8", "PALS_PPN": "4", "PALS_DEPTH": "8"}
    read = reader({FILE: "\n".join(HOSTS)})
    job = detected(Process(environ, HOSTS[0], read=read))
    assert (job.scheduler, job.context) == ("PBS", LaunchContext.BATCH_SCRIPT)


@pytest.mark.parametrize("task", range(3))
def test_srun_sets_the_same_variables(task):
    """--mpi=cray_shasta: Slurm knows more."""
    step, hostname = recorded("slurm-srun-3-nodes")[task]
    environ = launch(EACH)[task].environ | step | {"PALS_APID": "19.0"}
    job = detected(Process(environ, hostname))
    assert (job.scheduler, job.launch_id, job.node_rank) == ("Slurm", "19.0", task)


def test_alone():
    jobs = [detected(task) for task in launch(BLOCK, environ={})]
    assert {job.scheduler for job in jobs} == {"PALS"}
    assert {job.launch_id for job in jobs} == {"5b0de0e3"}
    assert [job.node_rank for job in jobs] == BLOCK
    assert {len(job.nodes) for job in jobs} == {3}


WRONG = {
    "no size": ({"PMI_SIZE": None}, "HPC020 PMI_SIZE is not set"),
    "no node": ({"PALS_NODEID": None}, "HPC020 PALS_NODEID is not set"),
    "no local size": (
        {"PALS_LOCAL_SIZE": None, "PMI_LOCAL_SIZE": ""},
        "HPC020 PALS_LOCAL_SIZE is not set",
    ),
    "a rank that is none": (
        {"PALS_RANKID": "-1"},
        "HPC021 PALS_RANKID='-1' is not a whole number",
    ),
    "a rank beyond the size": ({"PALS_RANKID": "3"}, "HPC033 PALS says that this is"),
    "a node beyond the rank": ({"PALS_NODEID": "2"}, "HPC033 PALS says that this is"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_contradiction(fault):
    changes, message = WRONG[fault]
    assert detect(launch(EACH)[1], **changes).startswith(message)


@pytest.mark.parametrize("node", ["3", "999"])
def test_a_node_beyond_the_last_one(node):
    """Uneven tasks, of which too many would be on the nodes before."""
    found = detect(launch(BLOCK)[5], PALS_NODEID=node)
    assert isinstance(found, str)


@pytest.mark.parametrize("task", range(3))
def test_the_first_task_is_known(task):
    environ = launch(EACH)[task].environ
    assert schedulers.task_rank(environ) == task
