from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import RECORDED, changed, detected, juelich, make_inputs, outcome, recorded
from plans import make_direct_plan

from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching.preflight import of_process
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.reporting.reporter import is_reporter
from torchrun_hpc.schedulers import slurm
from torchrun_hpc.schedulers.hostlist import expand_hostlist
from torchrun_hpc.schedulers.job import Job, LaunchContext, Task
from torchrun_hpc.schedulers.process import Process

ONE = ("jwb0001",)
TWO = ("jwb0001", "jwb0002")
THREE = ("jwb0001", "jwb0002", "jwb0003")
LAST_TWO = ("jwb0002", "jwb0003")

BY_STEP = {
    "nodes": "SLURM_STEP_NODELIST",
    "node_rank": "SLURMD_NODENAME",
    "tasks": "SLURM_STEP_TASKS_PER_NODE",
    "task": "SLURM_PROCID",
    "launch_id": "SLURM_JOB_ID, SLURM_STEP_ID",
}
BY_SEVERAL = {**BY_STEP, "local_rank": "SLURM_LOCALID"}
BY_ARRAY = {
    **BY_STEP,
    "launch_id": "SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID, SLURM_STEP_ID",
}
BY_HET = {**BY_STEP, "launch_id": "SLURM_JOB_ID_HET_GROUP_0, SLURM_STEP_ID"}
BY_SCRIPT = {
    "nodes": "SLURM_JOB_NODELIST",
    "node_rank": "SLURMD_NODENAME",
    "launch_id": "SLURM_JOB_ID",
}
BY_SHELL = {"nodes": "SLURM_JOB_NODELIST", "launch_id": "SLURM_JOB_ID"}


_ONE = "--nodes=1 --ntasks=1 --ntasks-per-node=1 {command}"
_TWO = "--nodes=2 --ntasks=2 --ntasks-per-node=1 {command}"
HET_LINE = f"srun --het-group=0 {_ONE} : --het-group=1 {_TWO}"
HET_SRUN = replace(slurm.SRUN, template=HET_LINE)
OVERLAP = replace(
    slurm.SRUN, template=slurm.SRUN.template.replace("srun", "srun --overlap")
)


def step(launch_id, nodes, rank, task, provenance):
    """Describe a task of a step of srun on all nodes of the job."""
    return Job(
        "Slurm",
        launch_id,
        LaunchContext.STEP,
        slurm.SRUN,
        nodes,
        rank,
        task,
        len(nodes),
        provenance,
    )


