"""Why a launch has ended too early, and which nodes are to blame."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from doctor.reports import make_interface, make_node
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import wire
from torchrun_hpc.doctor import causes, conductor, link
from torchrun_hpc.doctor.launch import Ended
from torchrun_hpc.doctor.link import MOST_BYTES, Peer
from torchrun_hpc.doctor.member import LAUNCH
from torchrun_hpc.doctor.place import Wishes
from torchrun_hpc.doctor.results import Torch
from torchrun_hpc.rendezvous.client import JobState
from torchrun_hpc.schedulers.job import Task

HOSTS = ["n0", "n1", "n2", "n3"]
NODES = {task: task for task in range(4)}  # an agent on each
WORKERS = {task: task // 2 for task in range(8)}  # direct mode, two on each

WELL = Ended(0)
KILLED = Ended(-9, "Killed")
OOM = "the task was killed by SIGKILL (9): probably out of memory: Killed"
FOLLOWS = Ended(1, "HPC125 the job has failed: worker 5 on n2 ended with exit code 1")
BAD = "worker 5 on n2 ended with exit code 1: RuntimeError: CUDA error"
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.1]:3"
LATE = Ended(1, "the launch did not end within 180 s")
LATE_TEXT = "n0: the task ended with exit code 1: the launch did not end within 180 s"
TOLD = "the agent on n1 received SIGTERM (15)"
REFUSED = Ended(2, said=(("HPC054", "no interface ib1", True),))
WARNED = Ended(2, said=(("HPC162", "trying again", False),), torch=Torch())
IMPORTS = "the import of torch did not finish"
SUM = "all_reduce of 8 B"


def reason(text, *blamed):
    return Ended(1, "HPC125", text, blamed)


def at(**steps):
    """Return the end by the limit of each task whose worker was at such a step."""
    return [replace(LATE, at={int(r[1:]): (n, SUM)}) for r, n in steps.items()]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], ("", ())),
        ([WELL] * 4, ("", ())),
        ([WELL, replace(WELL, said=REFUSED.said)], ("", ())),
        # A task was killed: whoever has told of it first, and whatever follows.
        ([FOLLOWS, KILLED, reason(BAD, "n2")], (f"n1: {OOM}", (1,))),
        # A worker has failed.
        ([reason(BAD, "n2"), FOLLOWS, FOLLOWS], (BAD, (2,))),
        ([FOLLOWS, reason(BAD, "n2"), FOLLOWS], (BAD, (2,))),
        ([reason(BAD), FOLLOWS], (BAD, ())),
        ([reason("gone", "n1", "n3"), FOLLOWS], ("gone", (1, 3))),
        # It has lost another one, or waits for it: nobody knows whose fault that is.
        ([reason(f"worker 0: {CLOSED}", "n0")], (f"worker 0: {CLOSED}", ())),
        # The launcher says why it refuses.
        ([WELL, REFUSED, KILLED, REFUSED], ("", (1, 3))),
        ([REFUSED] * 4, ("", ())),
        ([REFUSED] * 2, ("", (0, 1))),  # two have told nothing
        ([Ended(2, "bad")], ("n0: the task ended with exit code 2: bad", (0,))),
        ([replace(WELL, torch=Torch()), WARNED], ("n1: ended with exit code 2", ())),
        # A launcher that reports for itself; what it says before is no cause.
        ([reason(f"worker 0: {CLOSED}", "n0"),
          Ended(1, f"torchrun_hpc: error[HPC125]: the job has failed: {BAD}")],
         (f"n1: the task ended with exit code 1: {BAD}", (1,))),
        ([reason(f"worker 0: {CLOSED}", "n0"), Ended(1, "torchrun_hpc: note[HPC9]: x")],
         (f"worker 0: {CLOSED}", ())),
        # Those that the doctor has ended have not failed.
        ([Ended(-15, is_stopped=True), Ended(1, "ValueError: 17")],
         ("n1: the task ended with exit code 1: ValueError: 17", (1,))),
        # A worker, or a launcher, hangs in the import of torch.
        ([*at(r0=0, r1=0), replace(LATE, at={2: (-1, "the import")})],
         (f"rank 2 (n2) did not reach {SUM}", (2,))),
        ([replace(LATE, torch=Torch()), LATE, replace(LATE, torch=Torch())],
         ("n1 did not reach the meeting of the agents", (1,))),
        # The import of torch ends a launcher, or a worker, by itself.
        ([replace(LATE, torch=Torch()), Ended(3)],
         (f"n1: the task ended with exit code 3: {IMPORTS}", (1,))),
        ([Ended(-15, torch=Torch(), is_stopped=True), Ended(-4)],
         (f"n1: the task was killed by SIGILL (4): {IMPORTS}", (1,))),
        ({0: replace(LATE, at={0: (0, SUM)}), 3: Ended(3, at={3: (-1, "the import")})},
         (f"n1: the task ended with exit code 3: {IMPORTS}", (1,))),
        # A worker that ends later without a word is a consequence.
        ({n: Ended(n or 1, CLOSED * (not n), at={n: (0, SUM)}) for n in (0, 3)},
         (f"n0: the task ended with exit code 1: {CLOSED}", ())),
        # The limit: one is behind, most are, nobody is, nothing is known.
        (at(r0=5, r1=4, r2=5, r3=5), (f"rank 1 (n1) did not reach {SUM}", (1,))),
        (at(r0=5, r1=4, r2=3, r3=5), (f"rank 1-2 (n1, n2) did not reach {SUM}",
                                      (1, 2))),
        (at(r0=5, r1=4, r2=4, r3=4), (LATE_TEXT, ())),
        (at(r0=5, r1=5, r2=5, r3=5), (LATE_TEXT, ())),
        ([LATE] * 4, (LATE_TEXT, ())),
        # On one node it was a moment earlier: its agent has told the others.
        ([reason(TOLD, "n1"), LATE], (TOLD, ())),
        ([Ended(1, f"HPC125 {TOLD}"), LATE],
         (f"n0: the task ended with exit code 1: HPC125 {TOLD}", ())),
        # Direct mode: each task is a worker.
        ({2: Ended(1, "ValueError: bad batch 17"), 0: Ended(1, CLOSED)},
         ("n1: the task ended with exit code 1: ValueError: bad batch 17", (1,))),
        ({0: Ended(1, CLOSED), 2: Ended(1, "ValueError: bad batch 17")},
         ("n1: the task ended with exit code 1: ValueError: bad batch 17", (1,))),
        ({0: Ended(1, CLOSED), 2: Ended(1, CLOSED)},
         (f"n0: the task ended with exit code 1: {CLOSED}", ())),
        ({0: Ended(1, CLOSED), 5: KILLED}, (f"n2: {OOM}", (2,))),
        ({5: Ended(1, CLOSED, at={5: (3, SUM)}), 2: Ended(-15, at={2: (2, SUM)})},
         ("n1: the task was killed by SIGTERM (15)", (1,))),
    ],
)  # fmt: skip
def test_the_cause(ends, expected):
    nodes = WORKERS if isinstance(ends, dict) else NODES  # of a list: by its index
    ends = ends if isinstance(ends, dict) else dict(enumerate(ends))
    assert causes.cause(ends, nodes, HOSTS) == expected


def test_nodes_of_one_name():
    """As in a container: only nodes of this launch count."""
    ends = {0: reason(BAD, "c"), 1: FOLLOWS}
    assert causes.cause(ends, {0: 0, 1: 2}, ["c", "c", "c"]) == (BAD, (0, 2))
    found = causes.cause({2: KILLED}, {2: 2}, [""] * 3)
    assert found == (f"node 2: {OOM}", (2,))


TEXT = st.sampled_from(["", BAD, CLOSED, TOLD, "did not end within 9 s", "x"])
END = st.builds(
    Ended,
    code=st.sampled_from([-9, 0, 1, 2]),
    cause=TEXT,
    reason=TEXT,
    blamed=st.lists(st.sampled_from(HOSTS), unique=True).map(tuple),
    said=st.sampled_from([(), REFUSED.said, WARNED.said]),
    at=st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, 9), TEXT)),
)


@given(
    nodes=st.dictionaries(st.integers(0, 7), st.integers(0, 3), min_size=1),
    made=st.lists(END, min_size=8, max_size=8),
    order=st.permutations(range(8)),
)
def test_who_is_blamed(nodes, made, order):
    """Nodes of the launch; for a refusal never all, and the launcher says it."""
    ends = {task: made[task] for task in order if task in nodes}
    text, blamed = causes.cause(ends, nodes, HOSTS)
    assert [*blamed] == sorted({*blamed})
    assert {*blamed} <= {*nodes.values()}
    if any(map(causes.is_refused, ends.values())):
        assert (text, {*blamed} < {*nodes.values()}) == ("", True)
    elif all(end == WELL for end in ends.values()):
        assert (text, blamed) == ("", ())


def client_with(ask_all):
    """Return a client whose job goes on."""
    return SimpleNamespace(ask_all=ask_all, state=JobState())


def test_a_node_has_time_to_wait_for_the_other_one(monkeypatch):
    """Or it would be taken for one that hangs, with a short limit of the user's."""
    limits = []
    monkeypatch.setattr(
        conductor.waiting, "until", lambda *args: limits.append(args[1])
    )
    here = SimpleNamespace(task=Task(0, 2))
    zero = conductor.Conductor(here, Wishes(timeout=10), print)
    zero._first = {0: 0, 1: 1}
    zero._client = client_with(lambda _, wait, __: wait(dict) or {})
    assert [*zero._measured("0/0", [(0, 1)])] == []
    assert (
        limits[0] > link._PARTNER_TIMEOUT + link._OPEN_TIMEOUT + link._MESSAGE_TIMEOUT
    )
    assert zero._found.hung == dict.fromkeys((0, 1), "during the measurements")


