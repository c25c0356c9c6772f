"""Slurm: srun's step, the batch script, and shells; as recorded, and changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.detection import changed, detected, outcome, with_changes
from tests.support.juelich import juelich
from tests.support.launch_examples import Batch, Wrong, assert_refusal, assert_refused
from tests.support.plans import (
    ONE_WORKER,
    Given,
    make_direct_plan,
    make_inputs,
    make_plan,
    refused,
)
from tests.support.recordings import BY_SLURM, recorded
from torchrun_hpc import names, schedulers
from torchrun_hpc.preflight import of_process
from torchrun_hpc.reporting.console import is_reporter, reports_wait_for
from torchrun_hpc.schedulers import slurm
from torchrun_hpc.schedulers.hostlist import expand_hostlist
from torchrun_hpc.schedulers.job import LaunchContext, Task
from torchrun_hpc.schedulers.process import Process

if TYPE_CHECKING:
    from typing_extensions import Unpack


ONE = ("jwb0001",)
THREE = ("jwb0001", "jwb0002", "jwb0003")

_TWO = "--nodes=2 --ntasks=2 --ntasks-per-node=1 {command}"
HET_LINE = (
    "srun --het-group=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 {command} "
    f": --het-group=1 {_TWO}"
)


ABOVE = ("sh", "slurmstepd", "systemd")
DEC0001 = {"SLURM_JOB_NODELIST": "dec[0001-0003]", "SLURM_STEP_NODELIST": ""}
EXAMPLES = {
    "srun": Batch(
        recorded("slurm-srun-3-nodes"),
        ("slurmstepd",),
        is_left=True,
        on_dec0001=DEC0001,
    ),
    "sbatch": Batch(
        recorded("slurm-sbatch-script"), ABOVE, is_left=True, on_dec0001=DEC0001
    ),
    "an array": Batch(recorded("slurm-array-1"), ABOVE, on_dec0001=DEC0001),
    "srun --mpi=pmi2": Batch(
        recorded("slurm-srun-pmi2"), ("slurmstepd",), on_dec0001=DEC0001
    ),
    "salloc": Batch(
        recorded("slurm-salloc-shell"),
        ("bash", "salloc", "bash", "sshd"),
        on_dec0001=DEC0001,
    ),
}


def process_of(name, task=0, changes=None, *, hostname=None, **about):
    environ, recorded_hostname = recorded(name)[task]
    process = Process(environ, hostname or recorded_hostname, **about)
    return with_changes(process, changes or {})


def detect(name, task=0, changes=None, **about):
    return detected(process_of(name, task, changes, **about))


@pytest.mark.parametrize("name", BY_SLURM)
def test_a_container_that_hides_the_node_name_changes_no_rank(name):
    for task in range(len(recorded(name))):
        seen = detect(name, task)
        job = detect(name, task, {"SLURMD_NODENAME": None})
        assert (job.node_rank, job.nodes) == (seen.node_rank, seen.nodes)


# --- launch id ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "launch_id"),
    [
        ("slurm-srun-3-nodes", {"SLURM_RESTART_COUNT": "0"}, "19.0"),
        ("slurm-srun-3-nodes", {"SLURM_RESTART_COUNT": ""}, "19.0"),
        ("slurm-srun-3-nodes", {"SLURM_RESTART_COUNT": "1"}, "19.0-r1"),
        ("slurm-srun-3-nodes", {"SLURM_RESTART_COUNT": "12"}, "19.0-r12"),
        ("slurm-srun-3-nodes", {"SLURM_STEP_ID": "7", "SLURM_STEPID": "7"}, "19.7"),
        ("slurm-srun-3-nodes", {"SLURM_STEP_ID": None, "SLURM_STEPID": "7"}, "19.7"),
        ("slurm-srun-3-nodes", {"SLURM_STEP_ID": None, "SLURM_STEPID": ""}, "19.step"),
        ("slurm-srun-3-nodes", {"SLURM_JOB_ID": None}, "19.0"),
        ("slurm-srun-3-nodes", {"SLURM_JOB_ID": "a/b c\n"}, "a-b-c-.0"),
        ("slurm-array-0", {"SLURM_RESTART_COUNT": "1"}, "26_0.0-r1"),
        ("slurm-array-1", {"SLURM_RESTART_COUNT": "2"}, "26_1.0-r2"),
        ("slurm-array-1", {"SLURM_ARRAY_TASK_ID": None}, "26.0"),
        ("slurm-het-step", {"SLURM_JOB_ID": "24"}, "23.0"),
        ("slurm-sbatch-script", {"SLURM_RESTART_COUNT": "3"}, "25.batch-r3"),
    ],
)
def test_launch_id(name, changes, launch_id):
    assert detect(name, changes=changes).launch_id == launch_id


STEP_ONLY = (*slurm.STEP_ID, slurm.STEP_NODES, slurm.STEP_NUM_NODES)
NO_STEP = dict.fromkeys((*STEP_ONLY, *slurm.STEP_TASKS_PER_NODE))
# As in the batch script of a job of two components: the variables without a group are
# those of the first one.
HET_SCRIPT = NO_STEP | {
    "SLURM_JOB_NODELIST": "jwb0001", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
    "SLURM_NTASKS": "4",
}  # fmt: skip
HET_LINES: dict[str, tuple[dict[str, Any], str]] = {
    "the step": ({}, HET_LINE),
    "a step on the second component": (
        {
            "SLURM_STEP_NODELIST": "jwb[0002-0003]", "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": "jwb0002",
        },
        f"srun --het-group=1 {_TWO}",
    ),
    "the script": (HET_SCRIPT, HET_LINE),
    "a shell on a login node": (
        # As seen: salloc sets no list of the whole job.
        HET_SCRIPT | dict.fromkeys(
            ("SLURM_NODEID", "SLURM_PROCID", "SLURMD_NODENAME", *slurm.JOB_NODES)
        ),
        HET_LINE,
    ),
    "a shell on the first node": (
        {
            "SLURM_JOB_NODELIST": "jwb0001", "SLURM_STEP_NODELIST": "jwb0001",
            "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_STEP_ID": "-6", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
        },
        HET_LINE.replace("--nodes", "--overlap --nodes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HET_LINES)
def test_lines_for_a_heterogeneous_job(case):
    """srun starts on the first component only, unless a line names both."""
    changes, line = HET_LINES[case]
    environ, hostname = recorded("slurm-het-step")[0]
    if case == "a shell on a login node":
        hostname = "login01"
    job = detected(Process(changed(environ, changes), hostname))
    assert job.launcher.template == line
    assert not job.launcher.takes_number
    assert job.allocated_nodes == 3 or "a step" in case
    is_shell = job.context is LaunchContext.INTERACTIVE_STEP
    nodes = job.allocated_nodes if is_shell else None
    shown = job.once_per_node("python x.py", nodes=nodes)
    assert shown == line.format(command="python x.py")


# --- an order of the user's own -----------------------------------------------------


# A user's list of hosts, and for each rank SLURM_NODEID: nodes and their numbers are
# sorted, tasks are not (seen with 22.05).
ARBITRARY = {
    "reversed": ("jwb0003 jwb0001 jwb0002", [2, 0, 1]),
    "as the nodes": ("jwb0001 jwb0002 jwb0003", [0, 1, 2]),
    "the first one as the nodes": ("jwb0001 jwb0003 jwb0002", [0, 2, 1]),
    "a host twice": ("jwb0002 jwb0001 jwb0002", [1, 0, 1]),
    "side by side": ("jwb0002 jwb0002 jwb0001", [1, 1, 0]),
    "beginning with the first": ("jwb0001 jwb0003 jwb0001 jwb0002", [0, 2, 0, 1]),
    "one": ("jwb0001 jwb0001", [0, 0]),
}
OWN_ORDER = [case for case in ARBITRARY if case != "one"]


def arbitrary(case):
    """Return what each task of such a step finds."""
    listed, places = ARBITRARY[case]
    nodes = sorted(set(listed.split()))
    step = {
        "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_STEP_NODELIST": ",".join(nodes),
        "SLURM_STEP_NUM_NODES": str(len(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(
            str(places.count(node)) for node in range(len(nodes))
        ),
    }
    return [
        detect(
            "slurm-srun-3-nodes",
            0,
            step | place(rank, nodes[node], node, places[:rank].count(node)),
        )
        for rank, node in enumerate(places)
    ]


def place(rank, host, node, local_rank):
    """Return the variables that say which task this is, and where."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURMD_NODENAME": host,
        "SLURM_NODEID": str(node),
    }


