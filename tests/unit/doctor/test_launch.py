"""The launch of the collectives: its command, its results, and why it ended."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.doctor_reports import (
    make_collectives,
    make_torch,
    make_worker,
)
from tests.support.juelich import THREE, step, tasks_at
from tests.support.plans import explicit
from torchrun_hpc import wire
from torchrun_hpc.doctor import collectives, launch
from torchrun_hpc.doctor.launch import (
    SCRIPT,
    LaunchEnd,
    LaunchPart,
    LaunchProcess,
    cause_of,
)
from torchrun_hpc.doctor.place import Place
from torchrun_hpc.doctor.results import Finding, Torch
from torchrun_hpc.errors import Message, to_copy
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.schedulers.job import Job, Task

DIRECT = next(mode for mode in Mode if mode.is_direct)
OWN = ["--max-restarts=0", "--hpc-outcome=/dev/null"]
OF_TWO = ["--nnodes=2", "--hpc_spares=0"]
AT = Meeting("static", nodes=3, endpoint="10.20.0.1:29500")
WHOLE = LaunchPart(0, {0: 0, 1: 1, 2: 2}, THREE, "10.20.0.1")
TWO = LaunchPart(1, {0: 0, 2: 2}, ("jwb0001", "jwb0003"), "10.20.0.1")
SECOND = LaunchPart(1, {1: 1, 2: 2}, ("jwb0002", "jwb0003"), "fd00::2")
PORT = port_of("10.20.0.1:29500 1")


def place_of(mode=Mode.SEVERAL_NODES, job=None, rank=2, asked=None, **changes):
    """Return where the last of three nodes is."""
    task, options = Task(rank, 3), ("--nproc_per_node=2",)
    facts = Preflight(job, None, {}, "here", "COMMAND")
    here = Place(facts, mode, AT, AT, task, rank, options, read(asked or {}))
    return replace(here, **changes)


@pytest.mark.parametrize(
    ("mode", "job", "asked", "part", "words"),
    [
        (Mode.SEVERAL_NODES, step(2), {}, WHOLE, OWN),
        (Mode.SEVERAL_NODES, step(2), {}, TWO, [*OWN, *OF_TWO]),
        (Mode.SEVERAL_NODES, step(2), {"hpc_spares": 1}, WHOLE,
         [*OWN, "--nnodes=3", "--hpc_spares=0"]),
        (Mode.SEVERAL_NODES, step(2), {"rdzv_endpoint": "h:1", "node_rank": 2}, TWO,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=10.20.0.1:{PORT}", "--node_rank=1"]),
        (Mode.SEVERAL_NODES, step(2), {"no_python": True}, WHOLE,
         [*OWN, sys.executable]),
        (Mode.SEVERAL_NODES, step(2), {"run_path": True}, WHOLE,
         [*OWN, collectives.__file__]),
        (Mode.ONE_NODE, None, {}, WHOLE, OWN),
        (DIRECT, step(2), {}, WHOLE, []),  # it has no agent
        (DIRECT, step(2), {"no_python": True}, TWO, [sys.executable]),
        # As passed on each machine: another endpoint, and other ranks.
        (Mode.MANUAL, None, {"master_addr": "h"}, WHOLE, OWN),
        (Mode.MANUAL, None, {"master_addr": "h"}, TWO,
         [*OWN, *OF_TWO, "--master_addr=10.20.0.1", f"--master_port={PORT}",
          "--node_rank=1"]),
        (Mode.MANUAL, None, {"rdzv_endpoint": "h:1"}, TWO,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=10.20.0.1:{PORT}", "--node_rank=1"]),
        (Mode.MANUAL, None, {"rdzv_endpoint": "h:1"}, SECOND,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=[fd00::2]:{PORT}", "--node_rank=1"]),
    ],
)  # fmt: skip
def test_its_command_line(mode, job, asked, part, words):
    here = place_of(mode, job, asked=explicit(asked))
    found = launch._words(here, part)
    script = [] if "run_path" in asked else ["-m", SCRIPT]
    assert found == ["--nproc_per_node=2", *words, *script]


def passed_on(message, kind):
    """Return what the doctor learns from a message."""
    end = wire.encode(WELL)
    launch._pass_on(lambda *field: launch._join(end, dict([field])), message, kind)
    return wire.decode(LaunchEnd, json.loads(json.dumps(end)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("warning", [Finding("HPC061", "Start it: srun a", is_suspect=False)]),
        ("error", [Finding("HPC061", "Start it: srun a", is_suspect=True)]),
        ("note", []),
    ],
)
def test_a_message_of_the_launcher(kind, expected):
    """The line to copy is on the same line."""
    end = passed_on(Message("HPC061", f"Start it:{to_copy('srun a')}"), kind)
    assert end == replace(WELL, messages=tuple(expected))


def test_why_the_job_has_failed():
    """The lines of the worker stay on the node."""
    part = WorkerPart(0, 4, lines=("Traceback", "ValueError"))
    failure = Failure(Kind.WORKER, (1,), 1, "ValueError: \x1b[31m", worker=part)
    message = report.failed(failure, Meeting("c10d", nodes=2, hosts=("a", "b")))
    end = passed_on(message, "error")
    assert end.failure == replace(failure.brief, text="ValueError:  [31m")
    reason = "worker 0 on b (node 1) ended with exit code 1: ValueError:  [31m"
    assert (end.reason, end.messages) == (reason, ())


def test_its_job_is_this_one():
    """The process manager has been asked already; the launch reads it as JSON."""
    job = replace(step(2), pmi_is_open=True)
    found = launch._job_of(place_of(job=job), WHOLE)
    assert found == replace(job, pmi_is_open=False)
    assert wire.decode(Job, json.loads(json.dumps(wire.encode(found)))) == found
    assert launch._job_of(place_of(), WHOLE) is None
    assert launch._job_of(place_of(), TWO) is None


@pytest.mark.parametrize(
    ("places", "part", "rank", "expected"),
    [
        # An agent on each node.
        ([0, 1, 2], TWO, 0, (0, (0, 2, 0, 1))),
        ([0, 1, 2], TWO, 2, (1, (1, 2, 0, 1))),
        ([0, 1, 2], SECOND, 1, (0, (0, 2, 0, 1))),
        # Workers: their ranks among those of their node stay.
        ([0, 0, 1, 1, 2, 2], {0: 0, 1: 0, 4: 2, 5: 2}, 5, (1, (3, 4, 1, 2))),
        ([0, 1, 2, 0, 1, 2], {1: 1, 2: 2, 4: 1, 5: 2}, 4, (0, (2, 4, 1, 2))),
        # The first task of their node did not join.
        ([0, 0, 1, 1, 2, 2], {1: 0, 4: 2, 5: 2}, 1, (0, (0, 3, 0, 1))),
    ],
)  # fmt: skip
def test_the_job_of_a_part(places, part, rank, expected):
    if isinstance(part, dict):
        hosts = tuple(THREE[node] for node in sorted({*part.values()}))
        part = LaunchPart(1, part, hosts, "10.20.0.1")
    task = tasks_at(places)[rank]
    job = replace(
        step(places[rank], task=task), head_candidates=("jwb0001",), listed_at=0
    )
    here = place_of(job=job, rank=places[rank], task=task)
    found = launch._job_of(here, part)
    assert found is not None
    assert (found.launch_id, found.nodes) == ("19.0.1", part.hosts)
    assert (found.node_rank, found.task) == (expected[0], Task(*expected[1]))
    assert (found.head_candidates, found.is_ranked) == ((), True)
    assert found.own_name == THREE[places[rank]]


def test_what_the_workers_write():
    torch, worker = make_torch(), make_worker(1, node=-1)
    everyone, inside = make_collectives()[0], make_collectives("node 1")[0]
    end = wire.encode(WELL)
    for line in (
        {"imports": [wire.encode(torch)]},
        {"imports": [wire.encode(replace(torch, import_s=7.0))]},
        *({"at": [[rank, [0, "start"]]]} for rank in (0, 1)),
        {"at": [[1, [1, "all_reduce of 8 B"]]]},
        *({"rows": [wire.encode(row)]} for row in (everyone, inside)),
        {"workers": [wire.encode(worker)]},
        {"workers": [wire.encode(replace(worker, rank=0))]},
        {"backend": "gloo"},
        {"what others write": 1},
    ):
        launch._join(end, json.loads(json.dumps(line)))
    assert wire.decode(LaunchEnd, end) == LaunchEnd(
        0,
        imports=(torch, replace(torch, import_s=7.0)),
        at={0: (0, "start"), 1: (1, "all_reduce of 8 B")},
        rows=(everyone, inside),
        workers=(worker, replace(worker, rank=0)),
        backend="gloo",
    )


@pytest.mark.parametrize(
    ("mode", "nodes"), [(Mode.SEVERAL_NODES, (0, 2)), (Mode.MANUAL, ())]
)
def test_the_nodes_of_a_failure_are_those_of_the_job(mode, nodes):
    """By hand, torch numbers the nodes in any order."""
    made = object.__new__(LaunchProcess)
    made._place, made._part = place_of(mode), TWO
    end = made._with_ranks(failed("gone", 0, 1, 7, kind=Kind.LOST))
    assert end.failure is not None
    assert (end.failure.nodes, end.reason) == (nodes, "gone")
    assert made._with_ranks(WELL) == WELL


# --- why it ended ---------------------------------------------------------------------

HOSTS = ["n0", "n1", "n2", "n3"]
NODES = {task: task for task in range(4)}  # an agent on each
WORKERS = {task: task // 2 for task in range(8)}  # direct mode, two on each

IMPORTED = (Torch(),)
WELL = LaunchEnd(0)
KILLED = LaunchEnd(-9, "Killed")
OOM = "the task was killed by SIGKILL (9): probably out of memory: Killed"
FOLLOWS = LaunchEnd(1, imports=IMPORTED)  # another node reports why
BAD = "worker 5 on n2 ended with exit code 1: RuntimeError: CUDA error"
CLOSED = "RuntimeError: Connection closed by peer [10.0.0.1]:3"
LATE = LaunchEnd(1, "the launch did not end within 180 s", is_stopped=True)
LATE_TEXT = "n0: the launch did not end within 180 s"
TOLD = "the agent on n1 received SIGTERM (15)"
REFUSED = LaunchEnd(2, messages=(Finding("HPC054", "no ib1", is_suspect=True),))
AGAIN = Finding("HPC162", "trying again", is_suspect=False)
WARNED = LaunchEnd(2, messages=(AGAIN,), imports=IMPORTED)
IMPORTS = "the import of torch did not finish"
SUM = "all_reduce of 8 B"


def failed(reason, *nodes, kind=Kind.WORKER, code=1, text=""):
    part = WorkerPart(5, 8) if kind is Kind.WORKER else None
    failure = Failure(kind, nodes, code, text, worker=part)
    return LaunchEnd(1, failure=failure, reason=reason, imports=IMPORTED)


LOST_PEER = failed(f"worker 0: {CLOSED}", 0, text=CLOSED)


def at(**steps):
    """Return the end by the limit of each task whose worker was at such a step."""
    return [replace(LATE, at={int(r[1:]): (n, SUM)}) for r, n in steps.items()]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], ("", ())),
        ([WELL] * 4, ("", ())),
        ([WELL, replace(WELL, messages=REFUSED.messages)], ("", ())),
        # A task was killed: whoever has told of it first, and whatever follows.
        ([FOLLOWS, KILLED, failed(BAD, 2)], (f"n1: {OOM}", (1,))),
        # A worker has failed.
        ([failed(BAD, 2), FOLLOWS, FOLLOWS], (BAD, (2,))),
        ([FOLLOWS, failed(BAD, 2), FOLLOWS], (BAD, (2,))),
        ([failed(BAD), FOLLOWS], (BAD, ())),
        ([failed("gone", 1, 3, kind=Kind.LOST), FOLLOWS], ("gone", (1, 3))),
        # It has lost another one, or waits for it: nobody knows whose fault that is.
        ([LOST_PEER], (LOST_PEER.reason, ())),
        # The launcher says why it refuses.
        ([WELL, REFUSED, KILLED, REFUSED], ("", (1, 3))),
        ([REFUSED] * 4, ("", ())),
        ([REFUSED] * 2, ("", (0, 1))),  # two have told nothing
        ([LaunchEnd(2, "bad")], ("n0: the task ended with exit code 2: bad", (0,))),
        ([replace(WELL, imports=IMPORTED), WARNED],
         ("n1: ended with exit code 2", ())),
        ([failed(f"{BAD} (the cause may be another rank)", 2, code=-15)],
         (f"{BAD} (the cause may be another rank)", ())),
        # Nodes that never joined: their own steps show which.
        ([failed("1 node did not join", 1, kind=Kind.MISSING)],
         ("1 node did not join", ())),
        # A launcher that reports for itself; otherwise its end is a consequence.
        ([LOST_PEER, failed(BAD, 1)], (BAD, (1,))),
        ([LOST_PEER, FOLLOWS], (LOST_PEER.reason, ())),
        # Those that the doctor has ended have not failed.
        ([replace(failed(TOLD, 0, kind=Kind.SIGNAL, code=15), is_stopped=True),
          failed(BAD, 1)], (BAD, (1,))),
        ([LaunchEnd(-15, is_stopped=True), LaunchEnd(1, "ValueError: 17")],
         ("n1: the task ended with exit code 1: ValueError: 17", (1,))),
        # A worker, or a launcher, hangs in the import of torch.
        ([*at(r0=0, r1=0), replace(LATE, at={2: (-1, "the import")})],
         (f"rank 2 (n2) did not reach {SUM}", (2,))),
        ([replace(LATE, imports=IMPORTED), LATE, replace(LATE, imports=IMPORTED)],
         ("n1 did not reach the meeting of the agents", (1,))),
        # The import of torch ends a launcher, or a worker, by itself.
        ([replace(LATE, imports=IMPORTED), LaunchEnd(3)],
         (f"n1: the task ended with exit code 3: {IMPORTS}", (1,))),
        ([LaunchEnd(-15, imports=IMPORTED, is_stopped=True), LaunchEnd(-4)],
         (f"n1: the task was killed by SIGILL (4): {IMPORTS}", (1,))),
        ({0: replace(LATE, at={0: (0, SUM)}),
          3: LaunchEnd(3, at={3: (-1, "the import")})},
         (f"n1: the task ended with exit code 3: {IMPORTS}", (1,))),
        # A worker that ends later without a word is a consequence.
        ({n: LaunchEnd(n or 1, CLOSED * (not n), at={n: (0, SUM)}) for n in (0, 3)},
         (f"n0: the task ended with exit code 1: {CLOSED}", ())),
        # The limit: one is behind, most are, nobody is, nothing is known.
        (at(r0=5, r1=4, r2=5, r3=5), (f"rank 1 (n1) did not reach {SUM}", (1,))),
        (at(r0=5, r1=4, r2=3, r3=5), (f"rank 1-2 (n1, n2) did not reach {SUM}",
                                      (1, 2))),
        (at(r0=5, r1=4, r2=4, r3=4), (LATE_TEXT, ())),
        (at(r0=5, r1=5, r2=5, r3=5), (LATE_TEXT, ())),
        ([LATE] * 4, (LATE_TEXT, ())),
        # On one node it was a moment earlier: its agent has told the others.
        ([failed(TOLD, 1, kind=Kind.SIGNAL, code=15), replace(LATE, imports=IMPORTED)],
         (TOLD, ())),
        ([failed(TOLD, 1, kind=Kind.SIGNAL, code=2), LATE], (TOLD, (1,))),
        # Direct mode: each task is a worker.
        ({2: LaunchEnd(1, "ValueError: bad batch 17"), 0: LaunchEnd(1, CLOSED)},
         ("n1: the task ended with exit code 1: ValueError: bad batch 17", (1,))),
        ({0: LaunchEnd(1, CLOSED), 2: LaunchEnd(1, "ValueError: bad batch 17")},
         ("n1: the task ended with exit code 1: ValueError: bad batch 17", (1,))),
        ({0: LaunchEnd(1, CLOSED), 2: LaunchEnd(1, CLOSED)},
         (f"n0: the task ended with exit code 1: {CLOSED}", ())),
        ({0: LaunchEnd(1, CLOSED), 5: KILLED}, (f"n2: {OOM}", (2,))),
        ({5: LaunchEnd(1, CLOSED, at={5: (3, SUM)}),
          2: LaunchEnd(-15, at={2: (2, SUM)})},
         ("n1: the task was killed by SIGTERM (15)", (1,))),
    ],
)  # fmt: skip
def test_the_cause(ends, expected):
    nodes = WORKERS if isinstance(ends, dict) else NODES  # of a list: by its index
    ends = ends if isinstance(ends, dict) else dict(enumerate(ends))
    assert cause_of(ends, nodes, HOSTS) == expected


def test_nodes_without_a_name():
    found = cause_of({2: KILLED}, {2: 2}, [""] * 3)
    assert found == (f"node 2: {OOM}", (2,))


TEXT = st.sampled_from(["", BAD, CLOSED, TOLD, "x"])
FAILURE = st.builds(
    failed,
    TEXT,
    kind=st.sampled_from(Kind),
    code=st.sampled_from([1, 15]),
    text=TEXT,
).map(lambda end: end.failure)
END = st.builds(
    LaunchEnd,
    code=st.sampled_from([-9, 0, 1, 2]),
    cause=TEXT,
    failure=st.none() | FAILURE,
    reason=TEXT,
    messages=st.sampled_from([(), REFUSED.messages, WARNED.messages]),
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
    text, blamed = cause_of(ends, nodes, HOSTS)
    assert [*blamed] == sorted({*blamed})
    assert {*blamed} <= {*nodes.values()}
    if any(end.is_refusal for end in ends.values()):
        assert (text, {*blamed} < {*nodes.values()}) == ("", True)
    elif all(end == WELL for end in ends.values()):
        assert (text, blamed) == ("", ())
