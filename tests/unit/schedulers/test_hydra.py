"""Hydra: MPICH's and Intel MPI's mpiexec, alone and in a job; recorded, and changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.detection import detected, outcome, with_changes
from tests.support.launch_examples import Tasks, Wrong, assert_refused, launch
from tests.support.recordings import node_file, recorded
from torchrun_hpc.schedulers import hydra
from torchrun_hpc.schedulers.detector import Allocation
from torchrun_hpc.schedulers.launched_job import launched_job
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

TWO_DECS = ("dec0001", "dec0002")
THREE = ("jwb0001", "jwb0002", "jwb0003")
EACH = "mpich-4.0.2-3-nodes"


def variables(task, _node, _places):
    return {
        "PMI_RANK": task.rank,
        "PMI_SIZE": task.size,
        "MPI_LOCALRANKID": task.local_rank,
        "MPI_LOCALNRANKS": task.local_size,
    }


TOLD = ("0badcafe", "17_3.0badcafe")
PROXY = "hydra_pmi_proxy"
EXAMPLES = {
    "Hydra": Tasks(
        variables,
        TOLD,
        answers=True,
        ancestors=(PROXY, "mpiexec.hydra", "bash"),
        recording=EACH,
    ),
    "Intel MPI": Tasks(
        variables,
        TOLD,
        answers=True,
        ancestors=("env", PROXY, "hydra_bstrap_pr"),
        recording="intelmpi-2021-3-nodes",
    ),
    "Hydra alone": Tasks(variables, ("mpiexec", "17_3")),
}


def nobody(_environ):
    return None


def process_of(name, task=0, changes=None, exchange=nobody):
    environ, hostname = recorded(name)[task]
    path = environ.get("PBS_NODEFILE")
    read = ({path: node_file(name)} if path else {}).get
    process = Process(environ, hostname, read=read, exchange=exchange)
    return with_changes(process, changes or {})


def detect(name, task=0, changes=None, exchange=nobody):
    return detected(process_of(name, task, changes, exchange))


def telling(first, instance="0badcafe", places=(), hosts=()):
    """Return a process manager: what the first task has told all of them."""
    return lambda _environ: Exchanged(first, instance, tuple(places), tuple(hosts))


# --- what the tasks tell each other -------------------------------------------------


@pytest.mark.parametrize("name", [EACH, "pbs-mpich-4.0.2", "slurm-mpich-4-2-each"])
def test_a_process_manager_that_does_not_say_where_tasks_are(name):
    """It names the launch and its first host; the rest is as without it."""
    first = recorded(name)[0][1]
    for task in range(3):
        alone = detect(name, task)
        job = detect(name, task, exchange=telling(first))
        by = ", ".join(filter(None, (alone.provenance["launch_id"], "PMI")))
        assert job == replace(
            alone,
            launch_id=f"{alone.launch_id}.0badcafe".removeprefix("mpiexec."),
            head_candidates=(first,),
            pmi_is_open=True,
            names_instance=True,
            provenance={**alone.provenance, "head": "PMI", "launch_id": by},
        )


def test_two_launches_with_the_same_variables_differ_by_what_the_first_task_tells():
    for name in EACH, "pbs-mpich-4.0.2":
        one, other = (
            detect(name, exchange=telling("h", instance)).launch_id
            for instance in ("11111111", "22222222")
        )
        assert one != other, name


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("pbs-mpich-4.0.2-packed", [0] * 8 + [1] * 4),
        ("pbs-mpich-4.0.2-split-chunks", [0, 1, 0]),
    ],
)
def test_the_variables_of_the_job_are_on_all_nodes(name, places):
    """Hydra hands the environment of the first node on, PBS_NODENUM=0 and all."""
    jobs = [detect(name, task) for task in range(len(places))]
    assert len({job.launch_id for job in jobs}) == 1
    assert [job.node_rank for job in jobs] == places


def test_a_node_file_that_only_the_first_node_can_read():
    """The number of nodes is that of the tasks; names are then missing elsewhere."""
    environ, hostname = recorded("pbs-mpich-4.0.2")[1]
    exchange = telling("dec0001", "0badcafe", (0, 1, 2), ())
    job = detected(Process(environ, hostname, exchange=exchange))
    assert job.nodes == ("", "", "")
    assert (job.node_rank, job.launch_id) == (1, "0.0badcafe")
    assert job.head_candidates == ("dec0001",)


# --- who else sets these variables --------------------------------------------------


@pytest.mark.parametrize("name", [EACH, "intelmpi-2021-3-nodes"])
def test_mpiexec_in_a_step_of_srun(name):
    step = recorded("slurm-srun-3-nodes")[0][0]
    jobs = [detect(name, task, step) for task in range(3)]
    assert {job.scheduler for job in jobs} == {"Hydra in Slurm"}
    assert {job.nodes for job in jobs} == {THREE}
    assert [job.node_rank for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize("variable", ["PMI_RANK", "MPI_LOCALRANKID"])
@pytest.mark.parametrize("value", [None, ""])
def test_one_variable_alone_proves_nothing(variable, value):
    assert outcome(process_of(EACH, 1, {variable: value})) is None


# --- contradictions -----------------------------------------------------------------

# In task 1 of three, one on each node.
WRONG: Wrong = {
    "HPC020 {name} is not set, but other ": {
        "PMI_SIZE": [None],
        "MPI_LOCALNRANKS": [""],
    },
    "HPC021 {shown} is not a whole number": {"PMI_RANK": ["x"]},
    "HPC033 Hydra says that this is task 3 of 3": {"PMI_RANK": ["3"]},
    "HPC033 Hydra says that this is task 1 of 3, and 1 of 1 on this node "
    "(PMI_RANK, PMI_SIZE), which is ": {"MPI_LOCALRANKID": ["1"]},
}


@pytest.mark.parametrize("kind", ["Hydra", "Hydra alone"])
def test_contradiction(kind):
    assert_refused(launch(kind, [0, 1, 2])[1], WRONG)


@pytest.mark.parametrize("hosts", [("dec0001", "dec0002"), ("dec0001.a", "dec0002.a")])
def test_two_chunks_on_one_host_are_workers_with_ranks_of_their_own(hosts):
    """Each has MPI_LOCALRANKID=0 of 1, which would be two workers on one GPU."""
    name = "pbs-mpich-4.0.2-split-chunks"
    exchange = telling(hosts[0], "0badcafe", (0, 1, 0), hosts)
    jobs = [detect(name, task, exchange=exchange) for task in range(3)]
    assert all(job.has_several_tasks for job in jobs)
    assert {job.nodes for job in jobs} == {TWO_DECS}
    assert [job.task.local_rank for job in jobs] == [0, 0, 1]


ORDERS = {
    "as in the job": (THREE, THREE),
    "reversed": (THREE[::-1], THREE[::-1]),
    "another one behind the first": (("jwb0001", "jwb0003", "jwb0002"),) * 2,
    "a part": (("jwb0003", "jwb0001"),) * 2,
    "with domains": (("jwb0002.x", "jwb0001.x"), ("jwb0002", "jwb0001")),
    "one that the job does not have": (("jwb0001", "n9"), ("jwb0001", "jwb0002")),
    "none that the job has": (("n8", "n9"), ("n8", "")),
    "one name for two machines": (("jwb0001", "jwb0001"), ("jwb0001", "jwb0002")),
}


@pytest.mark.parametrize(("hosts", "expected"), ORDERS.values(), ids=ORDERS)
def test_names_are_in_the_order_of_the_ranks(hosts, expected):
    """Not of the scheduler's list: mpiexec -hosts c,b,a."""
    ranks = range(len(hosts))
    exchange = telling(hosts[0], "0badcafe", ranks, hosts)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "jwb[0001-0003]"}
    for rank, process in enumerate(launch("Hydra", [*ranks], slurm)):
        here = replace(process, hostname=hosts[rank], exchange=exchange)
        job = detected(here)
        assert (job.nodes, job.node_rank) == (expected, rank)


def test_a_part_of_the_job_begins_where_rank_0_is():
    """mpiexec -hosts jwb0002,jwb0003 in a job of three nodes: rank 0 has told so."""
    allocation = Allocation("Slurm", "7", THREE, {"nodes": "A", "launch_id": "B"})
    exchange = telling("jwb0002", "0badcafe", (0, 1))
    for rank, process in enumerate(launch("Hydra", [0, 1])):
        here = replace(process, hostname=THREE[rank + 1], exchange=exchange)
        layout = hydra.task_layout(here)
        job = launched_job(hydra.DETECTOR, layout, allocation, here)
        assert (job.nodes, job.node_rank) == (("jwb0002", ""), rank)
        assert job.launch_id == "7.0badcafe"