def inputs_at(job, *, hosts=None, **given: Unpack[Given]):
    """Return the inputs of a plan on the node where a task is."""
    given.setdefault("network", juelich(job.index, hosts=hosts))
    given.setdefault("node", ONE_WORKER)
    return make_inputs(job, **given)


def refusal(make, inputs):
    """Return the refusal of a plan. All tasks get it: nobody knows rank 0."""
    error = refused("HPC141", "", make, inputs)
    assert error.everywhere
    return str(error)


@pytest.mark.parametrize("case", ARBITRARY)
def test_ranks_are_those_of_the_tasks_in_an_order_of_the_users_own(case):
    listed, places = ARBITRARY[case]
    jobs = arbitrary(case)
    nodes = tuple(sorted(set(listed.split())))
    assert {job.nodes for job in jobs} == {nodes}
    assert [job.task.rank for job in jobs] == list(range(len(places)))
    assert [job.own_name for job in jobs] == listed.split()
    one_each = len(nodes) == len(places)
    ranks = list(range(len(places))) if one_each else places
    assert [job.node_rank for job in jobs] == ranks
    assert {job.is_ranked for job in jobs} == {len(nodes) == 1}


@pytest.mark.parametrize("case", list(ARBITRARY)[:3])
def test_all_agents_meet_in_an_order_of_the_users_own(case):
    """Nobody knows where rank 0 is: they meet on the first node of srun's list."""
    listed, places = ARBITRARY[case]
    hosts = listed.split()
    ports = set()
    for rank, job in enumerate(arbitrary(case)):
        plan = make_plan(inputs_at(job))
        meeting = plan.meeting
        ports.add(meeting.ports)
        assert plan.meeting.node_rank == rank
        assert meeting.is_coordinator is (places[rank] == 0)
        assert (meeting.connect_host, meeting.coordinator) == ("10.20.0.1", None)
        # The others' names are a guess, as a set.
        assert plan.meeting.hosts[rank] == hosts[rank]
        assert sorted(plan.meeting.hosts) == sorted(hosts)
    assert len(ports) == 1


