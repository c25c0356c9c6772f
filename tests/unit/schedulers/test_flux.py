"""Flux: documented, not recorded; see flux-environment(7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nodes import changed, detected, outcome, recorded, tasks_at

from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import flux
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

THREE = ("jwb0001", "jwb0002", "jwb0003")
SLURM = {
    "SLURM_JOB_ID": "19",
    "SLURM_JOB_NODELIST": "jwb[0001-0003]",
    # of the step that runs Flux's brokers
    **{
        name: value
        for name, value in recorded("slurm-srun-3-nodes")[0][0].items()
        if name.startswith(("SLURM_STEP", "SLURM_PROCID", "SLURM_NODEID"))
    },
}

EACH = [0, 1, 2]
BLOCK = [0, 0, 1, 1, 2, 2]
CYCLIC = [0, 1, 2, 0, 1, 2]
UNEVEN = [0, 0, 1, 1, 2]
FIRST_FEW = [0, 1, 1, 2, 2]


def launch(places, environ=None, *, exchange=True):
    """Return the processes of a launch; ``places`` has for each rank its node."""
    exchanged = Exchanged("jwb0001", "0badcafe", tuple(places)) if exchange else None
    return [
        Process(
            {
                **(environ or {}),
                "FLUX_JOB_ID": "\u0192D2e73NP",
                "FLUX_JOB_ID_PATH": "/\u0192D2e73NP",
                "FLUX_JOB_SIZE": f"{task.size}",
                "FLUX_JOB_NNODES": f"{max(places) + 1}",
                "FLUX_TASK_RANK": f"{task.rank}",
                "FLUX_TASK_LOCAL_ID": f"{task.local_rank}",
                "FLUX_KVS_NAMESPACE": "job-1234",
                "FLUX_URI": "local:///run/flux/local",
                "PMI_RANK": f"{task.rank}",
                "PMI_SIZE": f"{task.size}",
                "PMI_FD": "19",
            },
            THREE[node],
            exchange=lambda _: exchanged,
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


def expected(places, provenance):
    """Describe a launch outside of other schedulers."""
    return [
        Job(
            scheduler="Flux",
            launch_id="fD2e73NP",
            context=LaunchContext.STEP,
            launcher=flux.RUN,
            nodes=("", "", ""),
            node_rank=node,
            task=task,
            allocated_nodes=3,
            provenance={
                "node_rank": "FLUX_TASK_RANK",
                "tasks": "FLUX_JOB_SIZE",
                "task": "FLUX_TASK_RANK",
                "local_rank": "FLUX_TASK_LOCAL_ID",
                "launch_id": "FLUX_JOB_ID",
                "nodes": "FLUX_JOB_NNODES",
                **provenance,
            },
            head_candidates=("jwb0001",) if provenance else (),
            hostname=THREE[node],
            pmi_is_open=bool(provenance),
        )
        for node, task in zip(places, tasks_at(places), strict=True)
    ]


@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC, UNEVEN, FIRST_FEW])
def test_tasks_that_tell_each_other(places):
    found = [detected(task) for task in launch(places)]
    by_pmi = ("head", "node_rank", "local_rank", "local_size")
    assert found == expected(places, dict.fromkeys(by_pmi, "PMI"))


@pytest.mark.parametrize("places", [EACH, BLOCK])
def test_without_a_process_manager_as_many_are_on_each_node(places):
    found = [detected(task) for task in launch(places, exchange=False)]
    same = [replace(job, provenance={}) for job in found]
    assert same == [replace(job, provenance={}) for job in expected(places, {})]


@pytest.mark.parametrize("places", [UNEVEN, FIRST_FEW])
def test_uneven_tasks_without_a_process_manager_cannot_meet(places):
    """How many are on each node is not known, and they have no head node."""
    found = [detected(task) for task in launch(places, exchange=False)]
    assert {(job.nodes, job.head_candidates) for job in found} == {(("", "", ""), ())}
    assert {job.has_several_tasks for job in found} == {True}


@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC, UNEVEN])
def test_inside_of_slurm(places):
    """Which has numbered the brokers; the tasks are Flux's."""
    found = [detected(task) for task in launch(places, SLURM)]
    assert {job.scheduler for job in found} == {"Flux in Slurm"}
    assert {job.launch_id for job in found} == {"19.fD2e73NP"}
    assert {job.nodes for job in found} == {THREE}
    assert [job.node_rank for job in found] == places
    assert [job.task for job in found] == tasks_at(places)
    assert {job.allocated_nodes for job in found} == {3}


