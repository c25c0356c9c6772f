"""Hydra: MPICH's and Intel MPI's mpiexec, alone and in a job; as recorded."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from nodes import changed, detected, node_file, reader, recorded, recordings, tasks_at

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers import hydra
from torchrun_hpc.schedulers.allocation import Allocation
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.schedulers.launched_job import launched_job
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

TWO = ("jwb0001", "jwb0002")
THREE = ("jwb0001", "jwb0002", "jwb0003")

EACH = [0, 1, 2]
BLOCK = [0, 0, 1, 1]
CYCLIC = [0, 1, 0, 1]
UNEVEN = [0, 0, 1]


class Launch(NamedTuple):
    """What is expected of a launch."""

    places: list[int]  # for each rank its node
    nodes: tuple[str, ...] = ()  # their names, if a scheduler tells them
    job: str = ""  # its number
    scheduler: str = ""
    provenance: tuple[str, str] = ("", "")  # of nodes and job


SLURM = ("SLURM_JOB_NODELIST", "SLURM_JOB_ID")
PBS = ("PBS_NODEFILE", "PBS_JOBID")
TWO_DECS = ("dec0001", "dec0002")
LAUNCHES = {
    "intelmpi-2021-2-nodes-2-each": Launch(BLOCK),
    "intelmpi-2021-3-nodes": Launch(EACH),
    "intelmpi-2021-3-nodes-from-login": Launch(EACH),
    "intelmpi-2021-cyclic": Launch(CYCLIC),
    "intelmpi-2021-uneven": Launch(UNEVEN),
    "mpich-4.0.2-2-nodes-2-each": Launch(BLOCK),
    "mpich-4.0.2-3-nodes": Launch(EACH),
    "mpich-4.0.2-3-nodes-from-login": Launch(EACH),
    "mpich-4.0.2-cyclic": Launch(CYCLIC),
    "mpich-4.0.2-uneven": Launch(UNEVEN),
    "mpich-5.0.2-2-nodes-2-each": Launch(BLOCK),
    "mpich-5.0.2-3-nodes": Launch(EACH),
    "mpich-5.0.2-3-nodes-from-login": Launch(EACH),
    "mpich-5.0.2-cyclic": Launch(CYCLIC),
    "mpich-5.0.2-uneven": Launch(UNEVEN),
    "pbs-mpich-4.0.2": Launch(
        EACH,
        ("dec0001", "dec0002", "dec0003"),
        "0",
        "PBS",
        PBS,
    ),
    # Two chunks on one host, side by side, and not: Hydra says three nodes there.
    "pbs-mpich-4.0.2-packed": Launch([0] * 8 + [1] * 4, TWO_DECS, "1", "PBS", PBS),
    "pbs-mpich-4.0.2-split-chunks": Launch([0, 1, 0], TWO_DECS, "0", "PBS", PBS),
    "slurm-intelmpi": Launch(EACH, THREE, "6", "Slurm", SLURM),
    "slurm-mpich-4": Launch(EACH, THREE, "3", "Slurm", SLURM),
    "slurm-mpich-4-2-each": Launch(BLOCK, TWO, "12", "Slurm", SLURM),
}
# Whose places follow from the variables alone.
CLEAR = [n for n in LAUNCHES if LAUNCHES[n].places in (EACH, BLOCK)]
IN_A_JOB = [name for name in LAUNCHES if LAUNCHES[name].nodes]


def files(name):
    if not name.startswith("pbs"):
        return reader({})
    environ, _ = recorded(name)[0]
    return reader({environ["PBS_NODEFILE"]: node_file(name)})


def nobody(_environ):
    return None


def exchange_of(name, *, mapping=True):
    """Return a process manager: what the first task has told all of them."""
    places = tuple(LAUNCHES[name].places) if mapping else ()
    named = {place: recorded(name)[rank][1] for rank, place in enumerate(places)}
    head = recorded(name)[0][1]
    return lambda _environ: Exchanged(head, "0badcafe", places, tuple(named.values()))


def detect(name, task=0, changes=None, exchange=nobody):
    environ, hostname = recorded(name)[task]
    process = Process(
        changed(environ, changes or {}), hostname, read=files(name), exchange=exchange
    )
    return detected(process)


HOST_FILES = {"Slurm": "", "PBS": "$PBS_NODEFILE", "": "HOSTFILE"}


def expected_jobs(name, launch_id, *, exchanged, mapping=True):
    """Describe a launch; only the process manager names what no scheduler names."""
    launch = LAUNCHES[name]
    number = max(launch.places) + 1
    nodes = launch.nodes or ("",) * number
    head = launch.nodes[:1]
    if exchanged and not head:
        head = ("jwb0001",)
    more = {"head": "PMI"} if exchanged else {}
    ranked = "PMI_RANK"
    local_rank, local_size = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    if launch.job and number < len(launch.places):
        ranked = "host name"
    if exchanged and mapping:
        ranked = local_rank = local_size = "PMI"
    by = [launch.provenance[1]] if launch.job else []
    by += ["PMI"] if exchanged else []
    return [
        Job(
            scheduler=f"Hydra in {launch.scheduler}" if launch.scheduler else "Hydra",
            launch_id=launch_id,
            context=LaunchContext.STEP,
            launcher=hydra.MPIEXEC,
            nodes=nodes,
            node_rank=node,
            task=task,
            allocated_nodes=number,
            provenance={
                "nodes": launch.provenance[0] or "PMI_SIZE",
                "node_rank": ranked,
                "tasks": "PMI_SIZE",
                "task": "PMI_RANK",
                "local_rank": local_rank,
                "local_size": local_size,
                "launch_id": ", ".join(by),
                **more,
            },
            head_candidates=head,
            hostname=recorded(name)[task.rank][1],
            pmi_is_open=exchanged,
            host_file=HOST_FILES[launch.scheduler],
        )
        for node, task in zip(launch.places, tasks_at(launch.places), strict=True)
    ]


# --- what was recorded --------------------------------------------------------------


def test_every_recorded_launch_is_expected():
    names = ("intelmpi", "mpich", "pbs-mpich", "slurm-intelmpi", "slurm-mpich")
    assert list(LAUNCHES) == recordings(*names)


@pytest.mark.parametrize("name", LAUNCHES)
def test_recorded_launch_whose_tasks_tell_each_other(name):
    """All that the variables leave open: names, an instance, cyclic and uneven."""
    job = LAUNCHES[name].job
    tasks = range(len(LAUNCHES[name].places))
    found = [detect(name, task, exchange=exchange_of(name)) for task in tasks]
    launch_id = f"{job}.0badcafe" if job else "0badcafe"
    assert found == expected_jobs(name, launch_id, exchanged=True)


@pytest.mark.parametrize("name", CLEAR)
def test_recorded_launch_without_a_process_manager(name):
    """Without names, tasks are taken to be placed node after node, as many on each."""
    launch = LAUNCHES[name]
    found = [detect(name, task) for task in range(len(launch.places))]
    launch_id = launch.job or "mpiexec"
    assert found == expected_jobs(name, launch_id, exchanged=False)


@pytest.mark.parametrize("name", [n for n in LAUNCHES if "uneven" in n])
def test_uneven_tasks_without_a_process_manager_are_refused(name):
    for task in (0, 1):
        with pytest.raises(LaunchError, match=r"2 of 3 tasks on this node") as caught:
            detect(name, task)
        assert caught.value.code == "HPC034"
        assert "PMI_SIZE" in str(caught.value)
        assert "-ppn 1 -f HOSTFILE -bind-to none COMMAND" in str(caught.value)


@pytest.mark.parametrize("name", [n for n in LAUNCHES if "cyclic" in n])
def test_cyclic_tasks_without_a_process_manager_have_ranks_and_cannot_meet(name):
    """Nothing tells them from others; without a head they are refused later."""
    jobs = [detect(name, task) for task in range(4)]
    assert [job.task for job in jobs] == tasks_at(CYCLIC)
    assert {(job.nodes, job.head_candidates) for job in jobs} == {(("", ""), ())}


@pytest.mark.parametrize("name", CLEAR)
def test_a_process_manager_that_does_not_say_where_tasks_are(name):
    launch = LAUNCHES[name]
    exchange = exchange_of(name, mapping=False)
    found = [
        detect(name, task, exchange=exchange) for task in range(len(launch.places))
    ]
    launch_id = f"{launch.job}.0badcafe" if launch.job else "0badcafe"
    assert found == expected_jobs(name, launch_id, exchanged=True, mapping=False)


# --- launch id ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_two_launches_with_the_same_variables_differ_by_what_the_first_task_tells(name):
    places = tuple(LAUNCHES[name].places)
    launch_ids = {
        detect(name, exchange=lambda _, i=i: Exchanged("h", i, places)).launch_id
        for i in ("11111111", "22222222")
    }
    assert len(launch_ids) == 2


@pytest.mark.parametrize("name", IN_A_JOB)
def test_the_variables_of_the_job_are_on_all_nodes(name):
    """Hydra hands the environment of the first node on, PBS_NODENUM=0 and all."""
    jobs = [detect(name, task) for task in range(len(LAUNCHES[name].places))]
    assert {job.launch_id for job in jobs} == {LAUNCHES[name].job}
    assert [job.node_rank for job in jobs] == LAUNCHES[name].places


def test_a_node_file_that_only_the_first_node_can_read():
    """The number of nodes is that of the tasks; names are then missing elsewhere."""
    name = "pbs-mpich-4.0.2"
    environ, hostname = recorded(name)[1]
    job = detected(Process(environ, hostname, exchange=exchange_of(name)))
    assert job.nodes == ("", "", "")
    assert (job.node_rank, job.launch_id) == (1, "0.0badcafe")
    assert job.head_candidates == ("dec0001",)


# --- who else sets these variables --------------------------------------------------


@pytest.mark.parametrize("task", range(3))
def test_srun_with_pmi2_is_not_hydra(task):
    environ, hostname = recorded("slurm-srun-pmi2")[task]
    assert environ["PMI_RANK"] == str(task)
    assert detected(Process(environ, hostname)).scheduler == "Slurm"


@pytest.mark.parametrize("name", ["mpich-4.0.2-3-nodes", "intelmpi-2021-3-nodes"])
def test_mpiexec_in_a_step_of_srun(name):
    step = recorded("slurm-srun-3-nodes")[0][0]
    jobs = [detect(name, task, step) for task in range(3)]
    assert {job.scheduler for job in jobs} == {"Hydra in Slurm"}
    assert {job.nodes for job in jobs} == {THREE}
    assert [job.node_rank for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize("variable", ["PMI_RANK", "MPI_LOCALRANKID"])
@pytest.mark.parametrize("value", [None, ""])
def test_one_variable_alone_proves_nothing(variable, value):
    assert detect("mpich-4.0.2-3-nodes", 1, {variable: value}) is None


def test_the_process_manager_is_not_asked_by_others():
    def asked(_environ):
        pytest.fail("asked")

    environ, hostname = recorded("openmpi-4.1.4-3-nodes")[0]
    assert detected(Process(environ, hostname, exchange=asked))
    environ, hostname = recorded("slurm-srun-pmi2")[0]
    assert detected(Process(environ, hostname, exchange=asked))


# --- contradictions -----------------------------------------------------------------

WRONG = {
    "no size": ({"PMI_SIZE": None}, "HPC020", "PMI_SIZE is not set, although"),
    "no local size": ({"MPI_LOCALNRANKS": ""}, "HPC020", "MPI_LOCALNRANKS is not set"),
    "a rank that is no number": ({"PMI_RANK": "x"}, "HPC021", "PMI_RANK='x' is not a"),
    "a rank beyond the size": ({"PMI_RANK": "3"}, "HPC033", "task 3 of 3"),
    "a local rank beyond the local size": (
        {"MPI_LOCALRANKID": "1"},
        "HPC033",
        "1 of 1 on this node (PMI_RANK, PMI_SIZE), which cannot be",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize(
    "exchange", [nobody, exchange_of("mpich-4.0.2-3-nodes")], ids=["alone", "exchanged"]
)
def test_contradiction(fault, exchange):
    changes, code, message = WRONG[fault]
    with pytest.raises(LaunchError) as caught:
        detect("mpich-4.0.2-3-nodes", 1, changes, exchange)
    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize("hosts", [("dec0001", "dec0002"), ("dec0001.a", "dec0002.a")])
def test_two_chunks_on_one_host_are_workers_with_ranks_of_their_own(hosts):
    """Each has MPI_LOCALRANKID=0 of 1, which would be two workers on one GPU."""
    name = "pbs-mpich-4.0.2-split-chunks"
    exchanged = Exchanged(hosts[0], "0badcafe", (0, 1, 0), hosts)
    jobs = [detect(name, task, exchange=lambda _: exchanged) for task in range(3)]
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


@pytest.mark.parametrize("case", ORDERS)
def test_names_are_in_the_order_of_the_ranks(case):
    """Not of the scheduler's list: mpiexec -hosts c,b,a."""
    hosts, expected = ORDERS[case]
    exchanged = Exchanged(hosts[0], "0badcafe", tuple(range(len(hosts))), hosts)
    jobs = []
    for rank, host in enumerate(hosts):
        environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "jwb[0001-0003]"}
        environ |= {"PMI_RANK": str(rank), "PMI_SIZE": str(len(hosts))}
        environ |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        process = Process(environ, host, exchange=lambda _: exchanged)
        jobs.append(detected(process))
    assert {job.nodes for job in jobs} == {expected}
    assert [job.node_rank for job in jobs] == list(range(len(hosts)))


def test_a_part_of_the_job_begins_where_rank_0_is():
    """mpiexec -hosts jwb0002,jwb0003 in a job of three nodes: rank 0 has told so."""
    allocation = Allocation("Slurm", "7", THREE, {"nodes": "A", "launch_id": "B"})
    exchanged = Exchanged("jwb0002", "0badcafe", (0, 1))
    for rank, host in enumerate(THREE[1:]):
        environ = {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
        environ |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        process = Process(environ, host, exchange=lambda _environ: exchanged)
        layout = hydra.task_layout(process)
        job = launched_job(hydra.DETECTOR, layout, allocation, process)
        assert (job.nodes, job.node_rank) == (("jwb0002", ""), rank)
        assert job.launch_id == "7.0badcafe"