EXPECTED = {
    "slurm-array-0": [
        step("26_0.0", TWO, 0, Task(0, 2, 0, 1), BY_ARRAY),
        step("26_0.0", TWO, 1, Task(1, 2, 0, 1), BY_ARRAY),
    ],
    "slurm-array-1": [
        step("26_1.0", TWO, 0, Task(0, 2, 0, 1), BY_ARRAY),
        step("26_1.0", TWO, 1, Task(1, 2, 0, 1), BY_ARRAY),
    ],
    "slurm-het-step": [
        replace(step("23.0", THREE, rank, Task(rank, 3), BY_HET), launcher=HET_SRUN)
        for rank in range(3)
    ],
    "slurm-salloc-shell": [
        Job(
            "Slurm",
            "21.shell",
            LaunchContext.ALLOCATION_SHELL,
            slurm.SRUN,
            THREE,
            None,
            Task(),
            3,
            BY_SHELL,
        ),
    ],
    "slurm-sbatch-script": [
        Job(
            "Slurm",
            "25.batch",
            LaunchContext.BATCH_SCRIPT,
            slurm.SRUN,
            THREE,
            0,
            Task(),
            3,
            BY_SCRIPT,
        ),
    ],
    "slurm-sbatch-srun": [
        step("25.0", THREE, 0, Task(0, 3, 0, 1), BY_STEP),
        step("25.0", THREE, 1, Task(1, 3, 0, 1), BY_STEP),
        step("25.0", THREE, 2, Task(2, 3, 0, 1), BY_STEP),
    ],
    "slurm-srun-2-nodes-4-tasks-each": [
        step("20.0", TWO, 0, Task(0, 8, 0, 4), BY_SEVERAL),
        step("20.0", TWO, 0, Task(1, 8, 1, 4), BY_SEVERAL),
        step("20.0", TWO, 0, Task(2, 8, 2, 4), BY_SEVERAL),
        step("20.0", TWO, 0, Task(3, 8, 3, 4), BY_SEVERAL),
        step("20.0", TWO, 1, Task(4, 8, 0, 4), BY_SEVERAL),
        step("20.0", TWO, 1, Task(5, 8, 1, 4), BY_SEVERAL),
        step("20.0", TWO, 1, Task(6, 8, 2, 4), BY_SEVERAL),
        step("20.0", TWO, 1, Task(7, 8, 3, 4), BY_SEVERAL),
    ],
    "slurm-srun-3-nodes": [
        step("19.0", THREE, 0, Task(0, 3, 0, 1), BY_STEP),
        step("19.0", THREE, 1, Task(1, 3, 0, 1), BY_STEP),
        step("19.0", THREE, 2, Task(2, 3, 0, 1), BY_STEP),
    ],
    "slurm-srun-pmi2": [
        step("28.0", THREE, 0, Task(0, 3, 0, 1), BY_STEP),
        step("28.0", THREE, 1, Task(1, 3, 0, 1), BY_STEP),
        step("28.0", THREE, 2, Task(2, 3, 0, 1), BY_STEP),
    ],
    "slurm-srun-step-on-a-subset": [
        replace(
            step("22.0", LAST_TWO, 0, Task(0, 2, 0, 1), BY_STEP), allocated_nodes=3
        ),
        replace(
            step("22.0", LAST_TWO, 1, Task(1, 2, 0, 1), BY_STEP), allocated_nodes=3
        ),
    ],
    "slurm-srun-uneven-tasks": [
        step("29.0", TWO, 0, Task(0, 3, 0, 2), BY_SEVERAL),
        step("29.0", TWO, 0, Task(1, 3, 1, 2), BY_SEVERAL),
        step("29.0", TWO, 1, Task(2, 3, 0, 1), BY_STEP),
    ],
}


def detect(name, task=0, changes=None, *, terminal=False, hostname=None):
    environ, recorded_hostname = recorded(name)[task]
    return detected(
        Process(
            changed(environ, changes or {}),
            hostname or recorded_hostname,
            terminal=terminal,
        )
    )


# --- what was recorded --------------------------------------------------------------


def test_every_recorded_launch_is_expected():
    assert list(EXPECTED) == RECORDED


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_launch(name):
    found = [
        detected(Process(environ, hostname)) for environ, hostname in recorded(name)
    ]
    assert found == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_container_that_hides_the_node_name_changes_no_rank(name):
    tasks = range(len(EXPECTED[name]))
    found = [detect(name, task, {"SLURMD_NODENAME": None}) for task in tasks]
    assert [job.node_rank for job in found] == [j.node_rank for j in EXPECTED[name]]
    assert [job.nodes for job in found] == [j.nodes for j in EXPECTED[name]]


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


def test_launch_id_is_the_leaders_in_every_component_of_a_heterogeneous_job():
    jobs = [
        detect("slurm-het-step", task, {"SLURM_JOB_ID": job, "SLURM_JOBID": job})
        for task, job in enumerate(["23", "24", "24"])
    ]
    assert {job.launch_id for job in jobs} == {"23.0"}


@pytest.mark.parametrize("name", RECORDED)
def test_all_tasks_of_a_launch_agree(name):
    tasks = range(len(EXPECTED[name]))
    jobs = [detect(name, task) for task in tasks]
    for value in ("launch_id", "nodes", "context", "allocated_nodes"):
        assert len({getattr(job, value) for job in jobs}) == 1, value


