"""What the user reads about the rendezvous."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from tests.support.plans import make_launch_plan
from tests.support.simulated_job import worker_failure
from torchrun_hpc import __version__, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.errors import Refused, RefusedError
from torchrun_hpc.rendezvous.messages import (
    Answering,
    CoordinatorAnswers,
    CoordinatorSilent,
    Differ,
    Excluded,
    Finishing,
    Leased,
    Looking,
    Lost,
    NewsOfCoordinator,
    Replaced,
    Restart,
    Seeks,
    Silent,
    Stranger,
    Suspended,
    TakesOver,
    Unproved,
    Waiting,
)
from torchrun_hpc.rendezvous.protocol import FROM_COORDINATOR
from torchrun_hpc.wire import WireError

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


def meeting(node_rank=0, **changes):
    values = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": node_rank,
        "workers": 4,
        "report_rank": node_rank,
        "endpoint": "jwb0001i:25592",
        "connect_host": "10.20.0.1",
        "hosts": HOSTS[:3],
        "coordinator": 0,
        "launch_id": "19.0",
    }
    return make_launch_plan(**values | changes).meeting


def with_spares(node_rank=1, **changes):
    return meeting(node_rank, **{"nodes": 4, "spares": 1, "hosts": HOSTS} | changes)


def words(news, here):
    """Return what a node writes; the coordinator's news have come over the network."""
    if isinstance(news, get_args(NewsOfCoordinator)):
        line = json.dumps(wire.encode(news, FROM_COORDINATOR))
        received = wire.decode(FROM_COORDINATOR, json.loads(line))
        assert received == news
        news = received
    message = news.words(here)
    return message and str(message)


N0, N1, N2, N3 = (f"{host} (node {node})" for node, host in enumerate(HOSTS))

# --- what happens meanwhile ---------------------------------------------------------

FOUND = "port 25592: nobody listens"
STARTED = f"{FOUND}. Check that the job has started there"
REMEDY = (
    "Pass --hpc-site=NAME, or set each variable on all nodes or on none (mpirun: with "
    "or without -x NAME)"
)
EVENTS = {
    "an agent that is refused": (
        Stranger((1,), "process 7 on n10 instead of process 5 on n10"),
        (
            f"HPC229 refused an agent that claims to be {N1}: process 7 on "
            "n10 instead of process 5 on n10. This job continues"
        ),
    ),
    "an agent of no node that is refused": (
        Stranger((), "--hpc-spares=1 instead of 0"),
        (
            "HPC229 refused an unknown agent: --hpc-spares=1 "
            "instead of 0. This job continues"
        ),
    ),
    "waiting for nodes": (
        Waiting((1, 2), 10, ()),
        f"HPC114 1 of 3 nodes have joined after 10 s. Waiting for {N1}, {N2}",
    ),
    "waiting for nodes, of a job with spares": (
        Waiting((1,), 10, ()),
        f"HPC114 1 of 2 nodes have joined after 10 s. Waiting for {N1}",
    ),
    "waiting for nodes, while others have tried": (
        Waiting((1,), 10, ("10.0.0.7", "10.0.0.8")),
        (
            f"HPC114 2 of 3 nodes have joined after 10 s. Waiting for {N1}. Ignored "
            "callers without a proof: 10.0.0.7, 10.0.0.8"
        ),
    ),
    "somebody without a proof": (
        Unproved("10.0.0.7", "/home/me/key (0badcafe)"),
        (
            "HPC237 ignored 10.0.0.7, which does not prove that it belongs to this "
            "job. It belongs to another user or job, has another key, or runs an older "
            "torchrun_hpc. Key here: /home/me/key (0badcafe)"
        ),
    ),
    "nodes at work": (
        Finishing((1,), 40),
        (
            "HPC120 2 of 3 nodes have finished, the last one 40 s ago. "
            f"Still running: {N1}"
        ),
    ),
    "silence": (
        Silent((1, 2), 30, 90),
        (
            f"HPC121 no answer from {N1}, {N2} for 30 s. The job ends in 90 s if this "
            "continues"
        ),
    ),
    "one that answers again": (Answering((1,)), f"HPC160 {N1} answers again"),
    "two that answer": (Answering((1, 2)), f"HPC160 {N1}, {N2} answer again"),
    "an agent that is gone": (
        Lost(2),
        f"HPC123 the agent on {N2} is gone. Waiting until it is started again",
    ),
    "a restart": (
        Restart(1, worker_failure(5, code=3)),
        f"HPC128 restart 1 of all workers: worker 5 on {N1} ended with exit code 3",
    ),
    "sites that differ": (
        Differ({"derecho": (0,), "": (1, 2)}),
        (
            f"HPC163 the nodes have different values: derecho on {N0}; none on {N1}, "
            f"{N2}. {REMEDY}"
        ),
    ),
    "sites that differ, and none on the first node": (
        Differ({"": (0,), "jsc": (1,), "x" * 99 + "\x1b[2J": (2,)}),
        (
            f"HPC163 the nodes have different values: none on {N0}; jsc on {N1}; "
            f"{'x' * 50} on {N2}. {REMEDY}"
        ),
    ),
    "threads that differ": (
        Differ({"jsc": (0,), "jsc, OMP_NUM_THREADS=8": (1, 2)}),
        (
            f"HPC163 the nodes have different values: jsc on {N0}; jsc, "
            f"OMP_NUM_THREADS=8 on {N1}, {N2}. {REMEDY}"
        ),
    ),
}


