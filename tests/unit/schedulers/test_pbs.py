"""PBS: scripts, tasks of pbsdsh, and what mpirun sees of its jobs; as recorded.

Where the node file can be read, and whether its variable is set, depends on who started
the process, and on the version: see the rows of `SEEN`.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from nodes import (
    ENVIRONMENTS,
    changed,
    detected,
    make_inputs,
    make_network,
    node_file,
    outcome,
    reader,
    recorded,
    recordings,
)

from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.schedulers import openmpi, pbs
from torchrun_hpc.schedulers.job import Job, LaunchContext, Task
from torchrun_hpc.schedulers.process import Process

THREE = ("dec0001", "dec0002", "dec0003")
NOBODY = ("", "", "")

FILE = "/var/spool/pbs/aux/0.desched1"
READABLE = {FILE: "dec0001\ndec0002\ndec0003\n"}

PBS_LAUNCHES = recordings("pbs-")
# Two chunks on one host, and another host between them.
SPLIT = [name for name in PBS_LAUNCHES if "split" in name and "mpich" not in name]
ON_THREE = [n for n in PBS_LAUNCHES if "split" not in n and "packed" not in n]


def started_by_pbs(start, rank, task, provenance):
    return Job(
        "PBS", "0", start, pbs.ANY_MPIEXEC, THREE, rank, task, allocated_nodes=3,
        provenance=provenance,
    )  # fmt: skip


def by_pbsdsh(rank):
    """Describe a task; PBS does not name the file on the first node."""
    source = FILE if rank == 0 else "PBS_NODEFILE"
    provenance = {
        "nodes": source,
        "launch_id": "PBS_JOBID",
        "tasks": source,
        "task": "host name",
        "node_rank": "host name",
    }
    return started_by_pbs(LaunchContext.STEP, rank, Task(rank, 3, 0, 1), provenance)


class Mpirun(NamedTuple):
    """What mpirun tells about itself."""

    launch_id: str
    head: tuple[str, ...]

    def task(self, rank, nodes=THREE):
        """Describe a task: with the names of the nodes, or without."""
        known = nodes != NOBODY
        return Job(
            scheduler="Open MPI in PBS" if known else "Open MPI",
            launch_id=self.launch_id,
            context=LaunchContext.STEP,
            launcher=openmpi.MPIRUN,
            nodes=nodes,
            node_rank=rank,
            task=Task(rank, 3, 0, 1),
            allocated_nodes=3,
            provenance={
                "nodes": "PBS_NODEFILE" if known else "OMPI_COMM_WORLD_SIZE",
                "node_rank": "OMPI_COMM_WORLD_RANK",
                "tasks": "OMPI_COMM_WORLD_SIZE",
                "task": "OMPI_COMM_WORLD_RANK",
                "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
                "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
                "launch_id": "PMIX_NAMESPACE",
                "head": "OMPI_MCA_orte_hnp_uri",
            },
            head_candidates=self.head,
            hostname=THREE[rank],
            nodelist_is_shared=False,
            host_file="$PBS_NODEFILE" if known else "HOSTFILE",
        )


HEAD = ("10.30.0.1", "10.40.0.1")
OVER_SSH = Mpirun("1840447489", HEAD)
WITH_X = Mpirun("1838743553", HEAD)
OVER_TM = Mpirun("1819803649", HEAD)

# Who started it; which launch that is; what every task sees.
SEEN = {
    "the script": (
        "pbs-script",
        [
            started_by_pbs(
                LaunchContext.BATCH_SCRIPT,
                0,
                Task(),
                {"nodes": "PBS_NODEFILE", "launch_id": "PBS_JOBID"},
            )
        ],
    ),
    "pbsdsh": ("pbs-pbsdsh", [by_pbsdsh(0), by_pbsdsh(1), by_pbsdsh(2)]),
    "Open MPI over ssh": (
        "pbs-openmpi-4.1.4",
        # The other nodes have no variable of PBS.
        [OVER_SSH.task(0), OVER_SSH.task(1, NOBODY), OVER_SSH.task(2, NOBODY)],
    ),
    "Open MPI over ssh, -x PBS_NODEFILE -x PBS_JOBID": (
        "pbs-openmpi-4.1.4-x",
        [WITH_X.task(0), WITH_X.task(1), WITH_X.task(2)],
    ),
    "Open MPI over pbs_tmrsh": (
        "pbs-openmpi-4.1.4-tm",
        [OVER_TM.task(0), OVER_TM.task(1), OVER_TM.task(2)],
    ),
}


def process(name, task=0, changes=None, files=None):
    environ, hostname = recorded(name)[task]
    files = READABLE if files is None else files
    return Process(changed(environ, changes or {}), hostname, read=reader(files))


# --- what was recorded --------------------------------------------------------------


def test_every_recorded_launch_is_expected():
    names = {name for name, _ in SEEN.values()}
    assert names | set(SPLIT) == {n for n in PBS_LAUNCHES if "mpich" not in n}  # Hydra


@pytest.mark.parametrize("name", ON_THREE)
def test_node_file_of_every_recorded_launch(name):
    assert node_file(name) == READABLE[FILE]
    tasks = json.loads((ENVIRONMENTS / f"{name}.json").read_text())["tasks"]
    assert {task.get("PBS_NODEFILE", FILE) for task in tasks} == {FILE}


@pytest.mark.parametrize("case", SEEN)
def test_recorded_launch(case):
    name, expected = SEEN[case]
    found = [detected(process(name, task)) for task in range(len(expected))]
    assert found == expected


@pytest.mark.parametrize("case", SEEN)
def test_all_tasks_of_a_launch_agree(case):
    name, expected = SEEN[case]
    jobs = [detected(process(name, task)) for task in range(len(expected))]
    assert {job.launch_id for job in jobs} == {expected[0].launch_id}
    assert {len(job.nodes) for job in jobs} == {3}


@pytest.mark.parametrize("name", [n for n in ON_THREE if "openmpi" in n])
def test_a_node_file_that_only_the_first_node_can_read(name):
    """It is the same launch: what must be equal is not made of the file."""
    jobs = [
        detected(process(name, task, files=READABLE if task == 0 else {}))
        for task in range(3)
    ]
    assert len({job.launch_id for job in jobs}) == 1
    assert [job.nodes for job in jobs] == [THREE, NOBODY, NOBODY]
    assert [job.node_rank for job in jobs] == [0, 1, 2]


# --- the node file ------------------------------------------------------------------


def test_pbsdsh_where_the_other_nodes_have_no_file():
    """OpenPBS with $gen_nodefile_on_sister_mom 0, and before 2021."""
    no_variable = {"PBS_NODEFILE": None}
    assert outcome(process("pbs-pbsdsh", 0, no_variable)) == by_pbsdsh(0)
    for task in (1, 2):
        found = outcome(process("pbs-pbsdsh", task, no_variable, files={}))
        assert found.startswith(f"HPC035 {FILE} cannot be read here, and names the")
        assert "PBS job 0" in found


@pytest.mark.parametrize("text", [None, "", "\n \n"])
def test_a_node_file_that_cannot_be_read(text):
    found = outcome(process("pbs-script", files={} if text is None else {FILE: text}))
    assert found.startswith(f"HPC035 {FILE} cannot be read here")


def test_a_node_file_at_another_place():
    changes = {"PBS_NODEFILE": "/local/nodes"}
    files = {"/local/nodes": "dec0001\ndec0003\n", FILE: "dec0009\n"}
    job = detected(process("pbs-script", 0, changes, files))
    assert (job.nodes, job.provenance["nodes"]) == (
        ("dec0001", "dec0003"),
        "PBS_NODEFILE",
    )


def test_a_variable_that_names_no_file_gives_way_to_the_usual_one():
    changes = {"PBS_NODEFILE": "/gone"}
    job = detected(process("pbs-script", 0, changes))
    assert (job.nodes, job.provenance["nodes"]) == (THREE, FILE)


NODE_FILES = {
    "several slots": ("dec0001 " * 4 + "dec0002 " * 4, ("dec0001", "dec0002")),
    "not side by side": ("dec0001 dec0002 dec0001", ("dec0001", "dec0002")),
    "another order": ("dec0003 dec0001", ("dec0003", "dec0001")),
    "with domains": ("dec0001.site dec0002.site", ("dec0001.site", "dec0002.site")),
    "one": ("dec0001", ("dec0001",)),
}


@pytest.mark.parametrize("case", NODE_FILES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_nodes_of_a_script(case, ending):
    words, expected = NODE_FILES[case]
    files = {FILE: ending.join(words.split()) + ending}
    job = detected(process("pbs-script", files=files))
    assert (job.context, job.nodes) == (LaunchContext.BATCH_SCRIPT, expected)
    assert job.nodes[job.node_rank].startswith("dec0001")


# Whatever has written it: what is shown of the line.
WRONG_FILES = {
    "slots": ("dec0001 slots=4\n", "entry 1 is 'dec0001 slots=4'"),
    "counts": ("dec0001\ndec0002 4\n", "entry 2 is 'dec0002 4'"),
    "two names": ("dec0001 dec0002\n", "entry 1 is 'dec0001 dec0002'"),
    "binary": ("\x7fELF\x02\x01\0\0\ufffd", r"entry 1 is '\x7fELF\x02\x01\x00"),
    "a terminal's colour": ("\x1b[31mdec0001\n", r"entry 1 is '\x1b[31mdec0001'"),
    "a line without end": ("dec" * 999, f"entry 1 is '{('dec' * 999)[:40]}...'"),
    "another language": ("d\u00e9c0001\n", r"entry 1 is 'd\xe9c0001'"),
    "a list of Slurm's": ("dec[1-3]\n", "entry 1 is 'dec[1-3]'"),
    "an option": ("-host dec1\n", "entry 1 is '-host dec1'"),
    "lines without end": ("a\n" * (2**20 + 1), "entry 1048577 is 'a'"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_node_file_that_is_none(case):
    text, shown = WRONG_FILES[case]
    start = "HPC140 PBS_NODEFILE does not list the job's hosts: "
    for name in "pbs-script", "pbs-openmpi-4.1.4", "pbs-mpich-4.0.2":
        found = outcome(process(name, files={FILE: text}))
        assert found.startswith(start), name
        assert shown in found, name
        assert found.isprintable(), name
        assert len(found) < 400, name


def test_comments_and_blank_lines_do_not_count():
    text = "# of a user\n\n  dec0001  # the first\n\t\ndec0002\r\n#dec0003\n"
    job = detected(process("pbs-script", files={FILE: text}))
    assert job.nodes == THREE[:2]


@pytest.mark.parametrize(
    ("lines", "start"),
    [
        # mpiprocs=0 on the first chunk: the script's host is not in the file
        ("dec0002\ndec0003\n", LaunchContext.ALLOCATION_SHELL),
        ("dec0002\n", LaunchContext.BATCH_SCRIPT),
    ],
)
def test_script_on_a_host_that_is_not_in_the_file(lines, start):
    job = detected(process("pbs-script", files={FILE: lines}))
    assert (job.context, job.node_rank) == (start, None)


# --- launch id ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_id", "launch_id"),
    [
        ("2.desched1", "2"),
        ("1473351.desched1", "1473351"),
        ("6826897.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov", "6826897"),
        ("174170283.gadi-pbs", "174170283"),
        ("17[0].desched1", "17_0"),
        ("17[12].desched1", "17_12"),
        ("17[].desched1", "17--"),
        ("17", "17"),
        ("a/b c.server", "a-b-c"),
    ],
)
def test_launch_id(job_id, launch_id):
    changes = {"PBS_JOBID": job_id}
    job = detected(process("pbs-script", 0, changes))
    assert job.launch_id == launch_id


def test_elements_of_an_array_differ():
    jobs = [
        detected(process("pbs-script", 0, {"PBS_JOBID": f"17[{i}].desched1"}))
        for i in range(12)
    ]
    assert len({job.launch_id for job in jobs}) == 12


# --- ways to start ------------------------------------------------------------------


def test_no_job():
    environ, hostname = recorded("pbs-script")[0]
    no_job = Process(changed(environ, {"PBS_JOBID": None}), hostname)
    assert detected(no_job) is None


def test_interactive_job():
    changes = {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
    job = detected(process("pbs-script", 0, changes))
    assert (job.context, job.nodes) == (LaunchContext.INTERACTIVE_STEP, ("dec0001",))
    assert (job.node_rank, job.allocated_nodes) == (0, 3)


def test_mpiexec_of_pals_in_an_interactive_job():
    """It hands the shell's variables on; only its own say which task this is."""
    for rank in range(3):
        changes = {
            "PBS_ENVIRONMENT": "PBS_INTERACTIVE",
            "PALS_RANKID": f"{rank}",
            "PALS_NODEID": f"{rank}",
            "PALS_LOCAL_RANKID": "0",
            "PALS_LOCAL_SIZE": "1",
            "PMI_SIZE": "3",
        }
        job = detected(process("pbs-script", 0, changes))
        assert (job.scheduler, job.context) == ("PALS in PBS", LaunchContext.STEP)
        assert (job.nodes, job.node_rank) == (THREE, rank)