STEP_ONLY = (*slurm.STEP_ID, slurm.STEP_NODES, slurm.STEP_NUM_NODES)
NO_STEP = dict.fromkeys((*STEP_ONLY, *slurm.STEP_TASKS_PER_NODE))
# As in the batch script of a job of two components: the variables without a group are
# those of the first one.
HET_SCRIPT = NO_STEP | {
    "SLURM_JOB_NODELIST": "jwb0001", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
    "SLURM_NTASKS": "4",
}  # fmt: skip
HET_LINES = {
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
    """srun starts on the first component only, unless it is told."""
    changes, line = HET_LINES[case]
    environ, hostname = recorded("slurm-het-step")[0]
    if case == "a shell on a login node":
        hostname = "login01"
    job = slurm.detect(Process(changed(environ, changes), hostname))
    assert job.launcher.template == line
    assert not job.launcher.takes_number
    assert job.allocated_nodes == 3 or "a step" in case
    is_shell = job.context is LaunchContext.INTERACTIVE_STEP
    nodes = job.allocated_nodes if is_shell else None
    typed = job.once_per_node("python x.py", nodes=nodes)
    assert typed == line.format(command="python x.py")


def test_different_launches_have_different_launch_ids():
    restart = {"SLURM_RESTART_COUNT": "1"}
    step = {"SLURM_STEP_ID": "1", "SLURM_STEPID": "1"}
    jobs = [detect(name) for name in RECORDED]
    for changes in (restart, step, restart | step):
        jobs += [
            detect(name, changes=changes)
            for name in RECORDED
            if EXPECTED[name][0].context is LaunchContext.STEP
        ]
    launch_ids = [job.launch_id for job in jobs]
    assert len(set(launch_ids)) == len(launch_ids) == 11 + 3 * 9


# --- ways to start ------------------------------------------------------------------


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


def arbitrary(case):
    """Return what each task of such a step finds."""
    listed, places = ARBITRARY[case]
    nodes = sorted(set(listed.split()))
    changes = {
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
            changes
            | {
                "SLURMD_NODENAME": nodes[node],
                "SLURM_NODEID": str(node),
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(places[:rank].count(node)),
            },
        )
        for rank, node in enumerate(places)
    ]


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
    plans = []
    for job in arbitrary(case):
        inputs = make_inputs(job=job, network=juelich(job.index))
        plans.append(make_plan(inputs))
    assert [plan.world.node_rank for plan in plans] == [0, 1, 2]
    assert [plan.rendezvous.is_coordinator for plan in plans] == [
        node == 0 for node in places
    ]
    assert {
        (
            plan.rendezvous.connect_host,
            plan.rendezvous.ports,
            plan.rendezvous.coordinator,
        )
        for plan in plans
    } == {("10.20.0.1", plans[0].rendezvous.ports, None)}
    hosts = listed.split()
    assert [plan.world.hosts for plan in plans] == [
        tuple(
            host if rank == plan.world.node_rank else ""
            for rank, host in enumerate(hosts)
        )
        for plan in plans
    ]


OWN_ORDER = [case for case in ARBITRARY if case != "one"]


@pytest.mark.parametrize("case", OWN_ORDER)
def test_all_tasks_refuse_or_none_in_an_order_of_the_users_own(case):
    """The others cannot know where rank 0 is, also where it is the first node."""
    hosts = ARBITRARY[case][0].split()
    for job in arbitrary(case):
        inputs = make_inputs(job=job, network=juelich(job.index), workers=1)
        with pytest.raises(LaunchError) as caught:
            make_direct_plan(inputs)
        first = hosts[0] if job.task.rank == 0 else "HOST"
        assert (caught.value.code, caught.value.everywhere) == ("HPC141", True)
        assert "SLURM_DISTRIBUTION=arbitrary" in str(caught.value)
        assert str(caught.value).endswith(f"export MASTER_ADDR={first}")


@pytest.mark.parametrize("case", OWN_ORDER)
def test_all_tasks_run_where_they_are_told_where_rank_0_is(case):
    hosts = ARBITRARY[case][0].split()
    for form in "{}", "{}i", "{}.site":
        told = form.format(hosts[0])
        known = {told: f"10.20.0.{hosts[0][-1]}"}
        masters = set()
        for job in arbitrary(case):
            network = juelich(job.index, hosts=known)
            about = {"network": network, "environ": {"MASTER_ADDR": told}}
            inputs = make_inputs(job=job, **about)
            masters.add(make_direct_plan(inputs).environment["MASTER_ADDR"].value)
        assert masters == {f"10.20.0.{hosts[0][-1]}"}, form