@pytest.mark.parametrize("case", EVENTS)
@pytest.mark.parametrize("node_rank", [0, 1])
def test_an_event_is_written_where_it_arrives(case, node_rank):
    news, expected = EVENTS[case]
    spares = int(case.endswith("of a job with spares"))
    assert words(news, meeting(node_rank, spares=spares)) == expected


@pytest.mark.parametrize("message", [{}, {"weather": "fine", "seconds": 10}])
def test_an_event_of_another_version_is_refused(message):
    with pytest.raises(WireError):
        wire.decode(FROM_COORDINATOR, message)


@pytest.mark.parametrize(
    ("node_rank", "seconds"),
    [(1, [10, 40, 70, 100]), (2, [60, 90]), (0, [60, 90])],
)
def test_looking_for_the_head_node_is_reported_soon_by_one_node(node_rank, seconds):
    written = {
        second: words(Looking(second, FOUND, is_reached=True), meeting(node_rank))
        for second in range(1, 101)
    }
    assert [second for second, message in written.items() if message] == seconds
    assert written[90 if node_rank != 1 else 100] == (
        "HPC113 still waiting for the head node at jwb0001i:25592 (10.20.0.1) after "
        f"{90 if node_rank != 1 else 100} s: {STARTED}"
    )


KILL = "srun --kill-on-bad-exit=1"
SILENT = "port 25592: no answer to the connection"
DOWN = "interface ib0, which has 10.20.0.2, is down"
CLOSED = "tried from eth0 (10.10.0.2); up here, too: ib0"


@pytest.mark.parametrize(
    ("found", "problem", "expected"),
    [
        ("", "", "no answer yet. Name the network"),
        (
            FOUND,
            CLOSED,
            f"{STARTED}. {KILL} ends all tasks when one fails",
        ),
        (SILENT, "", f"{SILENT}. Name the network"),
        (SILENT, CLOSED, f"{SILENT}; {CLOSED}. Name the network"),
        (SILENT, DOWN, DOWN),
        ("", DOWN, DOWN),
    ],
)
def test_the_cause_is_named(monkeypatch, found, problem, expected):
    monkeypatch.setattr(
        messages, "path_problem", lambda *_where: (problem, problem == DOWN)
    )
    hint = f"{KILL} ends all tasks when one fails"
    hints = meeting(1, hint=hint, network_hint="Name the network")
    assert messages._search_problem(found, hints, is_reached=found == FOUND) == expected