@pytest.mark.parametrize(
    ("code", "asked", "limits"),
    [
        (1, ["launch", "stop"], [220, 20, 20]),
        (0, ["launch"], [220]),
        (None, ["launch", "stop"], [220, 20, 20]),  # its doctor has gone
    ],
)
def test_a_launch_that_fails_on_a_task_is_ended_elsewhere(
    monkeypatch, code, asked, limits
):
    """Here the other task replies nothing, as if its doctor had been killed."""
    seen, waited, found = [], [], {} if code is None else {0: Ended(code)}
    replies = {0: wire.encode(found.get(0))}

    def until(condition, limit, *_):
        waited.append(limit)
        return condition()

    def ask_all(what, wait, *_):
        seen.append(what)
        wait(lambda: replies if what == LAUNCH else {})
        return replies

    monkeypatch.setattr(conductor.waiting, "until", until)
    zero = conductor.Conductor(SimpleNamespace(task=Task(0, 2)), Wishes(), print)
    zero._client = client_with(ask_all)
    assert zero._ask(LAUNCH, None, [0, 1], "", Ended, 220) == found
    assert (seen, waited) == (asked, limits)


# --- what task 0 knows of a node ------------------------------------------------------

SLOW = make_interface("ib0", "10.20.0.1", mtu=9000, speed_mbit=1000)
NEXT = make_interface("eth0", "10.10.0.1", "fd00::1")


