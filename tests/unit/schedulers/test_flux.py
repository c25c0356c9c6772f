"""Flux: documented, not recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.detection import detected, outcome, with_changes
from tests.support.juelich import step, tasks_at
from tests.support.launch_examples import HOSTS, Tasks, Wrong, assert_refused, launch
from tests.support.recordings import recorded
from torchrun_hpc import schedulers
from torchrun_hpc.schedulers import flux
from torchrun_hpc.schedulers.process import Process

NOBODY = ("", "", "")
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


def variables(task, _node, places):
    return {
        "FLUX_JOB_ID": "\u0192D2e73NP",
        "FLUX_JOB_SIZE": task.size,
        "FLUX_JOB_NNODES": max(places) + 1,
        "FLUX_TASK_RANK": task.rank,
        "FLUX_TASK_LOCAL_ID": task.local_rank,
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
    }


IDS = ("fD2e73NP", "17_3.fD2e73NP")
EXAMPLES = {
    "Flux": Tasks(
        variables,
        IDS,
        answers=True,
        ancestors=("flux-shell", "flux-broker", "slurmstepd"),
    ),
    "Flux alone": Tasks(variables, IDS),
}


@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC, UNEVEN, FIRST_FEW])
def test_tasks_that_tell_each_other(places):
    for process, task in zip(launch("Flux", places), tasks_at(places), strict=True):
        node = places[task.rank]
        assert detected(process) == replace(
            step(node, nodes=NOBODY, launcher=flux.RUN, task=task),
            scheduler="Flux",
            launch_id="fD2e73NP",
            started_by=flux.RUN,
            provenance={
                "nodes": "FLUX_JOB_NNODES",
                "tasks": "FLUX_JOB_SIZE",
                "task": "FLUX_TASK_RANK",
                "launch_id": "FLUX_JOB_ID",
                **dict.fromkeys(
                    ("head", "node_rank", "local_rank", "local_size"), "PMI"
                ),
            },
            head_candidates=("jwb0001",),
            hostname=HOSTS[node],
            pmi_is_open=True,
        )


@pytest.mark.parametrize("places", [EACH, BLOCK])
def test_without_a_process_manager_as_many_are_on_each_node(places):
    """There is no head then, and only the rest is the same."""
    told, alone = launch("Flux", places), launch("Flux alone", places)
    for process, other in zip(told, alone, strict=True):
        job = replace(detected(process), pmi_is_open=False, head_candidates=())
        assert replace(detected(other), provenance=job.provenance) == job


@pytest.mark.parametrize("places", [UNEVEN, FIRST_FEW])
def test_uneven_tasks_without_a_process_manager_cannot_meet(places):
    """How many are on each node is not known, and they have no head node."""
    for process in launch("Flux alone", places):
        job = detected(process)
        assert (job.nodes, job.head_candidates) == (NOBODY, ())
        assert job.has_several_tasks


@pytest.mark.parametrize("places", [EACH, BLOCK, CYCLIC, UNEVEN])
def test_inside_of_slurm(places):
    """Which has numbered the brokers; the tasks are Flux's."""
    for rank, process in enumerate(launch("Flux", places, SLURM)):
        job = detected(process)
        assert (job.scheduler, job.launch_id) == ("Flux in Slurm", "19.fD2e73NP")
        assert (job.nodes, job.allocated_nodes) == (HOSTS[:3], 3)
        assert job.provenance["nodes"] == "SLURM_JOB_NODELIST"
        assert (job.node_rank, job.task) == (places[rank], tasks_at(places)[rank])
        assert schedulers.task_rank(process.environ) == rank


def test_script_of_flux_inside_of_slurm():
    """Flux takes the variables of the job and of Slurm away there."""
    environ = {"FLUX_URI": "local:///run/flux/local", "FLUX_ENCLOSING_ID": "\u0192D2e"}
    assert outcome(Process(environ, "jwb0001")) is None


@pytest.mark.parametrize(
    ("kind", "launch_id"), [("Flux", "0badcafe"), ("Flux alone", "flux-run")]
)
def test_without_the_number_of_the_job(kind, launch_id):
    process = with_changes(launch(kind, EACH)[1], {"FLUX_JOB_ID": None})
    assert detected(process).launch_id == launch_id


def test_it_sets_the_variables_of_pals_too():
    pals = {"PALS_RANKID": "1", "PALS_NODEID": "1"}
    job = detected(with_changes(launch("Flux alone", EACH)[1], pals))
    assert (job.scheduler, job.node_rank) == ("Flux", 1)


# In task 1 of three, one on each node.
WRONG: Wrong = {
    "HPC020 {name} is not set": {
        "FLUX_JOB_SIZE": [None],
        "FLUX_JOB_NNODES": [""],
        "FLUX_TASK_LOCAL_ID": [""],
    },
    "HPC021 {shown} is not a whole number": {"FLUX_TASK_RANK": ["x"]},
    "HPC033 Flux says that this": {"FLUX_TASK_RANK": ["3"]},
}
WRONG_ALONE: Wrong = {"HPC033 Flux says": {"FLUX_JOB_NNODES": ["0", "4"]}}


def test_contradiction():
    told, alone = launch("Flux", EACH)[1], launch("Flux alone", EACH)[1]
    assert_refused(told, WRONG)
    assert_refused(alone, {**WRONG, **WRONG_ALONE})
    for number in "0", "4":  # the tasks know better
        job = detected(with_changes(told, {"FLUX_JOB_NNODES": number}))
        assert len(job.nodes) == 3, number
