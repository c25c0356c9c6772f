"""The options of a job that must outlive its nodes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.juelich import ONE_NODE_JOBS, juelich, step
from tests.support.plans import BLOCK, planned, planned_at, refused, values
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.reporting.start_line import start_line
from torchrun_hpc.schedulers.openmpi import MPIRUN

NODES = tuple(f"jwb{number:04}" for number in range(1, 10))
ADDRESSES = {name: f"10.10.0.{number}" for number, name in enumerate(NODES, 1)} | {
    f"{name}i": f"10.20.0.{number}" for number, name in enumerate(NODES, 1)
}

SPARES = "hpc_spares"
AFTER, CHECK = "hpc_spare_after", "hpc_health_check"
TIMEOUT = "hpc_health_check_timeout"


def planned_on(nodes, rank=0, job=None, **options):
    """Plan a launch on some of Jülich's nodes."""
    job = job or step(rank, nodes=NODES[:nodes])
    network = juelich(rank, hosts=ADDRESSES)
    return planned(job, network=network, options=options)


def assert_refused(code, text, plan, *args, **options):
    """Check the whole message of a refusal that all nodes find."""
    error = refused(code, text, plan, *args, **options)
    assert (str(error), error.everywhere) == (text, True)


# --- good values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "number", "active"),
    [(3, "1", 2), (4, "1", 3), (5, "2", 3), (9, "4", 5), (9, "004", 5), (9, 4, 5)],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_some_of_the_nodes_wait(nodes, number, active, rank):
    plan = planned_on(nodes, rank, hpc_spares=number)
    world = plan.meeting
    assert (world.nodes, world.active) == (nodes, active)
    assert world.spares == Spares(int(number), 60, "", 60, "--exclude=")
    assert plan.options["nnodes"].value == str(active)
    assert plan.options["nnodes"].source == (
        f"SLURM_STEP_NODELIST - --hpc_spares={number}"
    )
    assert plan.meeting.backend == "scheduler"
    assert plan.messages.warnings == ()


@pytest.mark.parametrize("number", [None, "0", "00", 0])
def test_no_node_waits(number):
    options = {} if number is None else {SPARES: number}
    plan = planned_on(3, **options)
    assert (plan.meeting.spares, plan.meeting.active) == (Spares(), 3)
    assert plan.options["nnodes"].value == "3"
    assert plan.options["nnodes"].source == "SLURM_STEP_NODELIST"
    assert values(plan.options) == values(planned_on(3).options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({AFTER: "300"}, Spares(1, 300, "", 60, "--exclude=")),
        (
            {CHECK: "dcgmi diag -r 1"},
            Spares(1, 60, "dcgmi diag -r 1", 60, "--exclude="),
        ),
        (
            {AFTER: "10", CHECK: "true", TIMEOUT: "5"},
            Spares(1, 10, "true", 5, "--exclude="),
        ),
    ],
)
def test_what_is_done(options, expected):
    assert planned_on(3, hpc_spares="1", **options).meeting.spares == expected


def test_a_scheduler_that_cannot_exclude_nodes():
    job = step(nodes=NODES[:3], launcher=MPIRUN)
    assert planned_on(3, job=job, hpc_spares="1").meeting.spares.exclude == ""


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (planned_on(3, hpc_spares="1"), "2 nodes and 1 spare"),
        (planned_on(5, hpc_spares="2"), "3 nodes and 2 spares"),
        (planned_on(3, hpc_spares="0"), "3 nodes"),
        (planned_on(4, hpc_spares="1", nnodes="3"), "3 nodes and 1 spare"),
    ],
)
def test_the_start_line_counts_them(plan, expected):
    line = start_line(plan).partition(": ")[2]
    assert line.startswith(f"{expected}, 2 workers here; Slurm")


NO_RESTART = (
    "HPC216 --hpc_spares=1, but no restart is allowed, so the job ends with the first "
    "lost node. Set --max-restarts=20"
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({SPARES: "0"}, []),
        ({SPARES: "1"}, [NO_RESTART]),
        ({SPARES: "1", "max_restarts": 0}, [NO_RESTART]),
        ({SPARES: "1", "max_restarts": 1}, []),
    ],
)
def test_a_spare_needs_a_restart(options, expected):
    advice = planned_on(4, **options).messages.advice
    assert [str(message) for message in advice if "HPC216" in str(message)] == expected


