"""An agent answers for its own workers, and asks the other nodes for theirs."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict

import pytest
from loopback import wait_until
from plans import make_launch_plan

from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.stacks import inspection as inspections
from torchrun_hpc.stacks.inspection import Inspection
from torchrun_hpc.stacks.sampling import WorkerStack, received
from torchrun_hpc.stacks.service import ask, launches

pytestmark = pytest.mark.usefixtures("own_names")

LIMIT = 10.0  # seconds
HOSTS = ("jwb0001", "jwb0002", "jwb0003")
FRAMES = ("<module> sleeps.py:14", "wait sleeps.py:6")  # of conftest.SLEEPS


@pytest.fixture
def workers(processes):
    """Start the two workers of node 1, which sleep."""
    pids = [processes.sleeping() for _ in range(2)]
    return [
        Worker(2 + local, 6, 1, local, pid, lambda: None)
        for local, pid in enumerate(pids)
    ]


@pytest.fixture
def inspect(watched):
    """Let the agent of a node answer; by default, of node 1 of three."""
    made = []

    def inspect(workers, ask_all=None, is_first=lambda: True, **changes):
        about = {"nodes": 3, "node_rank": 1, "hosts": HOSTS, "launch_id": "19.0"}
        plan = make_launch_plan(**about | changes)
        made.append(Inspection(plan, watched(workers), ask_all, is_first))
        made[-1].start()
        return made[-1]

    yield inspect
    for each in made:
        each.close()


def answer():
    ((_, name),) = launches()
    return ask(name, LIMIT)


def as_sent(*stacks):
    return json.loads(json.dumps([asdict(stack) for stack in stacks]))


def of_node(node):
    """Return what another node sends."""
    return as_sent(*(WorkerStack(2 * node + n, node, ("f a.py:1",)) for n in (0, 1)))


def test_what_a_node_sends_of_its_workers(watched, workers):
    found = inspections.sample(watched(workers))
    assert received(json.loads(json.dumps(found))) == [
        WorkerStack(2, 1, FRAMES),
        WorkerStack(3, 1, FRAMES),
    ]


def test_a_node_without_workers(inspect):
    inspect([])
    assert answer()["workers"] == []


def test_a_launch_on_one_node(inspect, workers):
    inspect(workers, nodes=1, node_rank=0, hosts=("",), launch_id="")
    found = answer()
    assert (found["launch"], found["missing"]) == ("", "")
    assert received(found["workers"]) == [WorkerStack(n, 0, FRAMES) for n in (2, 3)]
    assert [worker["host"] for worker in found["workers"]] == ["", ""]


def test_a_launch_on_several_nodes(inspect, watched, workers):
    """The answers of other nodes come in any order."""
    asked = []

    def ask_all(timeout):
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
        FRAMES,
    ]
    assert asked == [inspections._TIMEOUT]
    assert inspections._NODE_TIMEOUT < inspections._TIMEOUT < 5  # seconds


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ({0: of_node(0), 1: of_node(1)}, "jwb0003 (node 2)"),
        ({1: []}, "jwb0001 (node 0), jwb0003 (node 2)"),
        ({0: of_node(0), 1: [], 2: of_node(2)}, ""),
    ],
)
def test_nodes_that_have_not_answered_are_named(inspect, answers, missing):
    inspect([], lambda _: answers)
    found = answer()
    assert found["missing"] == missing
    assert len(found["workers"]) == sum(map(len, answers.values()))


def test_what_is_known_here_is_shown_though_nobody_answers(inspect, workers):
    """The network is broken, which may be why the job does not go on."""
    inspect(workers, lambda _: {})
    found = answer()
    assert [stack["rank"] for stack in found["workers"]] == [2, 3]
    assert found["missing"] == "jwb0001 (node 0), jwb0003 (node 2)"


def test_a_node_speaks_for_itself_only(inspect):
    inspect([], lambda _: {2: of_node(1)})
    assert [stack["node"] for stack in answer()["workers"]] == [2, 2]


@pytest.mark.parametrize(
    "garbage", [None, 5, [None], [{"rank": float("inf"), "frames": [], "problem": ""}]]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_that_answers_something_else(inspect, garbage):
    inspect([], lambda _: {0: of_node(0), 1: garbage, 2: of_node(2)})
    assert [stack["rank"] for stack in answer()["workers"]] == [0, 1, 4, 5]


def test_nodes_that_cannot_be_asked_are_not_forgotten(inspect, workers):
    """With --hpc-rendezvous=c10d: it answers for one of three nodes, and says so."""
    inspect(workers, None)
    assert "node 0" in answer()["missing"]


def test_the_end(inspect):
    made = inspect([])
    made.close()
    wait_until(lambda: not list(launches()))
    made.close()


# --- a stall --------------------------------------------------------------------------


def reports(capfd, seconds=10.0):
    """Wait for a report, and return what is written."""
    text, end = "", time.monotonic() + seconds
    while "HPC171" not in text and time.monotonic() < end:
        time.sleep(0.05)
        text += capfd.readouterr().err
    return text


def test_a_stall_is_reported_by_the_first_node(inspect, capfd):
    def ask_all(_):
        return {node: of_node(node) for node in range(3)}

    inspect([], ask_all, node_rank=0, stall_report=1.0)
    assert reports(capfd).splitlines() == [
        (
            "torchrun_hpc: warning: HPC171 the 6 workers have shown the same stacks "
            "for 1 s (--hpc-stall-report); nothing is ended:"
        ),
        "    6 ranks: f a.py:1",
    ]


def test_a_stall_is_reported_by_a_node_that_becomes_the_first(inspect, capfd):
    first = threading.Event()
    answers = {node: of_node(node) for node in range(3)}
    inspect([], lambda _: answers, first.is_set, node_rank=1, stall_report=1.0)
    assert reports(capfd, 2) == ""
    first.set()
    assert "    6 ranks: f a.py:1" in reports(capfd)


def test_a_stall_on_one_node_is_reported_there(inspect, workers, capfd):
    inspect(workers, nodes=1, node_rank=0, hosts=("",), stall_report=1.0)
    assert reports(capfd).splitlines()[1:] == [
        "    2 ranks: <module> sleeps.py:14 > wait sleeps.py:6"
    ]


@pytest.mark.parametrize(
    ("answers", "changes"),
    [
        ({0: of_node(0), 1: of_node(1)}, {"node_rank": 0}),  # one is missing
        ({n: of_node(n) for n in range(3)}, {"is_first": lambda: False}),
        ({n: of_node(n) for n in range(3)}, {"node_rank": 0, "stall_report": 0}),
    ],
)
def test_nothing_is_reported(inspect, capfd, answers, changes):
    inspect([], lambda _: answers, **{"stall_report": 1.0} | changes)
    assert reports(capfd, 2.5) == ""


STEPS = """\
import time
print(flush=True)
while True:
    time.sleep(0.4)
    sum(range(10**5))
"""


def test_workers_that_go_on_do_not_stall(inspect, processes, capfd):
    """Though they are nearly always at the same line: they wait there in each step."""
    pids = [processes.start(sys.executable, "-S", "-c", STEPS) for _ in range(2)]
    workers = [Worker(n, 2, 0, n, pid, lambda: None) for n, pid in enumerate(pids)]
    inspect(workers, nodes=1, node_rank=0, hosts=("",), stall_report=3.0)
    assert reports(capfd, 6) == ""


def test_no_stall_is_reported_after_the_end(inspect, capfd):
    made = inspect([], lambda _: {n: of_node(n) for n in range(3)}, node_rank=0,
                   stall_report=1.0)  # fmt: skip
    made.close()
    assert reports(capfd, 2.5) == ""