@pytest.mark.parametrize("case", OWN_ORDER)
def test_all_tasks_refuse_or_none_in_an_order_of_the_users_own(case):
    """The others cannot know where rank 0 is, also where it is the first node."""
    first = ARBITRARY[case][0].split()[0]
    for job in arbitrary(case):
        text = refusal(make_direct_plan, inputs_at(job))
        assert "SLURM_DISTRIBUTION=arbitrary" in text
        host = first if job.task.rank == 0 else "HOST"
        assert text.endswith(f"export MASTER_ADDR={host}")


@pytest.mark.parametrize("case", OWN_ORDER)
def test_all_tasks_run_where_they_are_told_where_rank_0_is(case):
    first = ARBITRARY[case][0].split()[0]
    address = f"10.20.0.{first[-1]}"
    for told in first, f"{first}i", f"{first}.site":
        for job in arbitrary(case):
            environ = {"MASTER_ADDR": told}
            inputs = inputs_at(job, hosts={told: address}, environ=environ)
            plan = make_direct_plan(inputs)
            assert plan.environment["MASTER_ADDR"].value == address, told


def test_what_a_hook_has_left_does_not_say_where_rank_0_is():
    for environ in {"MASTER_ADDR": "n8"}, {"MASTER_PORT": "29500"}:
        for job in arbitrary("a host twice"):
            refusal(make_direct_plan, inputs_at(job, environ=environ))