@pytest.mark.parametrize("environ", [{"MASTER_ADDR": "n8"}, {"MASTER_PORT": "29500"}])
def test_what_a_hook_has_left_does_not_say_where_rank_0_is(environ):
    for job in arbitrary("a host twice"):
        inputs = make_inputs(job=job, network=juelich(job.index), environ=environ)
        with pytest.raises(LaunchError) as caught:
            make_direct_plan(inputs)
        assert caught.value.code == "HPC141"


def test_the_static_rendezvous_in_an_order_of_the_users_own():
    """Rank 0 hosts it: all refuse, unless it is typed."""
    for job in arbitrary("reversed"):
        here = juelich(job.index)
        inputs = make_inputs(job=job, network=here, options={"rdzv_backend": "static"})
        with pytest.raises(LaunchError) as caught:
            make_plan(inputs)
        assert (caught.value.code, caught.value.everywhere) == ("HPC141", True)
        assert "Tell the others: --master_addr=" in str(caught.value)
        inputs = make_inputs(job=job, network=here, options={"master_addr": "jwb0003"})
        plan = make_plan(inputs)
        assert (plan.rendezvous.connect_host, plan.rendezvous.is_coordinator) == (
            "10.20.0.3",
            plan.world.node_rank == 0,
        )


@pytest.mark.parametrize("host", ["jwb0002", "jwb0002i", "10.20.0.2"])
def test_a_typed_endpoint_in_an_order_of_the_users_own(host):
    for job in arbitrary("reversed"):
        options = {"rdzv_endpoint": f"{host}:29400"}
        inputs = make_inputs(job=job, network=juelich(job.index), options=options)
        plan = make_plan(inputs)
        assert (plan.rendezvous.connect_host, plan.rendezvous.is_coordinator) == (
            "10.20.0.2",
            job.own_name == "jwb0002",
        )


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
    found = set()
    for rank, host in enumerate(host for host in hosts for _ in range(each)):
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % each),
            "SLURMD_NODENAME": host,
            "SLURM_NODEID": str(THREE.index(host)),
        }
        job = detect("slurm-het-step", 0, changes | place)
        assert job.own_name == host
        options = {"rdzv_backend": "static"} if each == 1 else {}
        inputs = make_inputs(
            job=job, network=juelich(job.index), options=options, workers=1
        )
        try:
            make_plan(inputs) if each == 1 else make_direct_plan(inputs)
        except LaunchError as error:
            is_named = "(SLURM_JOB_NODELIST_HET_GROUP_0, " in str(error)
            found.add((error.code, error.everywhere, is_named))
        else:
            found.add(None)
    assert found == ({None} if "in order" in case else {("HPC141", True, True)})


def test_a_node_finds_itself_by_name_in_a_list_of_another_order():
    changes = {"SLURM_STEP_NODELIST": "jwb0003,jwb[0001-0002]"}
    jobs = [detect("slurm-srun-3-nodes", task, changes) for task in range(3)]
    assert [job.index for job in jobs] == [1, 2, 0]
    assert [job.node_rank for job in jobs] == [0, 1, 2]


def test_names_without_padding_stay_in_the_schedulers_order():
    nodes = {"SLURM_JOB_NODELIST": "n[9-11]", "SLURM_STEP_NODELIST": "n[9-11]"}
    jobs = [
        detect("slurm-srun-3-nodes", task, nodes | {"SLURMD_NODENAME": f"n{9 + task}"})
        for task in range(3)
    ]
    assert [job.node_rank for job in jobs] == [0, 1, 2]
    assert jobs[0].nodes == ("n9", "n10", "n11")


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


