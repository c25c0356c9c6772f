"""Open MPI's mpirun, alone and in a job of Slurm; as recorded from versions 4 and 5."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from nodes import changed, detected, outcome, recorded, recordings, tasks_at

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import openmpi
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.schedulers.process import Process

NO_NAMES = {2: ("", ""), 3: ("", "", "")}
TWO = ("jwb0001", "jwb0002")
THREE = ("jwb0001", "jwb0002", "jwb0003")

BY_URI = "OMPI_MCA_orte_hnp_uri"
BY_NAMESPACE = "PMIX_NAMESPACE"


class Launch(NamedTuple):
    """What is expected of a launch."""

    launch_id: str
    head: tuple[str, ...]  # what shows the machine of mpirun
    source: str  # and where
    places: list[int]  # for each rank its node
    nodes: tuple[str, ...] = ()  # their names, if Slurm tells them


LAUNCHES = {
    "openmpi-4.1.4-2-nodes-2-each": Launch(
        "949026817", ("10.10.0.1", "10.20.0.1"), BY_URI, [0, 0, 1, 1]
    ),
    "openmpi-4.1.4-3-nodes": Launch("959053825", ("10.10.0.1",), BY_URI, [0, 1, 2]),
    "openmpi-4.1.4-3-nodes-from-login": Launch(
        "4290969601", ("10.10.0.254",), BY_URI, [0, 1, 2]
    ),
    "openmpi-4.1.4-3-nodes-ppr": Launch("620363777", ("10.10.0.1",), BY_URI, [0, 1, 2]),
    "openmpi-4.1.4-cyclic": Launch("619905025", ("10.10.0.1",), BY_URI, [0, 1, 0, 1]),
    "openmpi-4.1.4-cyclic-uneven": Launch(
        "619380737", ("10.10.0.1",), BY_URI, [0, 1, 2, 0, 1]
    ),
    "openmpi-4.1.4-subset": Launch("617676801", ("10.10.0.1",), BY_URI, [0, 1]),
    "openmpi-4.1.4-uneven": Launch("621019137", ("10.10.0.1",), BY_URI, [0, 0, 1]),
    "openmpi-4.1.4-uneven-reversed": Launch(
        "621477889", ("10.10.0.1",), BY_URI, [0, 1, 1]
    ),
    "openmpi-5.0.11-2-nodes-2-each": Launch(
        "prterun-jwb0001-8559-1", ("jwb0001",), BY_NAMESPACE, [0, 0, 1, 1]
    ),
    "openmpi-5.0.11-3-nodes": Launch(
        "prterun-jwb0001-8511-1", ("jwb0001",), BY_NAMESPACE, [0, 1, 2]
    ),
    "openmpi-5.0.11-3-nodes-from-login": Launch(
        "prterun-login01-84-1", ("login01",), BY_NAMESPACE, [0, 1, 2]
    ),
    "openmpi-5.0.11-3-nodes-ppr": Launch(
        "prterun-jwb0001-838-1", ("jwb0001",), BY_NAMESPACE, [0, 1, 2]
    ),
    "openmpi-5.0.11-cyclic": Launch(
        "prterun-jwb0001-830-1", ("jwb0001",), BY_NAMESPACE, [0, 1, 0, 1]
    ),
    "openmpi-5.0.11-subset": Launch(
        "prterun-jwb0001-877-1", ("jwb0001",), BY_NAMESPACE, [0, 1]
    ),
    "slurm-openmpi-4-cyclic": Launch(
        "580583425", ("10.10.0.1", "10.20.0.1"), BY_URI, [0, 1, 0, 1], TWO
    ),
    "slurm-openmpi-4-direct": Launch(
        "581107713", ("10.10.0.1", "10.20.0.1"), BY_URI, [0, 0, 1, 1], TWO
    ),
    "slurm-openmpi-4-ppr": Launch(
        "597753857", ("10.10.0.1", "10.20.0.1"), BY_URI, [0, 1, 2], THREE
    ),
    "slurm-openmpi-5": Launch(
        "prterun-jwb0001-1290-1", ("jwb0001",), BY_NAMESPACE, [0, 1, 2], THREE
    ),
}

# Version 5 does not say on how many nodes it is, and there is no scheduler that does.
UNCLEAR = [
    "openmpi-5.0.11-cyclic-uneven",
    "openmpi-5.0.11-uneven",
    "openmpi-5.0.11-uneven-reversed",
]


def detect(name, task=0, changes=None):
    environ, hostname = recorded(name)[task]
    return detected(Process(changed(environ, changes or {}), hostname))


def expected_jobs(name):
    launch = LAUNCHES[name]
    nodes = launch.nodes or NO_NAMES[max(launch.places) + 1]
    by_name = launch.nodes and len(launch.places) > len(nodes)
    return [
        Job(
            scheduler="Open MPI in Slurm" if launch.nodes else "Open MPI",
            launch_id=launch.launch_id,
            context=LaunchContext.STEP,
            launcher=openmpi.MPIRUN,
            nodes=nodes,
            node_rank=node,
            task=task,
            allocated_nodes=len(nodes),
            provenance={
                "nodes": "SLURM_JOB_NODELIST" if launch.nodes else openmpi.SIZE,
                "node_rank": "host name" if by_name else "OMPI_COMM_WORLD_RANK",
                "tasks": "OMPI_COMM_WORLD_SIZE",
                "task": "OMPI_COMM_WORLD_RANK",
                "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
                "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
                "launch_id": "PMIX_NAMESPACE",
                "head": launch.source,
            },
            head_candidates=launch.head,
            hostname=f"jwb000{node + 1}",
            nodelist_is_shared=False,
            host_file="" if launch.nodes else "HOSTFILE",
        )
        for node, task in zip(launch.places, tasks_at(launch.places), strict=True)
    ]


# --- what was recorded --------------------------------------------------------------


def test_every_recorded_launch_is_expected():
    assert sorted([*LAUNCHES, *UNCLEAR]) == recordings("openmpi", "slurm-openmpi")


@pytest.mark.parametrize("name", LAUNCHES)
def test_recorded_launch(name):
    found = [detect(name, task) for task in range(len(LAUNCHES[name].places))]
    assert found == expected_jobs(name)


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_number_of_nodes_is_refused_by_some_task(name):
    """The others may take each task for a node; mpirun ends them with this one."""
    found = [outcome(Process(*task)) for task in recorded(name)]
    refusals = [text for text in found if isinstance(text, str)]
    assert refusals
    for text in refusals:
        assert text.startswith("HPC034 Open MPI started 2 of ")
        assert "(OMPI_COMM_WORLD_SIZE)" in text
        assert text.endswith(
            "mpirun -x PATH -np NODES --map-by ppr:1:node --hostfile HOSTFILE "
            "--bind-to none COMMAND"
        )


@pytest.mark.parametrize("name", [n for n in UNCLEAR if "reversed" not in n])
def test_unclear_number_of_nodes_is_clear_in_a_job_of_slurm(name):
    places = {
        "openmpi-5.0.11-cyclic-uneven": [0, 1, 2, 0, 1],
        "openmpi-5.0.11-uneven": [0, 0, 1],
    }[name]
    slurm = {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NODELIST": "jwb[0001-0003]" if 2 in places else "jwb[0001-0002]",
    }
    jobs = [detect(name, task, slurm) for task in range(len(places))]
    assert [job.node_rank for job in jobs] == places
    assert {len(job.nodes) for job in jobs} == {max(places) + 1}


# --- launch id ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_all_tasks_of_a_launch_agree(name):
    jobs = [detect(name, task) for task in range(len(LAUNCHES[name].places))]
    for value in ("launch_id", "nodes", "head_candidates", "has_several_tasks"):
        assert len({getattr(job, value) for job in jobs}) == 1, value


def test_different_launches_have_different_launch_ids():
    launch_ids = [detect(name).launch_id for name in LAUNCHES]
    assert len(set(launch_ids)) == len(launch_ids)


def test_launch_id_needs_nothing_that_mpirun_does_not_pass_on():
    """Over ssh, only the first node has the variables of the job."""
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb[0001-0003]"}
    first = detect("openmpi-4.1.4-3-nodes", 0, job)
    others = [detect("openmpi-4.1.4-3-nodes", task) for task in (1, 2)]
    assert first.scheduler == "Open MPI in Slurm"
    assert {job.launch_id for job in (first, *others)} == {"959053825"}
    assert {len(job.nodes) for job in (first, *others)} == {3}


# --- where mpirun runs --------------------------------------------------------------

MACHINES = {
    "one address": ("1.0;tcp://10.10.0.1:43695", ("10.10.0.1",)),
    "several": (
        "1.0;tcp://192.0.2.2,10.10.0.254:54513;tcp6://[fd00::2]:59375",
        ("192.0.2.2", "10.10.0.254", "fd00::2"),
    ),
    "several of IPv6": (
        "1.0;tcp6://[fd00::2,fd01::2]:59375",
        ("fd00::2", "fd01::2"),
    ),
    "each in brackets": (
        "1.0;tcp6://[fd00::2],[fd01::2]:59375",
        ("fd00::2", "fd01::2"),
    ),
}


@pytest.mark.parametrize("case", MACHINES)
def test_machine_of_mpirun_by_address(case):
    text, expected = MACHINES[case]
    job = detect("openmpi-4.1.4-3-nodes", 1, {"OMPI_MCA_orte_hnp_uri": text})
    assert (job.head_candidates, job.provenance["head"]) == (expected, BY_URI)


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        ("prterun-jwb0001-8511@1", ("jwb0001",)),
        ("prterun-login-01.site.example-84@12", ("login-01.site.example",)),
        ("prte-n-1-2@3", ("n-1",)),
        # of version 4, of Slurm, of nobody
        ("949026817", ()),
        ("slurm.pmix.19.0", ()),
        ("prterun-84@1", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_machine_of_mpirun_by_name(namespace, expected):
    for text in None, "", "1.0", "1.0;usock", "tcp://:1":
        changes = {"OMPI_MCA_orte_hnp_uri": text, "PMIX_NAMESPACE": namespace}
        job = detect("openmpi-4.1.4-3-nodes", 1, changes)
        assert job.head_candidates == expected, text


# --- inside of others ---------------------------------------------------------------


def test_mpirun_in_a_step_of_srun():
    """srun's ranks are those of the daemons, or of mpirun itself."""
    step = recorded("slurm-srun-3-nodes")[0][0]
    for task in range(3):
        job = detect("openmpi-5.0.11-3-nodes", task, step)
        assert job.scheduler == "Open MPI in Slurm"
        assert (job.nodes, job.node_rank) == (THREE, task)
        assert (job.task.rank, job.task.size) == (task, 3)
        assert job.launcher == openmpi.MPIRUN