@pytest.mark.parametrize("task", range(3))
def test_pbsdsh_with_several_slots_on_a_node(task):
    """It starts a task for each, and tells them no ranks."""
    files = {FILE: "dec0001\n" * 4 + "dec0002\n" * 4 + "dec0003\n"}
    found = outcome(process("pbs-pbsdsh", task, files=files))
    source = FILE if task == 0 else "PBS_NODEFILE"
    assert found.startswith(f"HPC036 pbsdsh starts a task for each line of {source}, 4")
    mpirun = "mpirun -x PATH -np 3 --map-by ppr:1:node --hostfile $PBS_NODEFILE"
    mpirun += " --bind-to none COMMAND"
    line = f"mpiexec -n 3 --ppn 1 COMMAND   (with Open MPI: {mpirun})"
    assert found.endswith(f"or type: {line}")


def test_two_chunks_on_one_host():
    """Open MPI takes it for one, and pbsdsh starts a task for each."""
    (openmpi_, pbsdsh) = SPLIT
    files = {FILE: node_file(pbsdsh)}
    jobs = [detected(process(openmpi_, t, files=files)) for t in range(2)]
    assert [job.nodes for job in jobs] == [("dec0001", "dec0002"), ("", "")]
    assert [(job.node_rank, job.task) for job in jobs] == [
        (rank, Task(rank, 2, 0, 1)) for rank in range(2)
    ]
    for task in range(3):
        found = outcome(process(pbsdsh, task, files=files))
        assert found.startswith("HPC036 pbsdsh starts a task for each line of")