def test_the_static_rendezvous_in_an_order_of_the_users_own():
    """Rank 0 hosts it: all refuse, unless its address is explicit."""
    for job in arbitrary("reversed"):
        text = refusal(make_plan, inputs_at(job, options={"rdzv_backend": "static"}))
        assert "Pass its host to all tasks:\n    --master_addr=" in text
        plan = make_plan(inputs_at(job, options={"master_addr": "jwb0003"}))
        assert plan.meeting.connect_host == "10.20.0.3"
        assert plan.meeting.is_coordinator is (plan.meeting.node_rank == 0)


@pytest.mark.parametrize("host", ["jwb0002", "jwb0002i", "10.20.0.2"])
def test_an_explicit_endpoint_in_an_order_of_the_users_own(host):
    for job in arbitrary("reversed"):
        options = {"rdzv_endpoint": f"{host}:29400"}
        meeting = make_plan(inputs_at(job, options=options)).meeting
        assert meeting.connect_host == "10.20.0.2"
        assert meeting.is_coordinator is (job.own_name == "jwb0002")


# --- ranks by topology --------------------------------------------------------------


# For each node of the list, its task's rank: Slurm 26.05 numbers tasks by topology,
# and SLURM_NODEID stays the place in the list (src/common/slurm_step_layout.c).
TOPOLOGY = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]]


def by_topology(ranks):
    """Return the job that each node finds, in the order of the list."""
    nodes = ("jwb0001", "jwb0002", "jwb0003")
    return [
        detect("slurm-srun-3-nodes", index, place(rank, nodes[index], index, 0))
        for index, rank in enumerate(ranks)
    ]


@pytest.mark.parametrize("ranks", TOPOLOGY)
def test_agents_meet_if_tasks_follow_the_topology(ranks):
    """All meet on the first node of the list, which learns the others' names."""
    plans = [make_plan(inputs_at(job)) for job in by_topology(ranks)]
    meetings = sorted((p.meeting for p in plans), key=lambda each: each.node_rank)
    assert {each.connect_host for each in meetings} == {"10.20.0.1"}
    assert [each.is_coordinator for each in meetings] == [
        r == ranks[0] for r in (0, 1, 2)
    ]
    by_rank = [f"jwb000{1 + ranks.index(rank)}" for rank in range(3)]
    assert [each.hosts[each.node_rank] for each in meetings] == by_rank
    # Somebody else than the coordinator reports the wait for it.
    reporting = [r for r in range(3) if reports_wait_for(r, meetings[r].coordinator)]
    assert {*reporting} - {ranks[0]}
    told = {each.node_rank: each.hosts[each.node_rank] for each in meetings}
    for each in meetings:
        assert [*names.placed(each.hosts, told)] == by_rank