INTERACTIVE = {
    "SLURM_STEP_NODELIST": "jwb0001",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


@pytest.mark.parametrize("step", ["4294967290", "-6"])
@pytest.mark.parametrize("terminal", [True, False])
def test_interactive_step_of_salloc(step, terminal):
    changes = INTERACTIVE | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}
    job = detect("slurm-srun-3-nodes", 0, changes, terminal=terminal)
    assert job == Job(
        "Slurm",
        "19.interactive",
        LaunchContext.INTERACTIVE_STEP,
        OVERLAP,
        ONE,
        0,
        Task(),
        3,
        {"nodes": "SLURMD_NODENAME", "launch_id": "SLURM_JOB_ID, SLURM_STEP_ID"},
    )


def test_interactive_step_in_a_container_without_the_node_name():
    changes = INTERACTIVE | {"SLURM_STEP_ID": "-6", "SLURMD_NODENAME": None}
    job = detect("slurm-srun-3-nodes", 0, changes)
    assert (job.context, job.nodes) == (LaunchContext.INTERACTIVE_STEP, ONE)


PTY = {"SLURM_PTY_PORT": "61000", "SLURM_PTY_WIN_COL": "80", "SLURM_PTY_WIN_ROW": "24"}


def test_shell_of_srun_pty():
    job = detect("slurm-srun-3-nodes", 0, INTERACTIVE | PTY, terminal=True)
    assert (job.context, job.nodes) == (LaunchContext.INTERACTIVE_STEP, ONE)
    assert (job.allocated_nodes, job.task) == (3, Task())


@pytest.mark.parametrize("task", [0, 1, 2])
def test_srun_in_the_shell_of_srun_pty_inherits_its_port(task):
    job = detect("slurm-srun-3-nodes", task, PTY, terminal=False)
    assert job == EXPECTED["slurm-srun-3-nodes"][task]


def test_a_terminal_alone_does_not_make_a_step_interactive():
    job = detect("slurm-srun-3-nodes", 0, terminal=True)
    assert job == EXPECTED["slurm-srun-3-nodes"][0]


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
    job = detect("slurm-sbatch-script", changes=changes)
    assert (job.context, job.launch_id) == (LaunchContext.BATCH_SCRIPT, "25.batch")
    assert (job.nodes, job.node_rank, job.task) == (THREE, 0, Task())


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
    assert detected(Process(environ, hostname)) is None


@pytest.mark.parametrize("hostname", ["login01", "jwb0004", "jwb0001i", "jwb"])
def test_shell_of_salloc_outside_of_the_nodes(hostname):
    job = detect("slurm-salloc-shell", hostname=hostname)
    assert job == EXPECTED["slurm-salloc-shell"][0]


@pytest.mark.parametrize("hostname", ["jwb0001", "jwb0003", "jwb0002.juwels"])
def test_shell_of_salloc_on_one_of_the_nodes(hostname):
    assert detect("slurm-salloc-shell", hostname=hostname) is None


# --- contradictions -----------------------------------------------------------------

ALL = "all"  # every task sees the fault: the first one reports it
EACH = "each"  # a fault of one node: it reports itself

LIST = "SLURM_STEP_NODELIST='jwb[0001-0003]'"

