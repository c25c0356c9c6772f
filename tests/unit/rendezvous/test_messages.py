"""What the user reads about the rendezvous."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from tests.support.simulated_job import worker_failure
from torchrun_hpc import __version__, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import Meeting, Spares
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
    usual = Meeting(
        "c10d",
        nodes=3,
        node_rank=node_rank,
        report_rank=node_rank,
        endpoint="jwb0001i:25592",
        connect_host="10.20.0.1",
        hosts=HOSTS[:3],
        coordinator=0,
        launch_id="19.0",
    )
    return replace(usual, **changes)


def with_spares():
    return meeting(1, nodes=4, spares=Spares(1), hosts=HOSTS)


def words(news, here):
    """Return what a node writes; the coordinator's news have come over the network."""
    if isinstance(news, get_args(NewsOfCoordinator)):
        line = json.dumps(wire.encode(news, FROM_COORDINATOR))
        received = wire.decode(FROM_COORDINATOR, json.loads(line))
        assert received == news
        news = received
    message = news.words(here)
    return message and str(message)


# --- what happens meanwhile ---------------------------------------------------------

FOUND = "port 25592: nobody listens"
EVENTS = {
    "an agent that is refused": Stranger((1,), "process 7 on n10 instead of 5 on n10"),
    "an agent of no node that is refused": Stranger((), "--hpc-spares=1 instead of 0"),
    "waiting for nodes": Waiting((1, 2), 10, ()),
    "waiting for nodes, of a job with spares": Waiting((1,), 10, ()),
    "waiting for nodes, while others have tried": Waiting(
        (1,), 10, ("10.0.0.7", "10.0.0.8")
    ),
    "a peer without a proof": Unproved("10.0.0.7", "/home/me/key (0badcafe)"),
    "nodes at work": Finishing((1,), 40),
    "silence": Silent((1, 2), 30, 90),
    "one that answers again": Answering((1,)),
    "two that answer": Answering((1, 2)),
    "a lost agent": Lost(2),
    "a restart": Restart(1, worker_failure(5, code=3)),
    "sites that differ": Differ({"derecho": (0,), "": (1, 2)}),
    "sites that differ, and none on the head node": Differ(
        {"": (0,), "jsc": (1,), "x" * 99 + "\x1b[2J": (2,)}
    ),
    "threads that differ": Differ({"jsc": (0,), "jsc, OMP_NUM_THREADS=8": (1, 2)}),
}


def test_events(golden):
    """An event is written where it arrives: each node uses the same words."""
    texts = {}
    for case, news in EVENTS.items():
        spares = Spares(int(case.endswith("of a job with spares")))
        texts[case] = words(news, meeting(0, spares=spares))
        assert words(news, meeting(1, spares=spares)) == texts[case]
    golden(texts)


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


HINT = "srun --kill-on-bad-exit=1 ends all tasks when one fails"
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
            f"{FOUND}. Check that the job has started there. {HINT}",
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
    hints = meeting(1, hint=HINT, network_hint="Name the network")
    assert messages._search_problem(found, hints, is_reached=found == FOUND) == expected


OF_THE_HEAD_NODE = {
    "silence": CoordinatorSilent(30, 90),
    "an answer": CoordinatorAnswers(42),
    "the search": Looking(10, FOUND, is_reached=True),
}


@pytest.mark.parametrize(
    ("head", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
@pytest.mark.parametrize("case", OF_THE_HEAD_NODE)
def test_one_node_reports_what_the_coordinator_cannot(head, reporters, case):
    news = OF_THE_HEAD_NODE[case]
    written = [words(news, meeting(rank, coordinator=head)) for rank in range(3)]
    assert [rank for rank, text in enumerate(written) if text] == reporters


def test_words_about_the_head_node(golden):
    golden({case: words(news, meeting(1)) for case, news in OF_THE_HEAD_NODE.items()})


# --- which agents are refused -------------------------------------------------------

CODES = {
    Refused.VERSION: "HPC116",
    Refused.RUN_ID: "HPC117",
    Refused.STARTED: "HPC232",
    Refused.NODES: "HPC118",
    Refused.TAKEN: "HPC115",
    Refused.UNPROVED: "HPC119",
    Refused.SPARES: "HPC206",
}


def refused(reason, environ):
    """Return what an agent says that is refused."""
    here = meeting(1, spares=Spares(1), started="b.py [0badcafe]")
    known = RefusedError(reason, 25593), here, "mine"
    return messages.refusal(*known, environ, "/home/me/key (0badcafe)")


def test_refusals(golden):
    """Each has this node's value, and a remedy."""
    errors = {reason: refused(reason, {}) for reason in Refused}
    assert {reason: error.code for reason, error in errors.items()} == CODES
    assert all(error.others_know for error in errors.values())
    golden(
        {
            reason.name: str(error).replace(__version__, "VERSION")
            for reason, error in errors.items()
        }
    )


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

LOST = Failure(Kind.LOST, (1,))
WORKER = worker_failure(5, text="ValueError: bad")


def replaced(*who, number=1, because=None):
    return Replaced(who, number, because)


WITH_SPARES = {
    "a spare at the start": replaced((1, 1, 3), number=0),
    "a spare for a lost node": replaced((1, 1, 3), because=LOST),
    "two spares": replaced((0, 0, 3), (2, 1, 2), number=2, because=WORKER),
    "a spare for a cause that was reported before": replaced((1, 1, 3), number=3),
    "a node that looks for the others": Seeks(40, 860),
    "it looks for them, between two reports": Seeks(41, 859),
    "an excluded node": Excluded(2, "its disk is full"),
    "a node that is no longer excluded": Excluded(2, ""),
    "this node is excluded": Excluded(1, "its disk is full"),
    "this node is no longer excluded": Excluded(1, ""),
    "this node was suspended": Suspended(61),
    "a node is silent": Silent((2,), 30, 90),
    "this node takes over": TakesOver(0),
    "workers may still run": Leased((0, 2), 120),
    "the coordinator is silent": CoordinatorSilent(30, 90, 0),
    "it is silent, which another node reports": CoordinatorSilent(30, 90, 2),
}
UNREPORTED = {
    "it looks for them, between two reports",
    "it is silent, which another node reports",
}


def test_events_of_a_job_with_spares(golden):
    texts = {case: words(news, with_spares()) for case, news in WITH_SPARES.items()}
    assert {case for case, text in texts.items() if text is None} == UNREPORTED
    written = {case: text for case, text in texts.items() if text}
    assert all(WITH_SPARES[case].is_warning(with_spares()) for case in written)
    golden(written)


def test_nodes_that_the_next_job_had_better_do_without(golden):
    def said(ranks, exclude=""):
        known = replace(with_spares(), spares=Spares(1, 60, exclude=exclude))
        return str(messages.bad_nodes(ranks, known))

    golden(
        {
            "one node": said((1,), "--exclude="),
            "two nodes, and another scheduler": said((0, 3), "-x "),
            "a scheduler that cannot exclude them": said((1,)),
            "no option": str(messages.bad_nodes((1,), with_spares())),
        }
    )


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