@pytest.mark.parametrize("ranks", TOPOLOGY)
def test_tasks_that_follow_the_topology(ranks):
    """Rank 0 sees that it is elsewhere; the line that it names is tried."""
    two = {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    jobs = [
        detect(
            "slurm-srun-3-nodes", i, two | place(2 * r + own, f"jwb000{i + 1}", i, own)
        )
        for i, r in enumerate(ranks)
        for own in (0, 1)
    ]
    first = f"jwb000{1 + ranks.index(0)}"
    address = f"10.20.0.{first[-1]}"
    for job in jobs:
        if first == "jwb0001":
            make_direct_plan(inputs_at(job))
        elif job.task.rank == 0:
            error = refused("HPC039", "", make_direct_plan, inputs_at(job))
            assert str(error).endswith(f"export MASTER_ADDR={address}")
        plan = make_direct_plan(inputs_at(job, environ={"MASTER_ADDR": address}))
        assert plan.environment["MASTER_ADDR"].value == address


@pytest.mark.parametrize("ranks", TOPOLOGY[1:])
def test_a_static_rendezvous_if_tasks_follow_the_topology(ranks):
    """Only nodes that see the contradiction refuse: no other node is wrong."""
    for index, job in enumerate(by_topology(ranks)):
        inputs = inputs_at(job, options={"rdzv_backend": "static"})
        if (index == 0) == (ranks[index] == 0):
            assert make_plan(inputs).meeting.connect_host == "10.20.0.1"
            continue
        own = f", jwb000{index + 1}" if ranks[index] == 0 else ""
        expected = "jwb0001 is not an address of node 0, but the static rendezvous is "
        error = refused("HPC069", expected, make_plan, inputs)
        assert str(error).startswith(f"{expected}on node 0{own}. Remove")
    for job in by_topology(ranks):
        options = {"master_addr": f"jwb000{1 + ranks.index(0)}"}
        meeting = make_plan(inputs_at(job, options=options)).meeting
        assert meeting.is_coordinator is (meeting.node_rank == 0)


# Nodes of the components of a step, of which srun numbers one after the other: the
# node of each task is that of the same place.
COMPONENTS = {
    "a sorted one behind": ("jwb0002", "jwb[0001,0003]"),
    "reversed": ("jwb0003", "jwb0002", "jwb0001"),
    "in order": ("jwb0001", "jwb[0002-0003]"),
    "three in order": ("jwb0001", "jwb0002", "jwb0003"),
}


@pytest.mark.parametrize("case", COMPONENTS)
@pytest.mark.parametrize("each", [1, 2])
def test_all_nodes_of_several_components_refuse_or_none(case, each):
    """Also the node whose place in the list happens to be its rank."""
    groups = COMPONENTS[case]
    hosts = [host for group in groups for host in expand_hostlist(group)]
    changes = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": g for i, g in enumerate(groups)}
    changes |= {"SLURM_HET_SIZE": str(len(groups))}
    changes |= {"SLURM_STEP_TASKS_PER_NODE": f"{each}(x3)"}
    make = make_plan if each == 1 else make_direct_plan
    options = {"rdzv_backend": "static"} if each == 1 else {}
    for rank, host in enumerate(host for host in hosts for _ in range(each)):
        here = place(rank, host, THREE.index(host), rank % each)
        job = detect("slurm-het-step", 0, changes | here)
        assert job.own_name == host
        inputs = inputs_at(job, options=options)
        if "in order" in case:
            assert make(inputs)
        else:
            assert "(SLURM_JOB_NODELIST_HET_GROUP_0, " in refusal(make, inputs)


# --- nodes and tasks ----------------------------------------------------------------


def test_a_node_finds_itself_by_name_in_a_list_of_another_order():
    changes = {"SLURM_STEP_NODELIST": "jwb0003,jwb[0001-0002]"}
    jobs = [detect("slurm-srun-3-nodes", task, changes) for task in range(3)]
    assert [job.index for job in jobs] == [1, 2, 0]
    assert [job.node_rank for job in jobs] == [0, 1, 2]


def test_names_without_padding_stay_in_the_schedulers_order():
    nodes = {"SLURM_JOB_NODELIST": "n[9-11]", "SLURM_STEP_NODELIST": "n[9-11]"}
    for task in range(3):
        own = {"SLURMD_NODENAME": f"n{9 + task}"}
        job = detect("slurm-srun-3-nodes", task, nodes | own)
        assert (job.node_rank, job.nodes) == (task, ("n9", "n10", "n11"))


def test_the_jobs_counts_serve_where_the_steps_are_missing():
    job = detect("slurm-srun-uneven-tasks", 1, {"SLURM_STEP_TASKS_PER_NODE": None})
    assert job.task == Task(1, 3, 1, 2)
    assert job.provenance["tasks"] == "SLURM_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("counts", "expected"), [("2(x2),1", (2, 2, 1)), ("1,2(x2)", (1, 2, 2))]
)
def test_counts_in_short_form(counts, expected):
    changes = {"SLURM_STEP_TASKS_PER_NODE": counts}
    tasks = [detect("slurm-srun-3-nodes", task, changes).task for task in range(3)]
    assert tuple(task.local_size for task in tasks) == expected
    assert {task.size for task in tasks} == {5}


def test_the_only_task_of_a_node_needs_no_local_rank():
    job = detect("slurm-srun-3-nodes", 1, {"SLURM_LOCALID": None})
    assert job == detect("slurm-srun-3-nodes", 1)


