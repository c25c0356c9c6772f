"""An agent answers for its own workers, and asks the other nodes for theirs."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.patience import PATIENCE, until
from tests.support.plans import PLAN
from tests.support.simulated_job import worker_failure
from tests.support.stack_samples import as_sent
from torchrun_hpc import limits
from torchrun_hpc.errors import Setting
from torchrun_hpc.failures.failure import WorkerPart
from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.workers import Preload, Workers
from torchrun_hpc.stacks import inspection as inspections
from torchrun_hpc.stacks import sampling
from torchrun_hpc.stacks.calls import Call, Group
from torchrun_hpc.stacks.inspection import (
    FRAMES,
    HANG,
    STACKS,
    Inspection,
    NodeStacks,
    OtherNodes,
)
from torchrun_hpc.stacks.sampling import WorkerStack, received
from torchrun_hpc.stacks.service import ask, launches

pytestmark = pytest.mark.usefixtures("own_names")

HOSTS = ("jwb0001", "jwb0002", "jwb0003")
MEETING = Meeting("c10d", nodes=3, node_rank=1, hosts=HOSTS, launch_id="19.0")
REPORTING = replace(PLAN, asked=Options(hpc_stall_report=1))
STACK = ("<module> sleeps.py:14", "wait sleeps.py:6")


@pytest.fixture
def workers(monkeypatch):
    """Return the two workers of node 1, which sleep."""

    def sample(workers, timeout, **_):
        assert timeout in (limits.NODE_STACKS_TIMEOUT, limits.HANG_NODE_TIMEOUT)
        return [WorkerStack(worker.rank, worker.node, STACK) for worker in workers]

    monkeypatch.setattr(sampling, "sample", sample)
    return [Worker(2 + n, 6, 1, n, os.getpid(), lambda: None) for n in range(2)]


@pytest.fixture
def inspect(watched):
    """Let the agent of a node answer; by default, of node 1 of three."""
    made = []

    def inspect(
        workers, ask_all=None, is_first=lambda: True, own=None, plan=PLAN, **changes
    ):
        plan = replace(plan, meeting=replace(MEETING, **changes))
        stacks = NodeStacks(watched(workers))
        if own:
            stacks.replies = {HANG: lambda _: own}
        others = OtherNodes(ask_all, is_first, lambda: plan.meeting)
        made.append(Inspection(plan, stacks, others if ask_all else None))
        made[-1].start()
        return made[-1]

    yield inspect
    for each in made:
        each.close()


def answer():
    ((_, name),) = launches()
    return ask(name, PATIENCE)


def of_node(node):
    """Return what another node sends."""
    return as_sent(*(WorkerStack(2 * node + n, node, ("f a.py:1",)) for n in (0, 1)))


def test_a_launch_on_one_node(inspect, workers):
    inspect(workers, nodes=1, node_rank=0, hosts=("",), launch_id="")
    found = answer()
    assert (found["launch"], found["missing"]) == ("", "")
    assert received(found["workers"]) == [WorkerStack(n, 0, STACK) for n in (2, 3)]
    assert [worker["host"] for worker in found["workers"]] == ["", ""]


def test_a_launch_on_one_node_of_a_job(inspect, workers):
    """Its host is in the data, but not in lines: there is no other."""
    made = inspect(workers, nodes=1, node_rank=0, hosts=("jwb0001",), launch_id="")
    assert [worker["host"] for worker in answer()["workers"]] == ["jwb0001"] * 2
    assert made._hosts == {}


def test_a_launch_on_several_nodes(inspect, watched, workers):
    """The answers of other nodes come in any order."""
    asked = []

    def ask_all(what, timeout):
        assert what == STACKS
        asked.append(timeout)
        return {2: of_node(2), 1: inspections.sample(watched(workers)), 0: of_node(0)}

    inspect(workers, ask_all)
    found = answer()
    assert found["missing"] == ""
    assert [stack["rank"] for stack in found["workers"]] == [*range(6)]
    assert [stack["host"] for stack in found["workers"]] == [
        *("jwb0001", "jwb0001", "jwb0002", "jwb0002", "jwb0003", "jwb0003")
    ]
    assert [tuple(stack["frames"]) for stack in found["workers"][1:3]] == [
        ("f a.py:1",),
        STACK,
    ]
    assert asked == [limits.STACKS_TIMEOUT]
    assert limits.NODE_STACKS_TIMEOUT < limits.STACKS_TIMEOUT < 5  # seconds


@pytest.mark.parametrize(
    ("answers", "ranks", "missing"),
    [
        ({0: of_node(0), 1: of_node(1)}, [0, 1, 2, 3], "jwb0003 (node 2)"),
        ({0: of_node(0), 1: None, 2: of_node(2)}, [0, 1, 4, 5], ""),
        # The network is broken, which may be why the job does not continue. This node
        # shows its own workers.
        ({}, [2, 3], "jwb0001 (node 0), jwb0003 (node 2)"),
        ({1: []}, [], "jwb0001 (node 0), jwb0003 (node 2)"),
    ],
)
def test_nodes_that_have_not_answered_are_named(
    inspect, workers, answers, ranks, missing
):
    inspect(workers, lambda *_: answers)
    found = answer()
    assert found["missing"] == missing
    assert [stack["rank"] for stack in found["workers"]] == ranks


def test_a_node_speaks_for_itself_only(inspect):
    inspect([], lambda *_: {2: of_node(1)})
    assert [stack["node"] for stack in answer()["workers"]] == [2, 2]


def test_nodes_that_cannot_be_asked_are_not_forgotten(inspect, workers):
    """With --hpc-rendezvous=c10d: it answers for one of three nodes, and says so."""
    inspect(workers, None)
    assert "node 0" in answer()["missing"]


def test_the_end(inspect):
    made = inspect([])
    made.close()
    until(lambda: not list(launches()))
    made.close()


# --- a stall --------------------------------------------------------------------------


def if_complete(made):
    return [stack.rank for stack in made._if_complete(FRAMES)]


def test_the_first_node_reports_a_stall(inspect, monkeypatch, capfd):
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(inspections, "time", clock)
    monkeypatch.setattr(limits, "SHORTEST_STALL_INTERVAL", 0)
    made = inspect(
        [],
        lambda *_: {n: of_node(n) for n in range(3)},
        node_rank=0,
        plan=REPORTING,
    )
    made._stall._thread.join(PATIENCE)
    assert capfd.readouterr().err.splitlines() == [
        (
            "torchrun_hpc: warning[HPC171]: the stacks of 6 workers have not changed "
            "for 1 s (--hpc-stall-report). The job continues:"
        ),
        "    6 ranks: f a.py:1",
    ]


def hears_nobody(*_):
    return {}


@pytest.mark.parametrize(
    ("nodes", "asks_others", "seconds"),
    [(1, False, 1800), (3, True, 1800), (3, False, 0)],
)
def test_by_default_a_node_must_hear_all_others(inspect, nodes, asks_others, seconds):
    """With PyTorch's own rendezvous, others may make progress that it does not see."""
    preload = Preload(("torch",), Setting("torch", "--hpc-preload"))
    ask_all = hears_nobody if asks_others else None
    plan = replace(PLAN, workers=Workers(preload=preload))
    made = inspect([], ask_all, plan=plan, nodes=nodes, node_rank=0)
    assert made._stall._seconds == seconds
    assert made._stall._thread.is_alive() == bool(seconds)


