"""Open MPI's mpirun, alone and in a job of Slurm: its recorded launches, changed."""

from __future__ import annotations

import pytest

from tests.support.detection import detected, outcome, with_changes
from tests.support.launch_examples import Tasks, Wrong, assert_refusal, assert_refused
from tests.support.recordings import recorded
from torchrun_hpc.schedulers import openmpi
from torchrun_hpc.schedulers.process import Process

TWO = ("jwb0001", "jwb0002")
THREE = ("jwb0001", "jwb0002", "jwb0003")
JOB = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb[0001-0003]"}
EACH = "openmpi-4.1.4-3-nodes"


def open_mpi_5(task, node, _places):
    return {
        "OMPI_COMM_WORLD_RANK": task.rank,
        "OMPI_COMM_WORLD_SIZE": task.size,
        "OMPI_COMM_WORLD_LOCAL_RANK": task.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": task.local_size,
        "PMIX_NAMESPACE": "prterun-jwb0001-8511@1",
        "PMIX_SERVER_URI2": f"prterun-jwb0001-8511@0.{node};tcp4://127.0.0.1:51163",
    }


def open_mpi_4(task, node, places):
    return {
        **open_mpi_5(task, node, places),
        "PMIX_NAMESPACE": "959053825",
        "PMIX_SERVER_URI2": f"959053824.{node};tcp4://127.0.0.1:49047",
        "OMPI_MCA_orte_hnp_uri": "959053824.0;tcp://10.10.0.1:43695",
        "OMPI_MCA_orte_num_nodes": max(places) + 1,
    }


EXAMPLES = {
    "Open MPI 4": Tasks(
        open_mpi_4,
        ("959053825", "959053825"),
        ancestors=("sh", "orted", "slurmstepd"),
        recording=EACH,
    ),
    "Open MPI 5": Tasks(
        open_mpi_5,
        ("prterun-jwb0001-8511-1", "prterun-jwb0001-8511-1"),
        ancestors=("prted", "sshd"),
        recording="openmpi-5.0.11-3-nodes",
    ),
}


def detect(name, task=0, changes=None):
    environ, hostname = recorded(name)[task]
    return detected(with_changes(Process(environ, hostname), changes or {}))


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("openmpi-5.0.11-cyclic-uneven", [0, 1, 2, 0, 1]),
        ("openmpi-5.0.11-uneven", [0, 0, 1]),
    ],
)
def test_unclear_number_of_nodes_is_clear_in_a_job_of_slurm(name, places):
    nodes = THREE[: max(places) + 1]
    slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": ",".join(nodes)}
    jobs = [detect(name, task, slurm) for task in range(len(places))]
    assert [job.node_rank for job in jobs] == places
    assert {job.nodes for job in jobs} == {nodes}


def test_launch_id_needs_nothing_that_mpirun_does_not_pass_on():
    """Over ssh, only the first node has the variables of the job."""
    first = detect(EACH, 0, JOB)
    others = [detect(EACH, task) for task in (1, 2)]
    assert first.scheduler == "Open MPI in Slurm"
    assert {job.launch_id for job in (first, *others)} == {"959053825"}
    assert {len(job.nodes) for job in (first, *others)} == {3}


def test_a_task_that_is_not_told_the_number_of_its_daemon():
    for task in range(3):
        job = detect(EACH, task, {"PMIX_SERVER_URI2": None})
        assert job == detect(EACH, task)


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


@pytest.mark.parametrize(("text", "expected"), MACHINES.values(), ids=MACHINES)
def test_machine_of_mpirun_by_address(text, expected):
    job = detect(EACH, 1, {"OMPI_MCA_orte_hnp_uri": text})
    assert (job.head_candidates, job.provenance["head"]) == (
        expected,
        "OMPI_MCA_orte_hnp_uri",
    )


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
        job = detect(EACH, 1, changes)
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
    job = detect("openmpi-4.1.4-subset", 1, JOB)
    assert (job.nodes, job.node_rank, job.allocated_nodes) == (TWO, 1, 3)


# --- contradictions -----------------------------------------------------------------

# In task 1 of three, one on each node.
WRONG: Wrong = {
    "HPC020 {name} is not set, but other ": {
        "OMPI_COMM_WORLD_SIZE": [None],
        "OMPI_COMM_WORLD_LOCAL_RANK": [""],
        "OMPI_COMM_WORLD_LOCAL_SIZE": [None],
    },
    "HPC021 {shown} is not a whole number": {
        "OMPI_COMM_WORLD_RANK": ["one"],
        "OMPI_COMM_WORLD_SIZE": ["-3"],
        "OMPI_MCA_orte_num_nodes": ["x"],
    },
    "HPC033 Open MPI says that this is task 3 of 3, and 0 of 1 on this node "
    "(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), which": {
        "OMPI_COMM_WORLD_RANK": ["3"],
    },
    "HPC033 Open MPI says that this is task 1 of 3, and 1 of 1 on this node": {
        "OMPI_COMM_WORLD_LOCAL_RANK": ["1"],
    },
    "HPC033 Open MPI says that this is task 1 of 3, and 0 of {value} on this node": {
        "OMPI_COMM_WORLD_LOCAL_SIZE": ["0", "4"],
    },
}


def test_contradiction():
    process = Process(*recorded(EACH)[1])
    assert_refused(process, WRONG)
    nobody = {"OMPI_COMM_WORLD_SIZE": "0", "OMPI_COMM_WORLD_RANK": "0"}
    start = "HPC033 Open MPI says that this is task 0 of 0"
    assert_refusal(with_changes(process, nobody), start)
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb[1-"}
    start = "HPC021 SLURM_JOB_NODELIST='jwb[1-' is not a list of nodes"
    assert_refusal(with_changes(process, job), start)


@pytest.mark.parametrize("nodes", ["0", "00"])
def test_no_node_at_all_is_no_answer(nodes):
    job = detect(EACH, 1, {"OMPI_MCA_orte_num_nodes": nodes})
    assert len(job.nodes) == 3


def test_without_a_rank_mpirun_has_not_started_this():
    process = with_changes(Process(*recorded(EACH)[1]), {"OMPI_COMM_WORLD_RANK": None})
    assert outcome(process) is None
