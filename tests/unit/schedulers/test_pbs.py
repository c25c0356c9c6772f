"""PBS: scripts, tasks of pbsdsh, and what mpirun sees of its jobs; recorded, changed.

Whoever started the process, and the version of PBS, decide whether the node file can be
read, and whether its variable is set.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.detection import detected, outcome, refusal, with_changes
from tests.support.launch_examples import Batch, assert_refused, launch
from tests.support.networks import make_network
from tests.support.plans import make_inputs, make_plan
from tests.support.recordings import node_file, recorded, recordings
from torchrun_hpc import explain
from torchrun_hpc.options import command_line
from torchrun_hpc.options.options import EQUAL
from torchrun_hpc.planning import several_nodes
from torchrun_hpc.rendezvous.connection import request_of
from torchrun_hpc.schedulers import detector
from torchrun_hpc.schedulers.job import LaunchContext, Task
from torchrun_hpc.schedulers.process import Process

THREE = ("dec0001", "dec0002", "dec0003")
NOBODY = ("", "", "")

FILE = "/var/spool/pbs/aux/0.desched1"
READABLE = {FILE: "dec0001\ndec0002\ndec0003\n"}


SHELL = ("bash", "pbs_mom", "systemd")
FILES = {FILE: node_file("pbs-script")}
EXAMPLES = {
    "qsub": Batch(recorded("pbs-script"), SHELL, FILES, is_left=True),
    "pbsdsh": Batch(recorded("pbs-pbsdsh"), ("pbs_mom",), FILES, is_left=True),
}


def process(name, task=0, changes=None, files=None):
    environ, hostname = recorded(name)[task]
    read = (READABLE if files is None else files).get
    return with_changes(Process(environ, hostname, read=read), changes or {})


@pytest.mark.parametrize(
    "name", [n for n in recordings("pbs-openmpi") if "split" not in n]
)
def test_a_node_file_that_only_the_first_node_can_read(name):
    """It is the same launch: what must be equal is not made of the file."""
    jobs = [
        detected(process(name, task, files=READABLE if task == 0 else {}))
        for task in range(3)
    ]
    assert len({job.launch_id for job in jobs}) == 1
    assert [job.nodes for job in jobs] == [THREE, NOBODY, NOBODY]
    assert [job.node_rank for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "is_told_apart"),
    [
        ("pbs-pbsdsh", False),
        ("pbs-mpich-4.0.2", False),  # if no process manager answers
        ("pbs-openmpi-4.1.4-x", True),
        ("slurm-srun-3-nodes", True),
    ],
)
def test_two_launches_in_one_job(name, is_told_apart):
    """If the launch id is the same, what an agent is sent names the command."""
    plans = [plan_of(name, line) for line in ("a.py", "b.py", f"a.py {'x' * 200} b")]
    started = [request_of(plan.meeting, "").started for plan in plans]
    assert [each.partition(" [")[0] for each in started] == (
        ["", "", ""] if is_told_apart else ["a.py", "b.py", f"{'x' * 158} b"]
    )
    assert len({*started}) == 3 - 2 * is_told_apart
    # Nobody ends the others, which may have said why they cannot start.
    hint = "see what these nodes have printed"
    assert (hint in plans[0].meeting.hint) is (name == "pbs-pbsdsh")


def inputs_of(name, line, **variables):
    """Return what the first task of a recorded launch knows with this command line."""
    environ, host = recorded(name)[0]
    job = detected(Process(environ, host, read=READABLE.get))
    network = make_network({"hsn0": "10.40.0.1/24"}, {host: "10.40.0.1"})
    options = command_line.parse(line.split(), variables).options
    inputs = make_inputs(job, network=network, site=None, command=f"x {line}")
    return replace(inputs, options=options)


def plan_of(name, line, **variables):
    return make_plan(inputs_of(name, line, **variables))


def started(line, **variables):
    return plan_of("pbs-pbsdsh", line, **variables).meeting.started


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("a.py", "b.py"),
        ("a.py", "-m a.py"),
        ("a.py 1", "a.py 2"),
        ("a.py --node-rank=0", "a.py --node-rank=1"),
        ("a.py", "--max-restarts=1 a.py"),
        ("--nproc-per-node=1 a.py", "--nproc-per-node=2 a.py"),
        ("--hpc-without-patches=host_name a.py", "a.py"),
        ("--hpc-dry-run a.py", "a.py"),
        ("--hpc-no-such a.py", "--hpc-no-such b.py"),  # neither can be parsed
    ],
)
def test_two_commands_are_two_launches(line, other):
    assert started(line) != started(other)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("--hpc-outcome=/local/n1.json a.py", "--hpc-outcome=/local/n2.json a.py"),
        ("--hpc-key-file=/local/n1/key a.py", "a.py"),
        ("--log-dir=/local/n1 a.py", "--log-dir=/local/n2 --tee=3 a.py"),
        ("--local-addr=dec0001 --hpc-debug a.py", "--local-addr=10.40.0.1 a.py"),
        ("--rdzv-conf=is_host=1 a.py", "--rdzv-conf=is_host=0 a.py"),
        # The coordinator compares these itself, and names the option.
        ("--rdzv-id=1 a.py", "--rdzv-id=2 a.py"),
        # The same in other words.
        ("--max-restarts 1 --hpc-bind=even a.py", "--hpc-bind=gpu --max_rest=1 a.py"),
    ],
)
def test_nodes_with_values_of_their_own_are_one_launch(line, other):
    assert started(line) == started(other)


@pytest.mark.parametrize("wrong", ["--max-restarts=x", "--hpc-rendezvous=no"])
def test_a_launch_with_a_wrong_option_does_not_end_another_one(wrong):
    """It meets without the option, to tell its own nodes; its script runs elsewhere."""
    inputs = inputs_of("pbs-pbsdsh", f"{wrong} a.py")
    meeting = several_nodes.meeting_to_give_up(inputs, inputs.job)
    assert meeting.started not in {"", started("a.py")}


def test_the_message_names_the_compared_options():
    cause = explain.parts()["Rendezvous"]["HPC232"]["cause"]
    named = re.findall(r"`--([\w-]+)`", cause.partition("The other options")[0])
    assert [name.replace("-", "_") for name in named] == [*EQUAL]


def test_an_option_and_its_variable_are_equal():
    variable = started("a.py", PET_MAX_RESTARTS="1")
    assert variable == started("--max-restarts=1 a.py")
    assert variable.startswith("--max_restarts=1 a.py [")


# --- the node file ------------------------------------------------------------------


def test_pbsdsh_where_the_other_nodes_have_no_file():
    """OpenPBS with $gen_nodefile_on_sister_mom 0, and before 2021."""
    no_variable = {"PBS_NODEFILE": None}
    first = detected(process("pbs-pbsdsh"))
    assert detected(process("pbs-pbsdsh", 0, no_variable)) == first
    for task in (1, 2):
        found = refusal(process("pbs-pbsdsh", task, no_variable, files={}))
        assert found.startswith(f"HPC035 {FILE} names the nodes of PBS job 0")


@pytest.mark.parametrize("text", [None, "", "\n \n"])
def test_a_node_file_that_cannot_be_read(text):
    found = refusal(process("pbs-script", files={} if text is None else {FILE: text}))
    assert found.startswith(f"HPC035 {FILE} names the nodes of PBS job ")


# The file of another job in which `qsub -V` ran. PBS leaves its name in the variable of
# the first task of pbsdsh.
OLD = "/var/spool/pbs/aux/12.desched1"
SPOOL = "/spool/aux/0.desched1"
LISTS_TWO, TWO_OF_THREE = "dec0001\ndec0003\n", ("dec0001", "dec0003")
LISTS_ANOTHER = "dec0007\n"

# The recording, the variable, the files, and the nodes with their source.
NAMED = {
    "another place": (
        "pbs-script", "/x/nodes", {"/x/nodes": LISTS_TWO, FILE: LISTS_ANOTHER},
        TWO_OF_THREE, "PBS_NODEFILE",
    ),
    "no such file": ("pbs-script", "/gone", READABLE, THREE, FILE),
    "another job's, unreadable": ("pbs-script", OLD, READABLE, THREE, FILE),
    "another job's": (
        "pbs-script", OLD, READABLE | {OLD: LISTS_ANOTHER}, THREE, FILE
    ),
    "another job's, unreadable, in a task": ("pbs-pbsdsh", OLD, READABLE, THREE, FILE),
    "another job's, in a task": (
        "pbs-pbsdsh", OLD, READABLE | {OLD: LISTS_ANOTHER}, THREE, FILE
    ),
    **{
        f"the user's, {name}": (
            "pbs-script", f"/x/{name}", READABLE | {f"/x/{name}": LISTS_TWO},
            TWO_OF_THREE, "PBS_NODEFILE",
        )
        for name in ("0.desched1.uniq", "20260101.txt", "4.nodes")
    },
    # PBS may use another folder.
    "another folder": (
        "pbs-pbsdsh", "/spool/aux/12.desched1", {SPOOL: READABLE[FILE]}, THREE, SPOOL
    ),
    "another job's list in another folder": (
        "pbs-pbsdsh", "/spool/aux/hosts",
        {SPOOL: READABLE[FILE], "/spool/aux/hosts": LISTS_ANOTHER}, THREE, SPOOL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_the_node_file_that_counts(case):
    name, named, files, nodes, source = NAMED[case]
    job = detected(process(name, 0, {"PBS_NODEFILE": named}, files))
    assert (job.nodes, job.provenance["nodes"]) == (nodes, source)
    assert job.node_rank == 0


@pytest.mark.parametrize("old", [OLD, "/x/17[0].desched1", "/x/17[].desched1"])
@pytest.mark.parametrize("name", ["pbs-pbsdsh", "pbs-script"])
def test_a_node_file_of_another_job_and_no_other(name, old):
    for task in range(len(recorded(name))):
        changes, files = {"PBS_NODEFILE": old}, {old: "dec0001\ndec0002\ndec0003\n"}
        assert refusal(process(name, task, changes, files)).startswith(
            f"HPC035 {FILE} (PBS_NODEFILE={old} is another job's) names the nodes of "
            "PBS job 0 "
        )


NODE_FILES = {
    "several slots": ("dec0001 " * 4 + "dec0002 " * 4, ("dec0001", "dec0002")),
    "not side by side": ("dec0001 dec0002 dec0001", ("dec0001", "dec0002")),
    "another order": ("dec0003 dec0001", ("dec0003", "dec0001")),
    "with domains": ("dec0001.site dec0002.site", ("dec0001.site", "dec0002.site")),
    "one": ("dec0001", ("dec0001",)),
}


@pytest.mark.parametrize(("words", "expected"), NODE_FILES.values(), ids=NODE_FILES)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_nodes_of_a_script(words, expected, ending):
    files = {FILE: ending.join(words.split()) + ending}
    job = detected(process("pbs-script", files=files))
    assert (job.context, job.nodes) == (LaunchContext.BATCH_SCRIPT, expected)
    assert job.own_name.startswith("dec0001")


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
    "lines without end": ("a\n" * 101, "entry 101 is 'a'"),
}


@pytest.mark.parametrize(("text", "shown"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_node_file_that_is_none(text, shown, monkeypatch):
    assert detector._MOST_LINES == 2**20
    monkeypatch.setattr(detector, "_MOST_LINES", 100)
    start = "HPC140 PBS_NODEFILE does not list the job's hosts: "
    for name in "pbs-script", "pbs-openmpi-4.1.4", "pbs-mpich-4.0.2":
        found = refusal(process(name, files={FILE: text}))
        assert found.startswith(start), name
        assert shown in found, name
        assert len(found) < 400, name


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
    file = f"/var/spool/pbs/aux/{job_id}"
    changes = {"PBS_JOBID": job_id, "PBS_NODEFILE": file}
    job = detected(process("pbs-script", 0, changes, {file: READABLE[FILE]}))
    assert job.launch_id == launch_id


# --- ways to start ------------------------------------------------------------------


def test_no_job():
    assert outcome(process("pbs-script", 0, {"PBS_JOBID": None})) is None


def test_interactive_job():
    changes = {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}
    job = detected(process("pbs-script", 0, changes))
    assert (job.context, job.nodes) == (LaunchContext.INTERACTIVE_STEP, ("dec0001",))
    assert (job.node_rank, job.allocated_nodes) == (0, 3)


def test_mpiexec_of_pals_in_an_interactive_job():
    """It hands the shell's variables on; only its own say which task this is."""
    shell = process("pbs-script", 0, {"PBS_ENVIRONMENT": "PBS_INTERACTIVE"})
    for rank, task in enumerate(launch("PALS", [0, 1, 2], shell.environ, READABLE)):
        job = detected(replace(task, hostname=THREE[rank]))
        assert (job.scheduler, job.context) == ("PALS in PBS", LaunchContext.STEP)
        assert (job.nodes, job.node_rank) == (THREE, rank)