@pytest.mark.parametrize("hostname", ["dec0002", "dec0002.site"])
@pytest.mark.parametrize("number", [None, "", "3", "999999999"])
def test_task_of_pbsdsh_without_its_number_is_known_by_name(number, hostname):
    environ, _ = recorded("pbs-pbsdsh")[1]
    environ = changed(environ, {"PBS_NODENUM": number})
    job = detected(Process(environ, hostname, read=reader(READABLE)))
    assert (job.node_rank, job.task) == (1, Task(1, 3))
    assert job.provenance["task"] == job.provenance["node_rank"] == "host name"


def test_task_of_pbsdsh_on_a_host_that_has_another_name():
    environ, _ = recorded("pbs-pbsdsh")[1]
    job = detected(Process(environ, "other", read=reader(READABLE)))
    assert (job.node_rank, job.provenance["node_rank"]) == (1, "PBS_NODENUM")
    assert job.provenance["task"] == "PBS_NODENUM"


def test_name_and_number_of_a_task_of_pbsdsh_that_differ():
    """mpiprocs=0 on the first chunk: numbers count a host that is not in the file."""
    files = {FILE: "dec0002\ndec0003\n"}
    jobs = [detected(process("pbs-pbsdsh", t, files=files)) for t in (1, 2)]
    assert [job.node_rank for job in jobs] == [0, 1]


