"""jsrun: documented, not recorded.

As in users' scripts for systems with jsrun, where the first host of LSF's list is that
of the script and runs no tasks.
"""

from __future__ import annotations

import pytest
from nodes import changed, detected, outcome, reader, tasks_at

from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import jsrun
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.schedulers.process import Process

FILE = "/home/user/.lsbatch/1.1234.hostfile"
SUMMIT = {
    "LSB_JOBID": "1234",
    "LSB_JOBINDEX": "0",
    "LSB_HOSTS": "batch5 a01n01 a01n01 a01n02 a01n02",
    "LSB_MCPU_HOSTS": "batch5 1 a01n01 2 a01n02 2",
    "LSB_DJOB_HOSTFILE": FILE,
    "LSB_DJOB_RANKFILE": FILE,
    "CSM_ALLOCATION_ID": "42",
}
SUMMIT_FILES = {FILE: "batch5\na01n01\na01n01\na01n02\na01n02\n"}
COMPUTE = ("a01n01", "a01n02")


def launch(places, environ=SUMMIT, files=SUMMIT_FILES, namespace="csm-42-1"):
    """Return the processes of jsrun, which sets the variables of Open MPI too."""
    return [
        Process(
            {
                **environ,
                "JSM_NAMESPACE_RANK": f"{task.rank}",
                "JSM_NAMESPACE_SIZE": f"{task.size}",
                "JSM_NAMESPACE_LOCAL_RANK": f"{task.local_rank}",
                "JSM_NAMESPACE_LOCAL_SIZE": f"{task.local_size}",
                "OMPI_COMM_WORLD_RANK": f"{task.rank}",
                "OMPI_COMM_WORLD_SIZE": f"{task.size}",
                "OMPI_COMM_WORLD_LOCAL_RANK": f"{task.local_rank}",
                "OMPI_COMM_WORLD_LOCAL_SIZE": f"{task.local_size}",
                "PMIX_NAMESPACE": namespace,
            },
            COMPUTE[node],
            read=reader(files),
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


@pytest.mark.parametrize("places", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1]])
def test_jsrun(places):
    found = [detected(task) for task in launch(places)]
    assert found == [
        Job(
            scheduler="jsrun in LSF",
            launch_id="1234.csm-42-1",
            context=LaunchContext.STEP,
            launcher=jsrun.JSRUN,
            nodes=COMPUTE,
            node_rank=node,
            task=task,
            allocated_nodes=2,
            provenance={
                "nodes": "LSB_DJOB_RANKFILE",
                "node_rank": "host name" if len(places) > 2 else "JSM_NAMESPACE_RANK",
                "tasks": "JSM_NAMESPACE_SIZE",
                "task": "JSM_NAMESPACE_RANK",
                "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
                "local_size": "JSM_NAMESPACE_LOCAL_SIZE",
                "launch_id": "LSB_JOBID, PMIX_NAMESPACE",
            },
            head_candidates=COMPUTE[:1],
            hostname=COMPUTE[node],
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def test_two_launches_in_one_job_differ():
    first = detected(launch([0, 1], namespace="csm-42-1")[0]).launch_id
    second = detected(launch([0, 1], namespace="csm-42-2")[0]).launch_id
    assert first != second


def test_the_host_of_the_script_is_left_out_without_a_sign_of_the_system_too():
    environ = changed(SUMMIT, {"CSM_ALLOCATION_ID": None})
    job = detected(launch([0, 1], environ)[1])
    assert (job.nodes, job.node_rank) == (COMPUTE, 1)


WRONG = {
    "no size": ({"JSM_NAMESPACE_SIZE": None}, "HPC020 JSM_NAMESPACE_SIZE is not set"),
    "a local rank that is none": (
        {"JSM_NAMESPACE_LOCAL_RANK": "x"},
        "HPC021 JSM_NAMESPACE_LOCAL_RANK='x' is not a whole number",
    ),
    "a rank beyond the size": (
        {"JSM_NAMESPACE_RANK": "2"},
        "HPC033 jsrun says that this is task 2 of 2",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_contradiction(fault):
    changes, message = WRONG[fault]
    process = launch([0, 1])[1]
    environ = changed(process.environ, changes)
    assert outcome(Process(environ, "a01n02", read=process.read)).startswith(message)


@pytest.mark.parametrize("task", range(2))
def test_the_first_task_is_known(task):
    environ = launch([0, 1])[task].environ
    assert schedulers.task_rank(environ) == task