@pytest.mark.parametrize("hostname", ["dec0002", "dec0002.site"])
@pytest.mark.parametrize("number", [None, "", "3", "999999999"])
def test_task_of_pbsdsh_without_its_number_is_known_by_name(number, hostname):
    task = process("pbs-pbsdsh", 1, {"PBS_NODENUM": number})
    job = detected(replace(task, hostname=hostname))
    assert (job.node_rank, job.task) == (1, Task(1, 3))
    assert job.provenance["task"] == job.provenance["node_rank"] == "host name"


def test_task_of_pbsdsh_on_a_host_that_has_another_name():
    job = detected(replace(process("pbs-pbsdsh", 1), hostname="other"))
    assert (job.node_rank, job.provenance["node_rank"]) == (1, "PBS_NODENUM")
    assert job.provenance["task"] == "PBS_NODENUM"


def test_name_and_number_of_a_task_of_pbsdsh_that_differ():
    """mpiprocs=0 on the first chunk: numbers count a host that is not in the file."""
    files = {FILE: "dec0002\ndec0003\n"}
    jobs = [detected(process("pbs-pbsdsh", t, files=files)) for t in (1, 2)]
    assert [job.node_rank for job in jobs] == [0, 1]


def test_task_of_pbsdsh_that_nothing_places():
    task = process("pbs-pbsdsh", 1, {"PBS_NODENUM": "7"})
    found = refusal(replace(task, hostname="elsewhere"))
    assert found.startswith("HPC037 PBS_NODENUM=7, and elsewhere is not among the 3")