def test_task_of_pbsdsh_that_nothing_places():
    environ, _ = recorded("pbs-pbsdsh")[1]
    environ = changed(environ, {"PBS_NODENUM": "7"})
    found = outcome(Process(environ, "elsewhere", read=reader(READABLE)))
    assert found.startswith("HPC037 PBS_NODENUM=7, and elsewhere is not among the 3")


@pytest.mark.parametrize("number", ["-1", "one", "1.0", "\u0661"])
def test_a_number_of_a_node_that_is_none(number):
    found = outcome(process("pbs-pbsdsh", 1, {"PBS_NODENUM": number}))
    assert found.startswith(f"HPC021 PBS_NODENUM={number!r} is not a whole number")


@pytest.mark.parametrize("number", ["1", "", None, "0000000g", "000000001"])
def test_only_tasks_of_pbsdsh_have_a_number_of_eight_digits(number):
    changes = {"PBS_TASKNUM": number}
    job = detected(process("pbs-script", 0, changes))
    assert job.context is LaunchContext.BATCH_SCRIPT


def test_the_usual_file_is_the_one_of_the_job():
    assert pbs.USUAL_FILE.format("17[3].desched1") == (
        "/var/spool/pbs/aux/17[3].desched1"
    )


# --- nodes that see different things ------------------------------------------------

DECS = {"dec0001": "10.30.0.1", "dec0002": "10.30.0.2", "dec0003": "10.30.0.3"}


@pytest.mark.parametrize("told", [{}, {"MASTER_ADDR": "dec0001", "MASTER_PORT": "1"}])
def test_open_mpi_over_ssh_meets_although_one_node_knows_the_list(told):
    """Only the first node has the node file; -x hands the variables to all."""
    found = []
    for rank in range(3):
        at = process("pbs-openmpi-4.1.4", rank, files={FILE: "\n".join(THREE)})
        job = detected(at)
        address = f"10.30.0.{rank + 1}"
        here = make_network({"eth0": f"{address}/24"}, DECS)
        inputs = make_inputs(job=job, site=None, network=here, environ=told)
        plan = make_plan(inputs)
        found.append(
            (plan.rendezvous.connect_host, plan.rendezvous.ports[0], plan.launch_id)
        )
        assert plan.rendezvous.is_coordinator is (rank == 0)
        assert (
            plan.rendezvous.listen is None or plan.rendezvous.listen[0] == "10.30.0.1"
        )
    assert len(set(found)) == 1
    assert found[0][0] == "10.30.0.1"