# What is wrong, the code, what the message says, and who says it.
WRONG = {
    "the step's list is broken": (
        {"SLURM_STEP_NODELIST": "jwb[0001-"},
        "HPC022",
        "SLURM_STEP_NODELIST='jwb[0001-' is not a list of nodes: '[' at position 4 ",
        ALL,
    ),
    "the list is no list": (
        {"SLURM_STEP_NODELIST": "(null)"},
        "HPC022",
        "SLURM_STEP_NODELIST='(null)' is not a list of nodes",
        ALL,
    ),
    "the list has digits of another script": (
        {"SLURM_STEP_NODELIST": "jwb[\u0660-\u0662]"},
        "HPC022",
        "SLURM_STEP_NODELIST='jwb[\u0660-\u0662]' is not a list of nodes",
        ALL,
    ),
    "the job's list is broken": (
        {"SLURM_JOB_NODELIST": "jwb[3-1]"},
        "HPC022",
        "SLURM_JOB_NODELIST='jwb[3-1]' is not a list of nodes",
        ALL,
    ),
    "the list was dropped": (
        {"SLURM_STEP_NODELIST": None},
        "HPC020",
        "SLURM_STEP_NODELIST is not set, although",
        ALL,
    ),
    "the list is empty": (
        {"SLURM_STEP_NODELIST": ""},
        "HPC020",
        "SLURM_STEP_NODELIST is not set, although",
        ALL,
    ),
    "a node twice": (
        {"SLURM_STEP_NODELIST": "jwb[0001-0002],jwb0001"},
        "HPC023",
        "SLURM_STEP_NODELIST='jwb[0001-0002],jwb0001' names a node twice",
        ALL,
    ),
    "fewer nodes than counted": (
        {"SLURM_STEP_NODELIST": "jwb000[1-2]"},
        "HPC025",
        "SLURM_STEP_NODELIST='jwb000[1-2]' names 2 nodes, but SLURM_STEP_NUM_NODES=3",
        ALL,
    ),
    "the number of nodes is no number": (
        {"SLURM_STEP_NUM_NODES": "three"},
        "HPC021",
        "SLURM_STEP_NUM_NODES='three' is not a whole number",
        ALL,
    ),
    "the number of nodes is negative": (
        {"SLURM_STEP_NUM_NODES": "-3"},
        "HPC021",
        "SLURM_STEP_NUM_NODES='-3' is not a whole number",
        ALL,
    ),
    "the number of nodes has digits of another script": (
        {"SLURM_STEP_NUM_NODES": "\u0663"},
        "HPC021",
        "SLURM_STEP_NUM_NODES='\u0663' is not a whole number",
        ALL,
    ),
    "the job's number of nodes is no number": (
        {"SLURM_JOB_NUM_NODES": "3 "},
        "HPC021",
        "SLURM_JOB_NUM_NODES='3 ' is not a whole number",
        ALL,
    ),
    "counts of fewer nodes": (
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        "HPC026",
        f"SLURM_STEP_TASKS_PER_NODE='1(x2)' counts the tasks of 2 nodes, but {LIST} ",
        ALL,
    ),
    "the job's counts of more nodes": (
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": "1(x4)"},
        "HPC026",
        "SLURM_TASKS_PER_NODE='1(x4)' counts the tasks of 4 nodes, but ",
        ALL,
    ),
    "broken counts": (
        {"SLURM_STEP_TASKS_PER_NODE": "1(x3"},
        "HPC024",
        "SLURM_STEP_TASKS_PER_NODE='1(x3' gives no counts: '1(x3' at position 1 ",
        ALL,
    ),
    "a count of zero": (
        {"SLURM_STEP_TASKS_PER_NODE": "1,0,1"},
        "HPC024",
        "SLURM_STEP_TASKS_PER_NODE='1,0,1' gives no counts",
        ALL,
    ),
    "no counts": (
        {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": None},
        "HPC020",
        "SLURM_STEP_TASKS_PER_NODE is not set",
        ALL,
    ),
    "no job id": (
        {
            "SLURM_JOB_ID": None,
            "SLURM_JOBID": None,
            "SLURM_ARRAY_JOB_ID": None,
        },
        "HPC020",
        "SLURM_JOB_ID is not set",
        ALL,
    ),
    "this node is not in the list": (
        {"SLURMD_NODENAME": "jwb0009"},
        "HPC028",
        f"this node, SLURMD_NODENAME='jwb0009', is not among the step's nodes, {LIST}",
        EACH,
    ),
    "no name, and a number beyond the list": (
        {"SLURMD_NODENAME": None, "SLURM_NODEID": "3"},
        "HPC029",
        f"SLURM_NODEID=3, but the step has only 3 nodes, {LIST}",
        EACH,
    ),
    "no name, and no number": (
        {"SLURMD_NODENAME": None, "SLURM_NODEID": None},
        "HPC020",
        "SLURM_NODEID is not set",
        ALL,
    ),
    "no name, and what is no number": (
        {"SLURMD_NODENAME": None, "SLURM_NODEID": "1.0"},
        "HPC021",
        "SLURM_NODEID='1.0' is not a whole number",
        ALL,
    ),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("task", [0, 1])
def test_contradiction(fault, task):
    changes, code, message, who = WRONG[fault]
    with pytest.raises(LaunchError, match="^" + re.escape(message)) as caught:
        detect("slurm-srun-3-nodes", task, changes)
    assert caught.value.code == code
    assert caught.value.everywhere is (who != EACH)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slurm-srun-3-nodes", "3"),
        ("slurm-srun-3-nodes", "999999999"),
        ("slurm-srun-uneven-tasks", "3"),
    ],
)
def test_task_beyond_the_step(name, value):
    with pytest.raises(LaunchError, match=f"SLURM_PROCID={value}, .* 3 tasks") as e:
        detect(name, changes={"SLURM_PROCID": value})
    assert (e.value.code, e.value.everywhere) == ("HPC027", False)
    assert "SLURM_STEP_TASKS_PER_NODE" in str(e.value)


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ("4", "HPC032", "SLURM_LOCALID=4, but there are only 4 tasks on this node"),
        ("x", "HPC021", "SLURM_LOCALID='x' is not a whole number"),
        (None, "HPC020", "SLURM_LOCALID is not set"),
    ],
)
def test_local_rank_that_cannot_be(value, code, message):
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}") as caught:
        detect("slurm-srun-2-nodes-4-tasks-each", 1, {"SLURM_LOCALID": value})
    assert (caught.value.code, caught.value.everywhere) == (code, code != "HPC032")