@pytest.mark.parametrize(
    ("changes", "speed", "sent", "moved"),
    [
        ({"interfaces": (SLOW, NEXT)}, 1.25e8, 0.15 * 1.25e8, 25 * 10**6 + 100 * 2**16),
        ({"interfaces": (replace(SLOW, speed_mbit=0),)}, float("inf"), MOST_BYTES,
         1700 * 2**16),
        ({"interface": ""}, float("inf"), MOST_BYTES, 1700 * 2**16),
        ({"interfaces": ()}, float("inf"), MOST_BYTES, 1700 * 2**16),
    ],
)  # fmt: skip
def test_how_much_is_sent(changes, speed, sent, moved):
    """Of 64, 16, 4 and 1 times 2**16 bytes: two times, and up to 20 times."""
    node, nodes = make_node(**changes), [make_node(1), make_node(**changes)]
    assert (conductor._speed(node), conductor._expected(node)) == (speed, sent)
    found = conductor._expected_of_collectives(2**22, nodes)
    assert found == 6 * (moved + 170 * 2**16)


@pytest.mark.parametrize(
    ("interfaces", "mtu"),
    [((SLOW, NEXT), 9000), ((replace(SLOW, name="ib1"), NEXT), 1500), ((), 1500)],
)
def test_what_the_others_know(interfaces, mtu):
    found = conductor._peer(make_node(interfaces=interfaces))
    assert found == Peer(0, "10.20.0.1", 40000, mtu)
