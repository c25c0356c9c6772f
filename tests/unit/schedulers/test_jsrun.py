"""jsrun: documented, not recorded.

As in users' scripts for systems with jsrun, where the first host of LSF's list is that
of the script and runs no tasks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.detection import detected, with_changes
from tests.support.juelich import step, tasks_at
from tests.support.launch_examples import HOSTS, Tasks, assert_refused, launch
from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import jsrun

FILE = "/home/user/.lsbatch/1.1234.hostfile"
SUMMIT = {
    "LSB_JOBID": "1234",
    "LSB_JOBINDEX": "0",
    "LSB_DJOB_HOSTFILE": FILE,
    "LSB_DJOB_RANKFILE": FILE,
    "CSM_ALLOCATION_ID": "42",
}
COMPUTE = HOSTS[:2]
FILES = {FILE: "\n".join(["batch5", *COMPUTE, *COMPUTE])}


def variables(task, _node, _places):
    return {
        "JSM_NAMESPACE_RANK": task.rank,
        "JSM_NAMESPACE_SIZE": task.size,
        "JSM_NAMESPACE_LOCAL_RANK": task.local_rank,
        "JSM_NAMESPACE_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "csm-42-1",
    }


EXAMPLES = {"jsrun": Tasks(variables, ("csm-42-1", "17_3.csm-42-1"))}


def in_lsf(places):
    """Return the processes of jsrun, which sets the variables of Open MPI too."""
    both = launch("Open MPI 5", places), launch("jsrun", places, SUMMIT, FILES)
    return [
        with_changes(process, {**ompi.environ, **process.environ})
        for ompi, process in zip(*both, strict=True)
    ]


@pytest.mark.parametrize("places", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1]])
def test_jsrun(places):
    for process, task in zip(in_lsf(places), tasks_at(places), strict=True):
        node = places[task.rank]
        assert detected(process) == replace(
            step(node, nodes=COMPUTE, launcher=jsrun.JSRUN, task=task),
            scheduler="jsrun in LSF",
            launch_id="1234.csm-42-1",
            started_by=jsrun.JSRUN,
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
        assert schedulers.task_rank(process.environ) == task.rank


def test_the_host_of_the_script_is_left_out_without_a_sign_of_the_system_too():
    process = with_changes(in_lsf([0, 1])[1], {"CSM_ALLOCATION_ID": None})
    job = detected(process)
    assert (job.nodes, job.node_rank) == (COMPUTE, 1)


def test_contradiction():
    assert_refused(
        in_lsf([0, 1])[1],
        {
            "HPC020 {name} is not set": {"JSM_NAMESPACE_SIZE": [None]},
            "HPC021 {shown} is not a whole number": {"JSM_NAMESPACE_LOCAL_RANK": ["x"]},
            "HPC033 jsrun says that this is task 2 of 2": {"JSM_NAMESPACE_RANK": ["2"]},
        },
    )