def test_a_node_that_becomes_the_first_one(inspect):
    answers = {node: of_node(node) for node in range(3)}
    first: list[int] = []
    made = inspect([], lambda *_: answers, lambda: bool(first))
    assert if_complete(made) == []
    first.append(1)
    assert if_complete(made) == [*range(6)]


def test_a_stall_on_one_node_is_reported_there(inspect, workers):
    made = inspect(workers, nodes=1, node_rank=0, hosts=("",))
    assert if_complete(made) == [2, 3]


def test_no_stall_while_a_node_is_missing(inspect):
    made = inspect([], lambda *_: {0: of_node(0), 1: of_node(1)}, node_rank=0)
    assert if_complete(made) == []


def test_no_stall_is_reported_unless_it_is_wanted_nor_after_the_end(inspect, capfd):
    assert not inspect(
        [], plan=replace(PLAN, asked=Options(hpc_stall_report=0))
    )._stall._thread.is_alive()
    made = inspect(
        [],
        lambda *_: {n: of_node(n) for n in range(3)},
        plan=REPORTING,
    )
    made.close()
    made._stall._thread.join(PATIENCE)
    assert capfd.readouterr().err == ""


# --- a hang ---------------------------------------------------------------------------

GROUP = Group("0", 6, (Call(3, "barrier"), Call(4, "barrier")))
LATE = replace(GROUP, calls=GROUP.calls[:1])