# --- shells -------------------------------------------------------------------------

INTERACTIVE = {
    "SLURM_STEP_NODELIST": "jwb0001",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
IN_SALLOC = INTERACTIVE | {"SLURM_STEP_ID": "-6", "SLURM_STEPID": "-6"}
PTY = {"SLURM_PTY_PORT": "61000", "SLURM_PTY_WIN_COL": "80", "SLURM_PTY_WIN_ROW": "24"}

SHELLS: dict[str, dict[str, Any]] = {
    "salloc": IN_SALLOC,
    "salloc, a number without a sign": IN_SALLOC | {"SLURM_STEP_ID": "4294967290"},
    "salloc, in a container without the name": IN_SALLOC | {"SLURMD_NODENAME": None},
    "srun --pty": INTERACTIVE | PTY,
}


@pytest.mark.parametrize("case", SHELLS)
def test_a_shell_on_a_node_of_the_job(case):
    changes = SHELLS[case]
    job = detect("slurm-srun-3-nodes", 0, changes, terminal=True)
    if "salloc" in case:  # also one whose input is no terminal
        assert detect("slurm-srun-3-nodes", 0, changes) == job
    assert (job.context, job.nodes) == (LaunchContext.INTERACTIVE_STEP, ONE)
    assert (job.node_rank, job.task, job.allocated_nodes) == (0, Task(), 3)
    assert (job.scheduler, job.launch_id) == ("Slurm", "19.interactive")
    is_named = changes.get("SLURMD_NODENAME", "") is not None
    assert job.provenance == {
        "nodes": "SLURMD_NODENAME" if is_named else "SLURM_STEP_NODELIST",
        "launch_id": "SLURM_JOB_ID, SLURM_STEP_ID",
    }
    assert job.once_per_node("x.py", nodes=3) == (
        "srun --overlap --nodes=3 --ntasks=3 --ntasks-per-node=1 x.py"
    )


def test_a_shell_without_the_number_of_nodes():
    changes = {"SLURM_JOB_NUM_NODES": None, "SLURM_NNODES": None}
    job = detect("slurm-srun-3-nodes", 0, IN_SALLOC | changes)
    assert job.allocated_nodes == 1


def test_what_is_in_a_step_is_no_shell():
    """srun in the shell of srun --pty inherits its port; others have a terminal."""
    for task in range(3):
        step = detect("slurm-srun-3-nodes", task)
        assert detect("slurm-srun-3-nodes", task, PTY) == step
        assert detect("slurm-srun-3-nodes", task, terminal=True) == step


@pytest.mark.parametrize(
    ("pid", "context"), [(41, LaunchContext.STEP), (42, LaunchContext.INTERACTIVE_STEP)]
)
def test_a_task_with_a_terminal_is_not_a_shell(pid, context):
    """srun --pty gives a terminal to the first task; all tasks must see one step."""
    changes = {"SLURM_PTY_PORT": "61361", "SLURM_TASK_PID": "41"}
    process = process_of("slurm-srun-3-nodes", 0, changes, terminal=True, pid=pid)
    assert detected(process).context is context


@pytest.mark.parametrize("hostname", ["login01", "jwb0004", "jwb0001i", "jwb"])
def test_shell_of_salloc_outside_of_the_nodes(hostname):
    job = detect("slurm-salloc-shell", hostname=hostname)
    assert job == detect("slurm-salloc-shell")


@pytest.mark.parametrize("hostname", ["jwb0001", "jwb0003", "jwb0002.juwels"])
def test_shell_of_salloc_on_one_of_the_nodes(hostname):
    process = process_of("slurm-salloc-shell", hostname=hostname)
    assert outcome(process) is None


# --- the batch script, and what Slurm has not started -------------------------------

STALE_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "jwb0007",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_LAUNCHER_PORT": "61737",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": "-5", "SLURM_STEPID": "-5"},
        {"SLURM_STEP_ID": "4294967291"},
        STALE_STEP,
        {"SLURM_STEP_NODELIST": "", "SLURM_STEP_NUM_NODES": ""},
    ],
    ids=["26.05", "unsigned", "of-another-job", "empty"],
)
def test_batch_script_in_spite_of_step_variables(changes):
    script = detect("slurm-sbatch-script")
    job = detect("slurm-sbatch-script", changes=changes)
    assert replace(job, provenance=script.provenance) == script


