"""PALS: documented, not recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.detection import detected, refusal, with_changes
from tests.support.juelich import step, tasks_at
from tests.support.launch_examples import (
    FILE,
    HOSTS,
    PBS,
    Tasks,
    Wrong,
    assert_refused,
    launch,
)
from tests.support.recordings import recorded
from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import pals
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.schedulers.process import Process

THREE = HOSTS[:3]
DOMAIN = ".hsn.cm.polaris.alcf.anl.gov"

EACH = [0, 1, 2]
BLOCK = [0, 0, 1, 1, 2, 2]
CYCLIC = [0, 1, 2, 0, 1, 2]


def variables(task, node, _places):
    return {
        "PALS_RANKID": task.rank,
        "PALS_NODEID": node,
        "PALS_LOCAL_RANKID": task.local_rank,
        "PALS_LOCAL_SIZE": task.local_size,
        "PALS_APID": "5b0de0e3-7c5f-4b4c-9dc2-1f0b2a1c7d11",
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
        "PMI_LOCAL_RANK": task.local_rank,
        "PMI_LOCAL_SIZE": task.local_size,
    }


EXAMPLES = {"PALS": Tasks(variables, ("5b0de0e3", "17_3.5b0de0e3"))}


def in_pbs(places, lines=THREE):
    """Return the processes of a launch in a job of PBS.

    mpiexec passes on the script's PBS variables. They do not describe these tasks.
    """
    script = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0", "PBS_TASKNUM": "1"}
    return launch("PALS", places, PBS | script, {FILE: "\n".join(lines)})


@pytest.mark.parametrize("domain", ["", DOMAIN])
@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC])
def test_in_a_job_of_pbs(places, domain):
    names = tuple(host + domain for host in THREE)
    for process, task in zip(in_pbs(places, names), tasks_at(places), strict=True):
        node = places[task.rank]
        assert detected(process) == replace(
            step(node, nodes=names, launcher=pals.MPIEXEC, task=task),
            scheduler="PALS in PBS",
            launch_id="17_3.5b0de0e3",
            started_by=pals.MPIEXEC,
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
        assert schedulers.task_rank(process.environ) == task.rank


@pytest.mark.parametrize("places", [EACH, BLOCK])
def test_a_node_file_that_cannot_be_read(places):
    """Ranks are known and names are not: nobody shows a head."""
    for rank, process in enumerate(in_pbs(places, [])):
        job = detected(process)
        assert (job.node_rank, job.launch_id) == (places[rank], "17_3.5b0de0e3")
        assert (job.nodes, job.head_candidates) == (("", "", ""), ())


def test_local_size_has_two_names():
    for name in "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE":
        job = detected(with_changes(in_pbs(BLOCK)[3], {name: None}))
        assert job.task == tasks_at(BLOCK)[3], name


def test_what_a_user_tells_mpiexec_says_nothing_of_a_task():
    environ = PBS | {"PALS_NRANKS": "8", "PALS_PPN": "4", "PALS_DEPTH": "8"}
    read = {FILE: "\n".join(THREE)}.get
    job = detected(Process(environ, HOSTS[0], read=read))
    assert (job.scheduler, job.context) == ("PBS", LaunchContext.BATCH_SCRIPT)


@pytest.mark.parametrize("task", range(3))
def test_srun_sets_the_same_variables(task):
    """--mpi=cray_shasta: Slurm knows more."""
    step_of_srun, hostname = recorded("slurm-srun-3-nodes")[task]
    process = replace(in_pbs(EACH)[task], hostname=hostname)
    process = with_changes(process, step_of_srun | {"PALS_APID": "19.0"})
    job = detected(with_changes(process, dict.fromkeys(PBS)))
    assert (job.scheduler, job.launch_id, job.node_rank) == ("Slurm", "19.0", task)


# In task 1 of three, one on each node.
WRONG: Wrong = {
    "HPC020 {name} is not set": {"PMI_SIZE": [None], "PALS_NODEID": [None]},
    "HPC021 {shown} is not a whole number": {"PALS_RANKID": ["-1"]},
    "HPC033 PALS says that this is": {"PALS_RANKID": ["3"], "PALS_NODEID": ["2"]},
}


def test_contradiction():
    process = in_pbs(EACH)[1]
    assert_refused(process, WRONG)
    sizes = {"PALS_LOCAL_SIZE": None, "PMI_LOCAL_SIZE": ""}
    found = refusal(with_changes(process, sizes))
    assert found.startswith("HPC020 PALS_LOCAL_SIZE is not set")


def test_a_node_beyond_the_last_one():
    """Uneven tasks, of which too many would be on the nodes before."""
    for node in "3", "999":
        assert refusal(with_changes(in_pbs(BLOCK)[5], {"PALS_NODEID": node})), node