def of_hang(node, late=(), workers=2):
    """Return what a node tells of workers in a barrier, but for those that are late."""
    return as_sent(
        *(
            WorkerStack(
                rank,
                node,
                ("read a.py:9",) if rank in late else ("f a.py:1", "barrier torch/x:1"),
                groups=(LATE if rank in late else GROUP,),
            )
            for rank in range(node * workers, (node + 1) * workers)
        )
    )


FAILED = worker_failure(0, text="Timed out waiting 9ms for recv operation")


def test_a_hang_is_explained(inspect, golden):
    asked = []

    def ask_all(what, timeout):
        asked.append((what, timeout))
        return {node: of_hang(node, [3]) for node in range(3)}

    failure, lines = inspect([], ask_all, own=of_hang(1, [3])).explain(FAILED)
    assert failure == replace(
        FAILED,
        absent="rank 3 on jwb0002 did not call barrier 4; it was in read at a.py:9",
    )
    golden({"lines": lines})
    assert asked == [(HANG, limits.HANG_TIMEOUT)]


def test_nodes_that_tell_nothing_of_a_hang(inspect, workers):
    """With torch's own rendezvous, a node tells only of itself."""
    own = as_sent(*(WorkerStack(rank, 1, STACK) for rank in (2, 3)))
    _, lines = inspect(workers, lambda *_: {0: of_hang(0)}, own=own).explain(FAILED)
    assert lines[0].startswith("barrier 4 of group 0: 2 of 6 ranks (0-1, jwb0001)")
    assert lines[1] == "no answer from jwb0003 (node 2)"
    assert inspect([], own=own).explain(FAILED) == (
        FAILED,
        ["2 ranks: wait at sleeps.py:6"],
    )


def test_stacks_that_are_unknown(inspect):
    problem = "py-spy is not installed. Run python -m pip install py-spy"
    missing = WorkerStack(3, 1, problem=problem, is_lasting=True)
    own = as_sent(WorkerStack(2, 1, STACK), missing)
    failure, _ = inspect([], own=own).explain(replace(FAILED, worker=WorkerPart(2, 4)))
    assert failure.absent == ""
    assert failure.text == (
        f"{FAILED.text}; where other ranks were is unknown: {problem}"
    )
    assert failure.is_doubtful


def test_a_hang_of_thousands_of_ranks_has_six_lines(inspect):
    late = [*range(0, 4096, 5)]
    answers = {node: of_hang(node, late, 8) for node in range(500)}
    hosts = [f"jwb{node:04}" for node in range(512)]
    about = {"nodes": 512, "node_rank": 0, "hosts": hosts, "own": answers[0]}
    made = inspect([], lambda *_: answers, **about)
    failure, lines = made.explain(FAILED)
    assert failure.absent.startswith("ranks 0,5,10,")
    assert len(failure.absent) < 500
    assert len(lines) <= inspections._LINES
    assert all(len(line) < 500 for line in lines)
    assert "12 nodes" in lines[1] or "jwb[0500-0511]" in lines[1]


def test_stacks_of_a_hang_are_those_before_the_stop(watched, workers):
    is_hang = True
    watch = watched(workers, hangs=lambda: is_hang)
    stacks = NodeStacks(watch)
    before = stacks.of_latest_hang()
    assert [stack["rank"] for stack in before] == [2, 3]
    is_hang = False
    watch.begin(workers[:1], 0)  # a restart
    assert stacks.of_latest_hang() is before
    is_hang = True
    (again,) = stacks.of_latest_hang()
    assert again["rank"] == 2
    assert stacks.of_latest_hang() == [again]


def test_a_node_that_was_not_in_a_hang_tells_nothing_of_its_workers(watched, workers):
    """A spare has just taken a place; or that hang was two attempts ago."""
    watch = watched(workers)
    stacks = NodeStacks(watch)
    assert stacks.of_latest_hang() == []
    stacks.sample_hang()
    for _ in range(2):
        watch.begin(workers, 0)
    assert stacks.of_latest_hang() == []


def test_workers_that_end_meanwhile(watched, monkeypatch):
    """They fail together, and one has no stack any more."""
    codes: dict[int, int | None] = {2: None, 3: None}

    def sample(workers, *_, **__):
        codes[3] = 1
        return [WorkerStack(worker.rank, worker.node) for worker in workers]

    monkeypatch.setattr(sampling, "sample", sample)
    workers = [Worker(n, 6, 1, n, os.getpid(), partial(codes.get, n)) for n in codes]
    found = received(inspections.sample(watched(workers)))
    assert [stack.problem for stack in found] == ["", "it ended with exit code 1"]