def test_batch_script_of_one_node():
    one = {"SLURM_JOB_NODELIST": "jwb0001", "SLURM_JOB_NUM_NODES": "1"}
    job = detect("slurm-sbatch-script", changes=one)
    assert (job.context, job.nodes) == (LaunchContext.BATCH_SCRIPT, ONE)


@pytest.mark.parametrize(
    ("environ", "hostname"),
    [
        ({}, "laptop"),
        ({"HOME": "/root", "SLURM_CONF": "/etc/slurm.conf"}, "login01"),
        ({"SLURM_JOB_ID": ""}, "login01"),
        # ssh into a node: a few variables, or those of the shell that it came from
        ({"SLURM_JOB_ID": "19"}, "jwb0002"),
        ({"SLURM_JOBID": "19", "SLURMD_NODENAME": "jwb0002"}, "jwb0002"),
        ({"SLURM_JOB_ID": "19", "SLURM_STEP_ID": "4294967295"}, "jwb0002"),
        ({"SLURM_JOB_ID": "19", "SLURM_JOB_NODELIST": "jwb[0001-3]"}, "jwb0002"),
        (
            {"SLURM_JOB_ID": "19", "SLURM_NODELIST": "jwb[0001-0003]"},
            "jwb0003.juwels.example",
        ),
        (
            {"SLURM_JOB_ID": "19", "SLURM_NODELIST": "jwb[0001-0003].juwels"},
            "jwb0003",
        ),
        ({"SLURM_JOB_NODELIST": "jwb[0001-0003]", "SLURM_PROCID": "0"}, "jwb0001"),
    ],
)
def test_not_started_by_slurm(environ, hostname):
    assert outcome(Process(environ, hostname)) is None


# --- contradictions -----------------------------------------------------------------

LIST = "SLURM_STEP_NODELIST='jwb[0001-0003]'"
JOB_LIST = "SLURM_JOB_NODELIST='jwb[0001-0003]'"

# In a task of a step with one task on each of three nodes.
WRONG: Wrong = {
    "HPC020 {name} is not set, but other ": {
        "SLURM_STEP_NODELIST": [None, ""],
        "SLURM_PROCID": [None, ""],
    },
    "HPC021 {shown} is not a whole number": {
        "SLURM_STEP_NUM_NODES": ["three", "-3", "\u0663"],
        "SLURM_JOB_NUM_NODES": ["3 "],
        "SLURM_PROCID": ["abc", "-1", "²", "1" * 30],
    },
    "HPC021 {shown} is not a list of nodes: ": {
        "SLURM_STEP_NODELIST": ["(null)", "jwb[\u0660-\u0662]"],
        "SLURM_JOB_NODELIST": ["jwb[3-1]"],
    },
    "HPC021 {shown} is not a list of nodes: '[' at position 4 ": {
        "SLURM_STEP_NODELIST": ["jwb[0001-"],
    },
    "HPC021 {shown} names a node twice": {
        "SLURM_STEP_NODELIST": ["jwb[0001-0002],jwb0001"],
    },
    "HPC021 {shown} gives no counts: '": {
        "SLURM_STEP_TASKS_PER_NODE": ["1(x3", "1,0,1"],
    },
    "HPC025 {shown} names 2 nodes, but SLURM_STEP_NUM_NODES=3": {
        "SLURM_STEP_NODELIST": ["jwb000[1-2]"],
    },
    f"HPC025 {{shown}} counts the tasks of 2 nodes, but {LIST} ": {
        "SLURM_STEP_TASKS_PER_NODE": ["1(x2)"],
    },
    "HPC025 {name}=3, but the step has only 3 tasks (SLURM_STEP_TASKS_PER_NODE)": {
        "SLURM_PROCID": ["3"],
    },
    "HPC025 {name}=999999999, but the step has only 3 tasks": {
        "SLURM_PROCID": ["999999999"],
    },
    f"HPC025 this node, {{shown}}, is not among the step's nodes, {LIST}": {
        "SLURMD_NODENAME": ["jwb0009"],
    },
}
# The same for several variables at once.
WRONG_TOGETHER: dict[str, dict[str, Any]] = {
    "HPC020 SLURM_JOB_ID is not set": {"SLURM_JOB_ID": None, "SLURM_JOBID": None},
    "HPC020 SLURM_STEP_TASKS_PER_NODE is not set": {
        "SLURM_STEP_TASKS_PER_NODE": None,
        "SLURM_TASKS_PER_NODE": None,
    },
    "HPC025 SLURM_TASKS_PER_NODE='1(x4)' counts the tasks of 4 nodes, but ": {
        "SLURM_STEP_TASKS_PER_NODE": None,
        "SLURM_TASKS_PER_NODE": "1(x4)",
    },
    f"HPC025 SLURM_NODEID=3, but the step has only 3 nodes, {LIST}": {
        "SLURMD_NODENAME": None,
        "SLURM_NODEID": "3",
    },
    "HPC020 SLURM_NODEID is not set": {"SLURMD_NODENAME": None, "SLURM_NODEID": None},
    "HPC021 SLURM_NODEID='1.0' is not a whole number": {
        "SLURMD_NODENAME": None,
        "SLURM_NODEID": "1.0",
    },
    f"HPC025 SLURM_STEP_NODELIST='jwb0007' names nodes that are not in {JOB_LIST}": {
        **STALE_STEP,
    },
}