def test_the_only_task_of_a_node_needs_no_local_rank():
    job = detect("slurm-srun-3-nodes", 1, {"SLURM_LOCALID": None})
    assert job == EXPECTED["slurm-srun-3-nodes"][1]


@pytest.mark.parametrize("value", ["abc", "-1", "²", "1" * 30, "", None])
def test_task_rank_that_cannot_be_read_is_never_silent(value):
    """No task knows whether it is the first one, so each reports it."""
    changes = {"SLURM_PROCID": value}
    with pytest.raises(LaunchError, match="SLURM_PROCID"):
        detect("slurm-srun-3-nodes", 1, changes)
    environ = changed(recorded("slurm-srun-3-nodes")[1][0], changes)
    assert schedulers.task_rank(environ) is None
    assert is_reporter(of_process(Process(environ, "jwb0002")).task_rank or 0)


def test_a_number_of_nodes_alone_shows_that_a_list_was_lost():
    found = outcome(Process({"SLURM_STEP_NUM_NODES": "3"}, "jwb0001"))
    assert found.startswith("HPC020 SLURM_STEP_NODELIST is not set")


@pytest.mark.parametrize("task", [1, 2])
def test_task_that_lost_every_variable_of_its_step(task):
    """Only the first task can be mistaken for the batch script."""
    lost = dict.fromkeys(
        name
        for name in recorded("slurm-sbatch-srun")[task][0]
        if name.startswith("SLURM_STEP")
    )
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST is not set") as caught:
        detect("slurm-sbatch-srun", task, lost)
    assert caught.value.code == "HPC020"


def test_step_of_another_job_in_a_task():
    with pytest.raises(LaunchError) as caught:
        detect("slurm-srun-3-nodes", 1, STALE_STEP)
    assert caught.value.code == "HPC030"
    assert "SLURM_STEP_NODELIST='jwb0007'" in str(caught.value)
    assert "SLURM_JOB_NODELIST='jwb[0001-0003]'" in str(caught.value)


def test_batch_script_on_a_node_of_another_job():
    with pytest.raises(LaunchError, match="SLURMD_NODENAME='jwb0009'") as caught:
        detect("slurm-sbatch-script", changes={"SLURMD_NODENAME": "jwb0009"})
    assert caught.value.code == "HPC031"
    assert "SLURM_JOB_NODELIST='jwb[0001-0003]'" in str(caught.value)
    assert not caught.value.everywhere


def test_interactive_step_without_the_number_of_nodes():
    changes = INTERACTIVE | {
        "SLURM_STEP_ID": "-6",
        "SLURM_JOB_NUM_NODES": None,
        "SLURM_NNODES": None,
    }
    assert detect("slurm-srun-3-nodes", 0, changes).allocated_nodes == 1