@pytest.mark.parametrize(
    ("head", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
@pytest.mark.parametrize(
    ("news", "text"),
    [
        (
            CoordinatorSilent(30, 90),
            (
                "HPC121 no answer from the head node at jwb0001i:25592 for 30 s. The "
                "job ends in 90 s if this continues"
            ),
        ),
        (
            CoordinatorAnswers(42),
            "HPC160 the head node at jwb0001i:25592 answers again after 42 s",
        ),
        (
            Looking(10, FOUND, is_reached=True),
            (
                "HPC113 still waiting for the head node at jwb0001i:25592 (10.20.0.1) "
                f"after 10 s: {STARTED}"
            ),
        ),
    ],
)
def test_one_node_reports_what_the_coordinator_cannot(head, reporters, news, text):
    written = [words(news, meeting(rank, coordinator=head)) for rank in range(3)]
    assert written == [text if rank in reporters else None for rank in range(3)]


# --- which agents are refused -------------------------------------------------------

HEAD_NODE = "the head node at 10.20.0.1:25593"

# Code, own value, and remedy.
REFUSED = {
    Refused.VERSION: ("HPC116", f"torchrun_hpc {__version__}", "Load the same env"),
    Refused.RUN_ID: ("HPC117", "--rdzv_id=mine", "Leave it out if each node"),
    Refused.STARTED: ("HPC232", "b.py [0badcafe]", "Give each launch its own port"),
    Refused.NODES: ("HPC118", "3 nodes", "Start one job step"),
    Refused.TAKEN: ("HPC115", "node 1", "Start torchrun_hpc once on each node"),
    Refused.UNPROVED: ("HPC119", "/home/me/key (0badcafe)", "Pass the same --hpc-key"),
    Refused.SPARES: ("HPC206", "--hpc-spares=1", "Start one job step"),
}


def refused(reason, environ):
    """Return what an agent says that is refused."""
    here = meeting(1, spares=1, started="b.py [0badcafe]")
    known = RefusedError(reason, 25593), here, "mine"
    return messages.refusal(*known, environ, "/home/me/key (0badcafe)")


@pytest.mark.parametrize("reason", Refused)
def test_why_an_agent_is_refused(reason):
    error = refused(reason, {})
    code, own, remedy = REFUSED[reason]
    assert error.code == code
    assert HEAD_NODE in str(error)
    assert own in str(error)
    assert f". {remedy}" in str(error)
    assert error.others_know


# Of which launch a worker's variables are, and for which reasons its agent is refused
# when it launches once more. A coordinator does not say its own id.
INSIDE = {
    "the same id": ({"TORCHELASTIC_RUN_ID": "mine", "RANK": "5"}, {Refused.TAKEN}),
    "another id": ({"TORCHELASTIC_RUN_ID": "outer", "RANK": "5"}, {Refused.RUN_ID}),
    "no worker": ({"TORCHELASTIC_RUN_ID": "outer"}, set()),
    "no worker of an agent": ({"RANK": "5"}, set()),
    "neither": ({}, set()),
}


@pytest.mark.parametrize("case", INSIDE)
def test_an_agent_that_was_started_inside_a_worker(case):
    environ, expected = INSIDE[case]
    inside = {each for each in Refused if refused(each, environ).code == "HPC164"}
    assert inside == expected


# --- spares ------------------------------------------------------------------------

NEXT = "Exclude them from the next job:"
LOST = Failure(Kind.LOST, (1,))
WORKER = worker_failure(5, text="ValueError: bad")


def replaced(*who, number=1, because=None):
    return Replaced(who, number, because)


WITH_SPARES = {
    "a spare at the start": (
        replaced((1, 1, 3), number=0),
        f"HPC207 {N3} replaces {N1} as node rank 1",
    ),
    "a spare for a node that is lost": (
        replaced((1, 1, 3), because=LOST),
        (
            f"HPC207 restart 1 of all workers: the agent on {N1} is gone without a "
            "message: it was killed, or the node is lost. "
            f"{N3} replaces {N1} as node rank 1"
        ),
    ),
    "two spares": (
        replaced((0, 0, 3), (2, 1, 2), number=2, because=WORKER),
        (
            f"HPC207 restart 2 of all workers: worker 5 on {N1} ended with exit code "
            f"1: ValueError: bad. {N3} replaces {N0} as node rank 0; "
            f"{N2} replaces {N1} as node rank 2"
        ),
    ),
    "a spare for a cause that was reported before": (
        replaced((1, 1, 3), number=3),
        (f"HPC207 restart 3 of all workers: {N3} replaces {N1} as node rank 1"),
    ),
    "a node that looks for the others": (
        Seeks(40, 860),
        (
            "HPC218 jwb0002 has looked for the coordinator for 40 s. It gives up in "
            "860 s"
        ),
    ),
    "it looks for them, between two reports": (Seeks(41, 859), None),
    "an excluded node": (
        Excluded(2, "its disk is full"),
        f"HPC208 {N2} is excluded from this job: its disk is full",
    ),
    "a node that is no longer excluded": (
        Excluded(2, ""),
        (
            f"HPC208 {N2} is a spare again, because the script also failed on another "
            "node"
        ),
    ),
    "this node is excluded": (
        Excluded(1, "its disk is full"),
        f"HPC208 {N1} is excluded from this job: its disk is full",
    ),
    "this node is no longer excluded": (
        Excluded(1, ""),
        (
            f"HPC208 {N1} is a spare again, because the script also failed on another "
            "node"
        ),
    ),
    "this node was suspended": (
        Suspended(61),
        (
            "HPC210 jwb0002 was suspended for up to 61 s. Its workers are killed, "
            "because another node may have replaced it"
        ),
    ),
    "a node is silent": (
        Silent((2,), 30, 90),
        (
            f"HPC121 no answer from {N2} for 30 s. It counts as lost in 90 s if this "
            "continues"
        ),
    ),
    "this node takes over": (
        TakesOver(0),
        (
            f"HPC212 jwb0002 cannot reach the coordinator on {N0}, and takes over "
            "if enough nodes follow"
        ),
    ),
    "workers may still run": (
        Leased((0, 2), 120),
        (
            f"HPC214 workers of an earlier round may still run on {N0}, {N2}. The "
            "next round waits for them, for up to 120 s"
        ),
    ),
    "the coordinator is silent": (
        CoordinatorSilent(30, 90, 0),
        (
            "HPC121 no answer from the coordinator on jwb0001 (node 0) for 30 s. "
            "Another node takes over in 90 s if this continues"
        ),
    ),
    "it is silent, which another node reports": (
        CoordinatorSilent(30, 90, 2),
        None,
    ),
}


@pytest.mark.parametrize("case", WITH_SPARES)
def test_an_event_of_a_job_with_spares(case):
    news, expected = WITH_SPARES[case]
    assert words(news, with_spares()) == expected
    assert expected is None or news.is_warning(with_spares())


@pytest.mark.parametrize(
    ("ranks", "exclude", "expected"),
    [
        ((1,), "--exclude=", f"{N1}. {NEXT} --exclude=jwb0002"),
        ((0, 3), "-x ", f"{N0}, {N3}. {NEXT} -x jwb0001,jwb0004"),
        ((1,), "", N1),
    ],
)
def test_nodes_that_the_next_job_had_better_do_without(ranks, exclude, expected):
    known = replace(with_spares(), spares=Spares(1, 60, exclude=exclude))
    message = messages.bad_nodes(ranks, known)
    assert str(message) == f"HPC213 lost or excluded nodes: {expected}"


def test_nodes_where_the_scheduler_cannot_exclude_them():
    message = messages.bad_nodes((1,), with_spares())
    assert str(message) == f"HPC213 lost or excluded nodes: {N1}"


@pytest.mark.parametrize(
    ("news", "is_warning"),
    [
        (Silent((2,), 30, 90), True),
        (CoordinatorSilent(30, 90), True),
        (Waiting((2,), 10, ()), False),
        (Lost(2), False),
    ],
)
def test_what_is_no_warning_without_spares(news, is_warning):
    assert not news.is_warning(meeting())
    assert news.is_warning(with_spares()) is is_warning