def test_tasks_that_end_when_one_fails_are_no_hint():
    """The job continues without the lost node."""
    hint = "srun --kill-on-bad-exit=1"
    assert hint in planned_on(3).meeting.hint
    assert hint not in planned_on(3, hpc_spares="1").meeting.hint


@pytest.mark.parametrize("nnodes", ["3", "3:3", " 3", "+3"])
def test_nnodes_is_the_number_of_nodes_that_have_workers(nnodes):
    plan = planned_on(4, hpc_spares="1", nnodes=nnodes)
    assert "nnodes" not in plan.options
    assert (plan.meeting.nodes, plan.meeting.active) == (4, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"hpc_rendezvous": "scheduler"},
        {"hpc_rendezvous": "auto"},
        {"rdzv_backend": "c10d"},
        {"rdzv_id": "mine"},
        {"rdzv_endpoint": "jwb0002:29400"},
    ],
)
def test_options_that_work_with_spares(options):
    assert planned_on(4, hpc_spares="1", **options).meeting.spares.number == 1


# --- what cannot be -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "number", "most"),
    [(2, 1, 0), (3, 2, 1), (4, 2, 1), (4, 3, 1), (4, 99, 1), (5, 3, 2), (9, 5, 4)],
)
def test_fewer_nodes_wait_than_work(nodes, number, most):
    text = (
        f"--hpc_spares={number} of {nodes} nodes: fewer nodes must wait than train. "
        f"Set {most} at most, or start on {2 * number + 1} nodes or more"
    )
    assert_refused("HPC202", text, planned_on, nodes, hpc_spares=str(number))


def test_too_many_spares_are_named_before_the_number_of_nodes():
    """Without spares, that number may be right."""
    text = "--hpc_spares=5 of 4 nodes: "
    refused("HPC202", text, planned_on, 4, hpc_spares="5", nnodes="3")


@pytest.mark.parametrize("nnodes", ["4", "2", "4:4", "5"])
def test_nnodes_that_do_not_fit(nnodes):
    text = (
        f"--nnodes={nnodes}, but this was started on 4 nodes, and with --hpc_spares=1 "
        "the world has 3. Remove --nnodes"
    )
    assert_refused("HPC204", text, planned_on, 4, hpc_spares="1", nnodes=nnodes)


@pytest.mark.parametrize(
    ("name", "value"), [(AFTER, "60"), (CHECK, "true"), (TIMEOUT, "60")]
)
@pytest.mark.parametrize("number", [None, "0"])
def test_what_is_for_spares_only(name, value, number):
    text = (
        f"--{name}={value} needs spare nodes. Set --hpc-spares=NUMBER, or remove this "
        "option"
    )
    options = {name: value} | ({} if number is None else {SPARES: number})
    assert_refused("HPC203", text, planned_on, 4, **options)


NOT_POSSIBLE = (
    "--hpc_spares=1 needs several nodes, a fixed number of them, one agent on each, "
    "and the scheduler rendezvous (docs/internals.md). Remove this option, or "
    "the one that conflicts with it"
)


@pytest.mark.parametrize(
    "options",
    [
        {"hpc_rendezvous": "c10d"},
        {"nnodes": "2:3"},
        {"nnodes": "2:4"},
        {"rdzv_backend": "static"},
        {"rdzv_backend": "etcd", "rdzv_endpoint": "keeper:2379"},
        {"node_rank": 0},
        {"master_addr": "jwb0001"},
        {"master_port": 29501},
        {"rdzv_conf": "store_type=file"},
        {"standalone": True},
        {"nnodes": "1"},
    ],
)
def test_other_ways_to_meet(options):
    assert_refused("HPC201", NOT_POSSIBLE, planned_on, 4, hpc_spares="1", **options)


BY_HAND = {"nnodes": "4", "rdzv_endpoint": "10.10.0.1:29400"}


@pytest.mark.parametrize(
    ("plan", "others"),
    [
        *((partial(planned, job), {}) for job in ONE_NODE_JOBS.values()),
        (partial(planned, None), {}),
        (partial(planned, None), BY_HAND),
        (partial(planned_at, BLOCK, 0), {}),
        (partial(planned_at, [0, 0], 0), {}),
    ],
)
def test_other_launches(plan, others):
    assert_refused("HPC201", NOT_POSSIBLE, plan, options={SPARES: "1"} | others)