@pytest.mark.parametrize("task", [0, 1])
def test_contradiction(task):
    step = process_of("slurm-srun-3-nodes", task)
    assert_refused(step, WRONG)
    for message, changes in WRONG_TOGETHER.items():
        # Leftovers of another step turn the first task into a batch script.
        if changes != STALE_STEP or task > 0:
            assert_refusal(with_changes(step, changes), message)


def test_contradiction_where_a_node_has_several_tasks():
    assert_refused(
        process_of("slurm-srun-2-nodes-4-tasks-each", 1),
        {
            "HPC020 {name} is not set": {"SLURM_LOCALID": [None]},
            "HPC021 {shown} is not a whole number": {"SLURM_LOCALID": ["x"]},
            "HPC025 {name}=4, but there are only 4 tasks on this node": {
                "SLURM_LOCALID": ["4"],
            },
        },
    )
    assert_refused(
        process_of("slurm-srun-uneven-tasks"),
        {"HPC025 {name}=3, but the step has only 3": {"SLURM_PROCID": ["3"]}},
    )


@pytest.mark.parametrize("value", ["abc", "-1", "²", "1" * 30, "", None])
def test_task_rank_that_cannot_be_read_is_never_silent(value):
    """No task knows whether it is the first one, so each reports it."""
    process = process_of("slurm-srun-3-nodes", 1, {"SLURM_PROCID": value})
    assert schedulers.task_rank(process.environ) is None
    assert is_reporter(of_process(process).task_rank or 0)


def test_variables_that_were_lost():
    """Only the first task can be mistaken for the batch script."""
    number = Process({"SLURM_STEP_NUM_NODES": "3"}, "jwb0001")
    assert_refusal(number, "HPC020 SLURM_STEP_NODELIST is not set")
    for task in (1, 2):
        step = process_of("slurm-sbatch-srun", task)
        lost = dict.fromkeys(n for n in step.environ if n.startswith("SLURM_STEP"))
        without = with_changes(step, lost)
        assert_refusal(without, "HPC020 SLURM_STEP_NODELIST is not set")


def test_batch_script_on_a_node_of_another_job():
    script = process_of("slurm-sbatch-script")
    message = f"HPC025 this node, {{shown}}, is not among the job's nodes, {JOB_LIST}"
    assert_refused(script, {message: {"SLURMD_NODENAME": ["jwb0009"]}})