def test_a_number_of_a_node_that_is_none():
    wrong = {"PBS_NODENUM": ["-1", "one", "1.0", "\u0661"]}
    message = "HPC021 {shown} is not a whole number"
    assert_refused(process("pbs-pbsdsh", 1), {message: wrong})


@pytest.mark.parametrize("number", ["1", "", None, "0000000g", "000000001"])
def test_only_tasks_of_pbsdsh_have_a_number_of_eight_digits(number):
    changes = {"PBS_TASKNUM": number}
    job = detected(process("pbs-script", 0, changes))
    assert job.context is LaunchContext.BATCH_SCRIPT


# --- nodes that see different things ------------------------------------------------

DECS = {"dec0001": "10.30.0.1", "dec0002": "10.30.0.2", "dec0003": "10.30.0.3"}


@pytest.mark.parametrize("told", [{}, {"MASTER_ADDR": "dec0001", "MASTER_PORT": "1"}])
def test_open_mpi_over_ssh_meets_although_one_node_knows_the_list(told):
    """Only the first node has the node file; -x hands the variables to all."""
    found = set()
    for rank in range(3):
        job = detected(process("pbs-openmpi-4.1.4", rank))
        here = make_network({"eth0": f"10.30.0.{rank + 1}/24"}, DECS)
        inputs = make_inputs(job, site=None, network=here, environ=told)
        plan = make_plan(inputs)
        meeting = plan.meeting
        found.add((meeting.ports[0], plan.meeting.launch_id))
        assert meeting.connect_host == "10.30.0.1"
        assert meeting.is_coordinator is (rank == 0)
        assert meeting.listen is None or meeting.listen[0] == "10.30.0.1"
    assert len(found) == 1