def test_mpirun_on_some_nodes_of_a_job():
    """Which of them, only the launcher knows: the first, until node 0 has checked."""
    slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb[0001-0003]"}
    job = detect("openmpi-4.1.4-subset", 1, slurm)
    assert (job.nodes, job.node_rank, job.allocated_nodes) == (TWO, 1, 3)


# --- contradictions -----------------------------------------------------------------

WRONG = {
    "no size": ({"OMPI_COMM_WORLD_SIZE": None}, "HPC020", "OMPI_COMM_WORLD_SIZE"),
    "no local rank": (
        {"OMPI_COMM_WORLD_LOCAL_RANK": ""},
        "HPC020",
        "OMPI_COMM_WORLD_LOCAL_RANK is not set, although",
    ),
    "no local size": (
        {"OMPI_COMM_WORLD_LOCAL_SIZE": None},
        "HPC020",
        "OMPI_COMM_WORLD_LOCAL_SIZE is not set, although",
    ),
    "a rank that is no number": (
        {"OMPI_COMM_WORLD_RANK": "one"},
        "HPC021",
        "OMPI_COMM_WORLD_RANK='one' is not a whole number",
    ),
    "a negative size": (
        {"OMPI_COMM_WORLD_SIZE": "-3"},
        "HPC021",
        "OMPI_COMM_WORLD_SIZE='-3' is not a whole number",
    ),
    "nodes that are no number": (
        {"OMPI_MCA_orte_num_nodes": "x"},
        "HPC021",
        "OMPI_MCA_orte_num_nodes='x' is not a whole number",
    ),
    "a rank beyond the size": (
        {"OMPI_COMM_WORLD_RANK": "3"},
        "HPC033",
        "task 3 of 3, and 0 of 1 on this node (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_",
    ),
    "a local rank beyond the local size": (
        {"OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        "HPC033",
        "task 1 of 3, and 1 of 1 on this node",
    ),
    "more on this node than at all": (
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        "HPC033",
        "task 1 of 3, and 0 of 4 on this node",
    ),
    "none at all": (
        {"OMPI_COMM_WORLD_SIZE": "0", "OMPI_COMM_WORLD_RANK": "0"},
        "HPC033",
        "task 0 of 0",
    ),
    "none on this node": (
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        "HPC033",
        "0 of 0 on this node",
    ),
    "no list of the job": (
        {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb[1-"},
        "HPC022",
        "SLURM_JOB_NODELIST='jwb[1-' is not a list of nodes",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_contradiction(fault):
    changes, code, message = WRONG[fault]
    with pytest.raises(LaunchError) as caught:
        detect("openmpi-4.1.4-3-nodes", 1, changes)
    assert caught.value.code == code
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("nodes", ["0", "00"])
def test_no_node_at_all_is_no_answer(nodes):
    job = detect("openmpi-4.1.4-3-nodes", 1, {"OMPI_MCA_orte_num_nodes": nodes})
    assert len(job.nodes) == 3


def test_without_a_rank_mpirun_has_not_started_this():
    assert detect("openmpi-4.1.4-3-nodes", 1, {"OMPI_COMM_WORLD_RANK": None}) is None