def test_names_inside_of_slurm_come_from_its_list():
    job = detected(launch(EACH, SLURM)[1])
    assert job.provenance["nodes"] == "SLURM_JOB_NODELIST"


def test_script_of_flux_inside_of_slurm():
    """Flux takes the variables of the job and of Slurm away there."""
    environ = {"FLUX_URI": "local:///run/flux/local", "FLUX_ENCLOSING_ID": "\u0192D2e"}
    assert detected(Process(environ, "jwb0001")) is None


def test_two_launches_differ():
    """Flux numbers them; what the first task tells is not needed for that."""
    process = launch(EACH)[0]
    other = changed(process.environ, {"FLUX_JOB_ID": "\u0192D2e73NQ"})
    launch_ids = {
        detected(Process(environ, "jwb0001")).launch_id
        for environ in (process.environ, other)
    }
    assert launch_ids == {"fD2e73NP", "fD2e73NQ"}


@pytest.mark.parametrize(
    ("exchange", "launch_id"), [(True, "0badcafe"), (False, "flux-run")]
)
def test_without_the_number_of_the_job(exchange, launch_id):
    process = launch(EACH, exchange=exchange)[1]
    environ = changed(process.environ, {"FLUX_JOB_ID": None})
    job = detected(Process(environ, "jwb0002", exchange=process.exchange))
    assert job.launch_id == launch_id


def test_it_sets_the_variables_of_pals_too():
    process = launch(EACH)[1]
    environ = {**process.environ, "PALS_RANKID": "1", "PALS_NODEID": "1"}
    job = detected(Process(environ, "jwb0002"))
    assert (job.scheduler, job.node_rank) == ("Flux", 1)


WRONG = {
    "no size": ({"FLUX_JOB_SIZE": None}, "HPC020 FLUX_JOB_SIZE is not set"),
    "no number of nodes": ({"FLUX_JOB_NNODES": ""}, "HPC020 FLUX_JOB_NNODES is not"),
    "no local rank": ({"FLUX_TASK_LOCAL_ID": ""}, "HPC020 FLUX_TASK_LOCAL_ID is not"),
    "a rank that is none": (
        {"FLUX_TASK_RANK": "x"},
        "HPC021 FLUX_TASK_RANK='x' is not a whole number",
    ),
    "a rank beyond the size": ({"FLUX_TASK_RANK": "3"}, "HPC033 Flux says that this"),
    "no node": ({"FLUX_JOB_NNODES": "0"}, "HPC0"),
    "more nodes than tasks": ({"FLUX_JOB_NNODES": "4"}, "HPC033 Flux says"),
}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "alone"])
def test_contradiction(exchange):
    for fault, (changes, message) in WRONG.items():
        process = launch(EACH, exchange=exchange)[1]
        expected = message
        if exchange and "NNODES" in str(changes) and changes["FLUX_JOB_NNODES"]:
            expected = ""  # the tasks know better
        environ = changed(process.environ, changes)
        found = outcome(Process(environ, "jwb0002", exchange=process.exchange))
        if expected:
            assert isinstance(found, str), fault
            assert found.startswith(expected), fault
        else:
            assert len(found.nodes) == 3, fault


@pytest.mark.parametrize("task", range(3))
def test_the_first_task_is_known(task):
    environ = launch(EACH, SLURM)[task].environ
    assert schedulers.task_rank(environ) == task