# --- anything -----------------------------------------------------------------------

READ = [
    *slurm.JOB_ID,
    slurm.ARRAY_JOB_ID,
    slurm.ARRAY_TASK_ID,
    slurm.RESTART_COUNT,
    *slurm.STEP_ID,
    *slurm.JOB_NODES,
    *slurm.JOB_NUM_NODES,
    slurm.STEP_NODES,
    slurm.STEP_NUM_NODES,
    *slurm.STEP_TASKS_PER_NODE,
    slurm.NODE_NAME,
    slurm.NODE_ID,
    slurm.TASK_RANK,
    slurm.LOCAL_RANK,
    slurm.PTY_PORT,
]
LISTS = ["jwb0001", "jwb[0001-0003]", "n[1-9999]", "1(x3)", "2(x2),1"]
STEPS = ["-6", "4294967290", "-5"]
values = st.one_of(
    st.none(),
    st.sampled_from(
        ["", "0", "1", "-1", "3", "0x1", "\u0663", "½", "9" * 400, *LISTS, *STEPS]
    ),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
    st.integers().map(str),
)
mutations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(READ), values),
        st.tuples(st.just("swap"), st.sampled_from(READ), st.sampled_from(READ)),
        st.tuples(st.just("cut"), st.sampled_from(READ), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=4,
)
tasks = st.sampled_from(RECORDED).flatmap(lambda name: st.sampled_from(recorded(name)))


@st.composite
def mutated_environments(draw):
    """An environment that was recorded, and a few accidents; its host name."""
    environ, hostname = draw(tasks)
    environ = dict(environ)
    for kind, name, other in draw(mutations):
        if kind == "set":
            environ[name] = other
        elif kind == "swap":
            environ[name], environ[other] = environ.get(other), environ.get(name)
        else:
            environ[name] = (environ.get(name) or "")[:other]
        environ = changed(environ, {})
    return environ, draw(st.sampled_from([hostname, "login01", ""]))


@settings(max_examples=500, deadline=None)
@given(mutated_environments(), st.booleans())
def test_any_environment_is_understood_or_refused(environment, terminal):
    environ, hostname = environment
    before = dict(environ)
    assert_sound(outcome(Process(environ, hostname, terminal=terminal)))
    assert environ == before


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(READ), values.filter(lambda v: v is not None)))
def test_any_variables_are_understood_or_refused(environ):
    assert_sound(outcome(Process(environ, "login01")))


def assert_sound(found):
    if isinstance(found, str):
        assert found.isprintable()
        assert re.match("HPC0[23][0-9] .*SLURM", found)
    elif found is not None:
        assert_sound_job(found)


def assert_sound_job(job):
    assert re.fullmatch("[A-Za-z0-9._-]+", job.launch_id)
    assert 1 <= len(job.nodes) == len(set(job.nodes)) <= job.allocated_nodes
    assert all(job.nodes)
    assert 0 <= job.task.local_rank < job.task.local_size <= job.task.size
    assert 0 <= job.task.rank < job.task.size
    assert job.context is LaunchContext.STEP or job.task == Task()
    if job.context is LaunchContext.ALLOCATION_SHELL:
        assert job.node_rank is None
    else:
        assert 0 <= job.node_rank < len(job.nodes)
    assert {"nodes", "launch_id"} <= set(job.provenance)


@pytest.mark.parametrize(
    ("pid", "context"), [(41, LaunchContext.STEP), (42, LaunchContext.INTERACTIVE_STEP)]
)
def test_a_task_with_a_terminal_is_not_a_shell(pid, context):
    """srun --pty gives a terminal to the first task; all tasks must see one step."""
    environ, hostname = recorded("slurm-srun-3-nodes")[0]
    environ |= {"SLURM_PTY_PORT": "61361", "SLURM_TASK_PID": "41"}
    job = slurm.detect(Process(environ, hostname, terminal=True, pid=pid))
    assert job.context is context
