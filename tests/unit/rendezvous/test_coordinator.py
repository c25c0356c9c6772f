from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchrun_hpc import __version__
from torchrun_hpc.rendezvous import coordinator, protocol
from torchrun_hpc.rendezvous.coordinator import CLOSE, Coordinator, Settings
from torchrun_hpc.rendezvous.protocol import Failure, JoinRequest, Kind, ProtocolError

TERMS = Settings(
    job="19.0",
    run_id="mine",
    nodes=3,
    head=0,
    max_restarts=0,
    join_timeout=900,
    silence_timeout=120,
)
STORE = ["10.20.0.1", 40000]


def hello(rank, **changes):
    said = JoinRequest("19.0", "mine", 3, rank, f"n{rank}", 100 + rank, __version__)
    return {"hello": protocol.VERSION, **asdict(said), **changes}


def to(connections, *messages):
    """Return what is sent where the same is sent to all of these."""
    return {connection: list(messages) for connection in connections}


def failure(kind=Kind.WORKER, node=1, **values):
    return Failure(kind, (node,), **values)


DIED = failure(rank=5, code=-9)


class Table:
    """A meeting, and what each connection has heard of it.

    A connection is the rank of its agent, unless a test says otherwise.
    """

    def __init__(self, **terms):
        self.meeting = Coordinator(replace(TERMS, **terms))
        self.nodes = self.meeting.terms.nodes
        self.news = []

    def heard(self):
        """Return what was sent since the last time: connection to messages.

        But for the news of a restart, which has a test of its own.
        """
        sent = defaultdict(list)
        for connection, message in self.meeting.outbox:
            if "restart" in message:
                self.news.append((connection, message))
                continue
            sent[connection].append("close" if message is CLOSE else message)
        self.meeting.outbox.clear()
        return dict(sent)

    def say(self, connection, **message):
        self.meeting.receive(connection, message)
        return self.heard()

    def greet(self, connection, **changes):
        return self.say(connection, **hello(connection, nodes=self.nodes) | changes)

    def lose(self, connection):
        self.meeting.lost(connection)
        return self.heard()

    def wait(self, seconds, *answering):
        """Let time pass; return the messages by second, without beats.

        Args:
            seconds: How long.
            answering: The connections that answer a beat.
        """
        told = {}
        for second in range(1, seconds + 1):
            self.meeting.tick()
            for connection, messages in self.heard().items():
                for message in messages:
                    if message != {"beat": True}:
                        told.setdefault(second, []).append((connection, message))
                    elif connection in answering:
                        self.meeting.receive(connection, {"beat": True})
        return told

    def join(self, *ranks, number=None):
        wanted = self.meeting.round if number is None else number
        for rank in ranks:
            self.say(rank, join=wanted, **({"store": STORE} if rank == 0 else {}))

    def all_there(self):
        for rank in range(self.nodes):
            self.greet(rank)

    def all_at_work(self):
        self.all_there()
        self.join(*range(self.nodes))
        assert self.meeting.running
        self.heard()

    def failed(self, value):
        """Return what all hear of a failure."""
        return to(range(self.nodes), {"failed": protocol.packed(value)})


# --- a job that goes well -----------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end():
    table = Table()
    welcome = {"welcome": 1, "job": "19.0", "round": 0}
    for rank in (2, 0, 1):
        assert table.greet(rank) == {rank: [welcome]}
    assert table.say(1, join=0) == {}
    assert table.say(0, join=0, store=STORE) == {}
    go = {"go": 0, "store": STORE}
    assert table.say(2, join=0) == to(range(3), go)
    assert table.say(2, done=0) == {}
    assert table.say(0, done=0) == {}
    assert not table.meeting.finished
    assert table.say(1, done=0) == to(range(3), {"finished": 0})
    assert table.meeting.finished
    for rank in range(3):
        assert not table.meeting.all_know
        assert table.say(rank, bye=True) == {rank: ["close"]}
    assert table.meeting.all_know
    assert table.meeting.failure is None


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        (("", "", ""), None),
        (("jsc", "jsc", "jsc"), None),
        (("derecho", "", ""), {"derecho": [0], "": [1, 2]}),
        (("", "derecho", ""), {"": [0, 2], "derecho": [1]}),
        (("a", "b", "c"), {"a": [0], "b": [1], "c": [2]}),
    ],
)
def test_nodes_that_use_different_sites_are_named_once(sites, told):
    table = Table(max_restarts=1)
    for rank in (2, 1, 0):
        table.greet(rank, site=sites[rank])
    table.join(0, 1)
    heard = table.say(2, join=0)
    go = {"go": 0, "store": STORE}
    expected = to(range(3), go)
    assert heard == (
        expected if told is None else expected | {0: [{"sites": told}, go]}
    )
    table.say(1, died=protocol.packed(DIED), round=0)
    table.join(0, 1)
    assert table.say(2, join=1) == to(range(3), {"go": 1, "store": STORE})


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_it_starts_with_the_last_one(order):
    table = Table()
    table.all_there()
    for rank in order[:-1]:
        table.join(rank)
        assert not table.meeting.running
    table.join(order[-1])
    assert table.meeting.running


def test_joining_twice_counts_once():
    table = Table()
    table.all_there()
    table.join(0, 0, 1, 1)
    assert not table.meeting.running


def test_where_the_workers_meet_is_node_0s_to_say():
    table = Table()
    table.all_there()
    table.say(0, join=0, store=STORE)
    table.say(1, join=0, store=["10.9.9.9", 1])
    heard = table.say(2, join=0, store=["10.9.9.9", 1])
    assert heard[1] == [{"go": 0, "store": STORE}]


def test_one_node_is_a_job_too():
    table = Table(nodes=1)
    table.greet(0)
    assert table.say(0, join=0, store=STORE) == {0: [{"go": 0, "store": STORE}]}
    assert table.say(0, done=0) == {0: [{"finished": 0}]}


def test_what_is_said_of_another_round_is_not_meant_for_this_one():
    table = Table(max_restarts=2)
    table.all_at_work()
    table.say(1, died=protocol.packed(DIED), round=0)
    table.join(0, 1, 2)
    table.heard()
    for message in ({"done": 0}, {"done": 2}, {"died": None, "round": 0}):
        assert table.say(2, **message) == {}
    assert table.meeting.round == 1
    assert table.meeting.running


@pytest.mark.parametrize("wanted", [1, 2, -1, None, "0", [], 0.5])
def test_nobody_joins_another_round_than_the_next(wanted):
    table = Table(max_restarts=9)
    table.all_there()
    with pytest.raises(ProtocolError):
        table.say(1, join=wanted)


# --- restarts -----------------------------------------------------------------------


def test_a_worker_that_dies_is_a_restart_for_all():
    table = Table(max_restarts=1)
    table.all_at_work()
    heard = table.say(1, died=protocol.packed(DIED), round=0)
    assert heard == to(range(3), {"over": 0})
    assert not table.meeting.running
    # The others' workers end because of it.
    assert table.say(2, died=protocol.packed(failure(node=2)), round=0) == {}
    table.join(0, 1)
    heard = table.say(2, join=1)
    assert heard == to(range(3), {"go": 1, "store": STORE})


def test_an_agent_that_says_by_joining_that_it_restarts():
    """Where torch's agent saw it first."""
    table = Table(max_restarts=1)
    table.all_at_work()
    assert table.say(1, join=1) == to(range(3), {"over": 0})
    table.join(0)
    assert table.say(2, join=1)[1] == [{"go": 1, "store": STORE}]


def test_an_agent_that_wants_one_restart_too_many():
    table = Table()
    table.all_at_work()
    table.say(1, join=1)
    assert table.meeting.failure == failure(
        Kind.AGENT, text="it wanted another restart"
    )


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_restarts_are_counted_for_the_job(max_restarts):
    """Not for each node: another one's workers die each time."""
    table = Table(max_restarts=max_restarts)
    table.all_at_work()
    for number in range(max_restarts):
        died = failure(node=number % 3, code=1)
        table.say(number % 3, died=protocol.packed(died), round=number)
        assert table.meeting.round == number + 1
        table.join(0, 1, 2)
        table.heard()
    heard = table.say(1, died=protocol.packed(DIED), round=max_restarts)
    assert heard == table.failed(DIED)
    assert table.meeting.failure == DIED


def test_the_store_is_empty_after_a_restart():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say(1, ask=1, set={"torchelastic/role_info/1": "old"})
    table.say(1, died=protocol.packed(DIED), round=0)
    table.join(0, 1, 2)
    table.heard()
    heard = table.say(0, ask=7, check=["torchelastic/role_info/1"])
    assert heard == {0: [{"answer": 7, "value": False}]}


def test_no_restart_after_others_have_finished():
    """They would never come."""
    table = Table(max_restarts=3)
    table.all_at_work()
    table.say(0, done=0)
    table.say(2, done=0)
    heard = table.say(1, died=protocol.packed(DIED), round=0)
    assert heard == table.failed(replace(DIED, finished=2))


def test_no_restart_if_one_finished_before_it_heard_of_it():
    """The end of its workers and the restart have crossed each other."""
    table = Table(max_restarts=3)
    table.all_at_work()
    table.say(1, died=protocol.packed(DIED), round=0)
    table.join(1)
    assert table.say(2, done=0) == table.failed(replace(DIED, finished=1))
    assert not table.meeting.finished


@pytest.mark.parametrize("done", [-1, 1, None, "0"])
def test_no_end_of_a_round_that_does_not_run(done):
    table = Table(max_restarts=3)
    table.all_there()
    assert table.say(2, done=done) == {}
    table.join(0, 1, 2)
    table.heard()
    assert table.say(2, done=done) == {}
    assert table.meeting.running


# --- agents that are gone -----------------------------------------------------------


def test_the_user_hears_of_a_restart_and_why():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say(1, died=protocol.packed(DIED), round=0)
    assert table.news == [(0, {"restart": 1, "because": protocol.packed(DIED)})]


def test_an_agent_is_lost_for_good():
    table = Table()
    table.all_at_work()
    heard = table.lose(2)
    expected = table.failed(Failure(Kind.LOST, (2,)))
    assert heard == {rank: expected[rank] for rank in (0, 1)} | {2: ["close"]}


def test_an_agent_is_lost_and_started_again():
    table = Table(max_restarts=1)
    table.all_at_work()
    heard = table.lose(2)
    assert heard == {
        0: [{"over": 0}, {"lost": 2}],
        1: [{"over": 0}],
        2: ["close"],
    }
    table.join(0, 1)
    assert table.say("again", **hello(2, pid=999)) == {
        "again": [{"welcome": 1, "job": "19.0", "round": 1}]
    }
    heard = table.say("again", join=1)
    assert heard == to((0, 1, "again"), {"go": 1, "store": STORE})


def test_an_agent_is_lost_while_others_are_waited_for():
    """That is no restart: no worker runs yet."""
    table = Table(max_restarts=1)
    table.all_there()
    table.join(0, 2)
    assert table.lose(2) == {0: [{"lost": 2}], 2: ["close"]}
    table.say("again", **hello(2, pid=999))
    assert (table.meeting.round, table.meeting.failure) == (0, None)
    table.join(1)
    assert not table.meeting.running
    table.say("again", join=0)
    assert table.meeting.running


def test_an_agent_is_lost_while_others_are_waited_for_and_none_is_left():
    table = Table()
    table.all_there()
    table.join(0, 2)
    heard = table.lose(2)
    assert heard[0] == table.failed(Failure(Kind.LOST, (2,)))[0]
    assert table.meeting.failure == Failure(Kind.LOST, (2,))


def test_an_agent_that_has_only_looked_may_go():
    """A dry run does: it joins nothing."""
    table = Table()
    table.all_there()
    assert table.lose(2) == {2: ["close"]}
    assert table.meeting.failure is None
    assert table.greet(2) == {2: [{"welcome": 1, "job": "19.0", "round": 0}]}


def test_an_agent_that_leaves_as_it_should_is_no_loss():
    table = Table()
    table.all_at_work()
    assert table.say(2, bye=True) == {2: ["close"]}
    assert table.lose(2) == {}
    assert table.meeting.failure is None


def test_an_agent_that_has_finished_is_no_loss():
    table = Table()
    table.all_at_work()
    table.say(2, done=0)
    assert table.lose(2) == {2: ["close"]}
    table.say(0, done=0)
    table.say(1, done=0)
    assert table.meeting.finished


def test_an_agent_that_is_started_again_after_it_has_finished():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say(2, done=0)
    table.lose(2)
    heard = table.say("again", **hello(2, pid=999))
    assert (
        protocol.packed(Failure(Kind.LOST, (2,), finished=1))
        == (heard["again"][0]["failed"])
    )
    assert table.meeting.failure is not None


def test_the_last_agents_of_a_job_that_has_finished():
    table = Table(max_restarts=1)
    table.all_at_work()
    for rank in range(3):
        table.say(rank, done=0)
    assert table.lose(2) == {2: ["close"]}
    table.heard()
    assert table.say(1, failed=protocol.packed(DIED)) == {}
    assert table.say(1, join=1) == {}
    assert table.meeting.failure is None


def test_who_speaks_where_node_0_is_gone():
    for head, expected in ((0, None), (1, 1), (2, 2)):
        table = Table(max_restarts=1, head=head)
        table.all_at_work()
        heard = table.lose(0)
        tellers = [c for c, sent in heard.items() if {"lost": 0} in sent]
        assert tellers == ([] if expected is None else [expected])


# --- two agents of one rank ---------------------------------------------------------


def test_the_first_one_answers_and_the_second_is_refused():
    table = Table()
    table.all_at_work()
    assert table.say("second", **hello(1, pid=999)) == {1: [{"beat": True}]}
    value = "process 101 on n1"
    refused = {"refused": "taken", "value": value}
    assert table.say(1, beat=True) == {"second": [refused, "close"]}
    assert table.say(1, beat=True) == {}
    assert table.lose("second") == {}
    assert table.meeting.failure is None


def test_whatever_the_first_one_says_is_an_answer():
    table = Table()
    table.all_at_work()
    table.say("second", **hello(1, pid=999))
    assert table.say(1, done=0)["second"][1] == "close"


def test_the_first_one_is_gone_and_the_second_let_in():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say("second", **hello(1, pid=999))
    heard = table.lose(1)
    assert heard["second"] == [{"welcome": 1, "job": "19.0", "round": 1}]
    assert heard[0] == [{"over": 0}, {"lost": 1}]
    table.join(0, 2)
    assert table.say("second", join=1)["second"] == [{"go": 1, "store": STORE}]


def test_the_first_one_is_gone_and_the_job_with_it():
    table = Table()
    table.all_at_work()
    table.say("second", **hello(1, pid=999))
    heard = table.lose(1)
    assert heard["second"] == table.failed(Failure(Kind.LOST, (1,)))[0]


def test_the_first_one_says_nothing_and_the_second_is_let_in():
    """Its node is lost: nothing closes its connection."""
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say("second", **hello(1, pid=999))
    assert table.wait(coordinator.PATIENCE - 1, 0, 2) == {}
    told = table.wait(1, 0, 2)[1]
    assert ("second", {"welcome": 1, "job": "19.0", "round": 1}) in told
    assert (1, "close") in told
    assert (0, {"lost": 1}) in told


def test_the_second_one_does_not_wait():
    table = Table()
    table.all_at_work()
    table.say("second", **hello(1, pid=999))
    assert table.lose("second") == {}
    assert table.say(1, beat=True) == {}


def test_a_third_one():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say("second", **hello(1, pid=998))
    table.say("third", **hello(1, pid=999))
    assert table.lose("second") == {}
    assert table.lose(1)["third"][0]["welcome"] == 1


def test_an_agent_that_gave_up_one_connection():
    """The second one may arrive before the end of the first."""
    table = Table()
    table.greet(1)
    heard = table.say("again", **hello(1))
    assert heard[1] == ["close"]
    assert heard["again"] == [{"welcome": 1, "job": "19.0", "round": 0}]
    assert table.lose(1) == {}
    assert table.meeting.failure is None


# --- who is not let in --------------------------------------------------------------

# What is said otherwise; what the agent hears; what the others hear, if anything.
REFUSED = {
    "another job": (
        {"job": "20.0", "nodes": 9, "hello": 7},
        {"refused": "stranger", "value": ""},  # not what would let it in
        None,
    ),
    "another protocol": (
        {"hello": 2, "rank": 1, "release": "9.0"},
        {"refused": "version", "value": __version__},
        Failure(Kind.REFUSED, (1,), text="another torchrun_hpc"),
    ),
    "another protocol, and nothing else that is known": (
        {"hello": 2, "rank": None, "nodes": None},
        {"refused": "version", "value": __version__},
        Failure(Kind.REFUSED, (), text="another torchrun_hpc"),
    ),
    "another id": (
        {"run_id": "other"},
        {"refused": "run_id", "value": "mine"},
        failure(Kind.REFUSED, text="it has --rdzv_id=other and 3 nodes"),
    ),
    "another number of nodes": (
        {"nodes": 4},
        {"refused": "nodes", "value": "3"},
        failure(Kind.REFUSED, text="it has --rdzv_id=mine and 4 nodes"),
    ),
    "a node that there is not": (
        {"rank": 3},
        {"refused": "nodes", "value": "3"},
        failure(Kind.REFUSED, 3, text="it has --rdzv_id=mine and 3 nodes"),
    ),
    "a negative node": (
        {"rank": -1},
        {"refused": "nodes", "value": "3"},
        failure(Kind.REFUSED, -1, text="it has --rdzv_id=mine and 3 nodes"),
    ),
}


@pytest.mark.parametrize("changes", [{"run_id": "other"}, {"nodes": 4}])
def test_one_too_many_of_a_node_is_no_failure_of_the_job(changes):
    """A worker that launches once more, for example."""
    table = Table()
    table.all_at_work()
    heard = table.say("new", **hello(1, pid=999) | changes)
    assert list(heard) == ["new"]
    assert "refused" in heard["new"][0]
    assert table.lose("new") == {}
    assert table.meeting.failure is None


@pytest.mark.parametrize("case", REFUSED)
def test_who_is_not_let_in(case):
    changes, answer, others = REFUSED[case]
    table = Table()
    table.greet(0)
    table.greet(2)
    heard = table.say("new", **hello(1) | changes)
    assert heard["new"] == [answer, "close"]
    assert table.meeting.failure == others
    expected = [] if others is None else [{"failed": protocol.packed(others)}]
    assert heard.get(0, []) == heard.get(2, []) == expected
    assert table.lose("new") == {}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"hello": None},
        {"hello": True},
        {"hello": "1"},
        {"join": 0},
        {"bye": True},
        {"failed": protocol.packed(DIED)},
        {"hello": 1, "job": "19.0"},
        hello(1, pid="4711"),
        hello(1) | {"rank": "1"},
    ],
)
def test_what_is_no_beginning(message):
    table = Table()
    table.greet(0)
    with pytest.raises(ProtocolError):
        table.say("new", **message)
    assert table.meeting.failure is None


# --- how it ends --------------------------------------------------------------------


def test_an_agent_that_gives_up():
    table = Table(max_restarts=3)
    table.all_at_work()
    gone = failure(Kind.SIGNAL, code=15)
    assert table.say(1, failed=protocol.packed(gone)) == table.failed(gone)
    assert not table.meeting.all_know
    table.say(0, read=True)
    table.say(2, bye=True)
    assert not table.meeting.all_know
    table.lose(1)
    assert table.meeting.all_know


def test_a_reason_of_the_heads_own():
    table = Table()
    table.all_there()
    own = failure(Kind.AGENT, 0, text="why")
    table.meeting.fail(own)
    assert table.heard() == table.failed(own)


def test_the_first_failure_counts():
    table = Table(max_restarts=3)
    table.all_at_work()
    table.say(1, failed=protocol.packed(DIED))
    other = failure(Kind.SIGNAL, 2, code=15)
    assert table.say(2, failed=protocol.packed(other)) == {}
    assert table.say(2, died=protocol.packed(other), round=0) == {}
    assert table.say(2, join=1) == {}
    assert table.say(2, done=0) == {}
    table.meeting.fail(other)
    assert table.heard() == {}
    assert table.lose(2) == {2: ["close"]}  # nor is anybody waited for
    assert table.meeting.failure == DIED
    assert table.meeting.round == 0


def test_a_job_that_has_failed_does_not_finish():
    """All were about to."""
    table = Table()
    table.all_at_work()
    table.meeting.fail(DIED)
    table.heard()
    for rank in range(3):
        assert table.say(rank, done=0) == {}
    assert not table.meeting.finished


def test_who_comes_too_late_hears_why():
    table = Table()
    table.greet(0)
    table.greet(1)
    table.say(1, failed=protocol.packed(DIED))
    assert table.greet(2) == {2: [{"failed": protocol.packed(DIED)}]}
    for rank in range(3):
        assert not table.meeting.all_know
        table.say(rank, read=True)
    assert table.meeting.all_know


def test_nobody_is_there():
    table = Table()
    assert table.meeting.all_know
    assert table.wait(5000) == {}
    assert table.meeting.failure is None


@pytest.mark.parametrize(
    "message",
    [
        {"failed": None},
        {"failed": {}},
        {"failed": {**protocol.packed(DIED), "kind": "bored"}},
        {"died": "worker", "round": 0},
    ],
)
def test_a_failure_that_is_none(message):
    table = Table(max_restarts=1)
    table.all_at_work()
    with pytest.raises(ProtocolError):
        table.say(1, **message)
    assert table.meeting.failure is None
    assert table.meeting.running


# --- silence ------------------------------------------------------------------------


def test_everybody_is_asked_within_five_seconds_and_not_all_at_once():
    table = Table()
    table.all_at_work()
    asked = defaultdict(list)
    for second in range(20):
        table.meeting.tick()
        for connection in table.heard():
            asked[connection].append(second)
    assert [len(seconds) for seconds in asked.values()] == [4, 4, 4]
    assert len(set(map(tuple, asked.values()))) == 3


def test_an_agent_that_does_not_answer_is_named_and_ends_the_job():
    table = Table(max_restarts=9)
    table.all_at_work()
    told = table.wait(119, 0, 2)
    assert told == {30: [(0, {"silent": [1], "left": 90})]}
    silent = failure(Kind.SILENT, code=120)
    message = {"failed": protocol.packed(silent)}
    assert table.wait(1, 0, 2) == {1: [(rank, message) for rank in range(3)]}
    assert table.wait(200, 0, 2) == {}  # it is said once


def test_several_that_do_not_answer_are_named_together():
    table = Table()
    table.all_at_work()
    assert table.wait(60, 0) == {30: [(0, {"silent": [1, 2], "left": 90})]}


@pytest.mark.parametrize("last", [29, 30, 119])
def test_a_word_ends_the_silence(last):
    table = Table()
    table.all_at_work()
    table.wait(last, 0, 2)
    table.say(1, beat=True)
    # Who has been named as silent is named once more.
    again = {} if last < 30 else {1: [(0, {"answering": [1]})]}
    assert table.wait(29, 0, 2) == again
    assert table.wait(1, 0, 2) == {1: [(0, {"silent": [1], "left": 90})]}
    assert table.meeting.failure is None


def test_several_that_answer_again_are_named_together():
    table = Table()
    table.all_at_work()
    table.wait(60, 0)
    for _ in range(2):
        for rank in (1, 2):
            table.say(rank, beat=True)
    assert table.wait(50, 0, 1, 2) == {1: [(0, {"answering": [1, 2]})]}


@pytest.mark.parametrize("how", ["it ends", "it is started again"])
def test_one_that_comes_anew_does_not_answer_again(how):
    table = Table(max_restarts=1)
    table.all_at_work()
    table.wait(60, 0, 2)
    table.lose(1)
    if how == "it is started again":
        table.greet(1, pid=999)
    assert table.wait(20, 0, 1, 2) == {}


def test_a_limit_below_the_first_report():
    """As of --rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=3."""
    table = Table(silence_timeout=15)
    table.all_at_work()
    told = table.wait(100, 0, 2)
    assert list(told) == [15]
    assert table.meeting.failure == failure(Kind.SILENT, code=15)


def test_no_time_passes_but_its_own():
    """Suspended for an hour, all nodes miss an hour of messages: nobody is named."""
    table = Table()
    table.all_at_work()
    table.wait(29, 0)
    # An hour later, and what had been sent arrives.
    for rank in (1, 2):
        table.say(rank, beat=True)
    assert table.wait(29, 0) == {}


# --- waiting ------------------------------------------------------------------------


def test_what_is_waited_for_is_said_and_when_it_ends():
    table = Table(join_timeout=100)
    table.all_there()
    assert table.wait(50, 0, 1, 2) == {}  # nobody has joined: a dry run
    table.join(2)
    told = table.wait(100, 0, 1, 2)
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    message = {"failed": protocol.packed(missing)}
    assert told == {
        10: [(0, {"waiting": [0, 1], "seconds": 10})],
        40: [(0, {"waiting": [0, 1], "seconds": 40})],
        70: [(0, {"waiting": [0, 1], "seconds": 70})],
        100: [
            (0, {"waiting": [0, 1], "seconds": 100}),
            *((rank, message) for rank in range(3)),
        ],
    }
    assert table.wait(100, 0, 1, 2) == {}


def test_nobody_is_told_where_neither_node_0_nor_the_head_is_there():
    table = Table(join_timeout=100, head=-1)
    table.greet(2)
    table.join(2)
    told = table.wait(100, 2)
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    assert told == {100: [(2, {"failed": protocol.packed(missing)})]}


def test_a_restart_has_all_the_time_of_a_start():
    table = Table(join_timeout=100, max_restarts=1)
    table.all_there()
    table.join(0)
    table.wait(99, 0, 1, 2)
    table.join(1, 2)
    assert table.wait(1000, 0, 1, 2) == {}  # at work
    table.say(1, died=protocol.packed(DIED), round=0)
    assert table.wait(50, 0, 1, 2) == {}  # their workers end first
    table.join(0, 1)
    assert sorted(table.wait(99, 0, 1, 2)) == [10, 40, 70]
    assert table.meeting.failure is None
    table.wait(1, 0, 1, 2)
    assert table.meeting.failure == Failure(Kind.MISSING, (2,), code=100)


def test_who_is_still_at_work_is_said_and_nothing_ends_it():
    table = Table(join_timeout=20)
    table.all_at_work()
    assert table.wait(100, 0, 1, 2) == {}
    table.say(2, done=0)
    told = table.wait(45, 0, 1, 2)
    assert told == {
        10: [(0, {"finishing": [0, 1], "seconds": 10})],
        40: [(0, {"finishing": [0, 1], "seconds": 40})],
    }
    table.say(0, done=0)
    assert table.wait(12, 0, 1, 2) == {10: [(0, {"finishing": [1], "seconds": 10})]}
    table.say(1, done=0)
    assert table.wait(100, 0, 1, 2) == {}
    assert table.meeting.failure is None


# --- the store of torch's agents ----------------------------------------------------


def answers(table, connection, **question):
    heard = table.say(connection, ask=1, **question)
    (answer,) = heard[connection]
    assert set(answer) == {"answer", "value"}
    return answer["value"]


def test_the_store():
    table = Table()
    table.all_at_work()
    assert answers(table, 0, check=["a"]) is False
    assert answers(table, 0, set={"a": "1", "b": "x"}) is True
    assert answers(table, 1, check=["a", "b"]) is True
    assert answers(table, 1, get=["b", "a", "b"]) == ["x", "1", "x"]
    assert answers(table, 1, get=[]) == []
    assert answers(table, 2, add="a", by=2) == 3
    assert answers(table, 2, add="c", by=-5) == -5
    assert answers(table, 0, get=["a", "c"]) == ["3", "-5"]
    assert answers(table, 0, set={"a": ""}) is True
    assert answers(table, 0, get=["a"]) == [""]


def test_an_answer_waits_until_all_keys_are_there():
    table = Table()
    table.all_at_work()
    assert table.say(1, ask=4, get=["a", "b"]) == {}
    assert table.say(2, ask=5, get=["b"]) == {}
    assert table.say(0, ask=1, set={"b": "2"}) == {
        2: [{"answer": 5, "value": ["2"]}],
        0: [{"answer": 1, "value": True}],
    }
    heard = table.say(0, ask=2, add="a", by=1)
    assert heard[1] == [{"answer": 4, "value": ["1", "2"]}]


def test_a_question_of_somebody_who_has_gone():
    table = Table(max_restarts=1)
    table.all_at_work()
    table.say(1, ask=4, get=["a"])
    table.lose(1)
    heard = table.say(0, ask=1, set={"a": "1"})
    assert heard[0] == [{"answer": 1, "value": True}]


NO_QUESTIONS = [
    {},
    {"set": None},
    {"set": ["a"]},
    {"add": "a"},
    {"add": "a", "by": "one"},
    {"add": "a", "by": None},
    {"add": "a", "by": float("inf")},
    {"add": "a", "by": float("nan")},
    {"add": "text", "by": 1},
    {"check": None},
    {"check": 1},
    {"check": [[]]},
    {"get": None},
    {"get": 1},
]


@pytest.mark.parametrize("question", NO_QUESTIONS)
def test_what_is_no_question(question):
    table = Table()
    table.all_at_work()
    table.say(0, ask=0, set={"text": "x"})
    with pytest.raises(ProtocolError):
        table.say(1, ask=1, **question)


def test_the_store_has_its_limit(monkeypatch):
    monkeypatch.setattr(coordinator, "STORE_LIMIT", 10)
    table = Table()
    table.all_at_work()
    for value in ("12345678", "x", "1234567"):  # a value replaced is gone
        assert answers(table, 0, set={"a": value}) is True
    with pytest.raises(ProtocolError, match="too much"):
        table.say(0, ask=1, set={"b": "123"})
    assert answers(table, 1, set={"b": "1"}) is True  # the others' goes on


# --- how much is sent ---------------------------------------------------------------


@pytest.mark.parametrize("nodes", [10, 1000])
def test_each_node_hears_the_same_amount_in_a_job_of_any_size(nodes):
    table = Table(nodes=nodes, max_restarts=1)
    sent = defaultdict(int)

    def count():
        for connection, messages in table.heard().items():
            for message in messages:
                sent[connection] += len(protocol.encode(message))

    for rank in range(nodes):
        table.meeting.receive(rank, hello(rank, nodes=nodes))
    for number in range(2):
        for rank in range(nodes):
            table.meeting.receive(rank, {"join": number, "store": STORE})
        count()
        if number == 0:
            table.meeting.receive(5, {"died": protocol.packed(DIED), "round": 0})
    for rank in range(nodes):
        table.meeting.receive(rank, {"done": 1})
    count()
    assert table.meeting.finished
    assert len(sent) == nodes
    assert max(sent.values()) == min(sent.values()) < 300


# --- anything in any order ----------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 4)
    | st.floats()
    | st.sampled_from(["19.0", "mine", "a", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
verbs = st.sampled_from(
    [
        *("hello", "join", "died", "failed", "done", "read", "bye", "beat", "ask"),
        *("set", "get", "add", "by", "check", "round", "store", "rank", "nodes"),
    ]
)
failures = st.builds(
    Failure, st.sampled_from(Kind), st.lists(st.integers(-1, 3)).map(tuple)
).map(protocol.packed)


ODD = {0: {"nodes": 4}, 1: {"run_id": "x"}, 2: {"job": "x"}, 3: {"hello": 5}}


class AnyMeeting(RuleBasedStateMachine):
    """Agents that do what agents do, and somebody who says anything at all."""

    def __init__(self):
        super().__init__()
        self.meeting = Coordinator(replace(TERMS, max_restarts=2, join_timeout=40))
        self.open = {}  # connection to rank
        self.joined = defaultdict(set)  # round to the ranks that have joined it
        self.told_failure = set()
        self.first = None
        self.next = 0

    def receive(self, connection, message):
        """Do what the head does."""
        try:
            self.meeting.receive(connection, json.loads(json.dumps(message)))
        except ProtocolError:
            self.lose(connection)
        self.read_outbox()

    def lose(self, connection):
        del self.open[connection]
        self.meeting.lost(connection)

    def greet_as(self, rank, changes):
        self.next += 1
        self.open[self.next] = rank
        self.receive(self.next, hello(rank) | changes)

    def join_as(self, connection, number):
        if connection in self.meeting._ranks:
            self.joined[number].add(self.open[connection])
        self.receive(connection, {"join": number, "store": STORE})

    def read_outbox(self):
        outbox, self.meeting.outbox = self.meeting.outbox, []
        closed = []
        for connection, message in outbox:
            protocol.encode(message)
            if connection not in self.open:
                continue
            if message is CLOSE:
                closed.append(connection)
            elif "go" in message:
                ranks = {self.open[c] for c in self.open if c in self.meeting._ranks}
                assert ranks == {0, 1, 2}
                assert self.joined[message["go"]] >= {0, 1, 2}
                assert self.first is None
            elif "failed" in message:
                assert connection not in self.told_failure
                self.told_failure.add(connection)
                read = protocol.unpacked(message["failed"])
                assert self.first in (None, read)
                self.first = read
        for connection in closed:
            if connection in self.open:
                self.lose(connection)
        if closed:
            self.read_outbox()

    @rule(rank=st.integers(0, 2), pid=st.integers(1, 2), odd=st.integers(0, 19))
    def greet(self, rank, pid, odd):
        self.next += 1
        self.open[self.next] = rank
        changes = {
            0: {"nodes": 4},
            1: {"run_id": "x"},
            2: {"job": "x"},
            3: {"hello": 5},
        }
        self.receive(self.next, hello(rank, pid=pid) | changes.get(odd, {}))

    @rule()
    def start(self):
        """Let those come that are missing, and all join."""
        for rank in range(3):
            if rank not in self.meeting._agents:
                self.greet_as(rank, {})
        for rank in range(3):
            if rank in self.meeting._agents:
                self.join_as(self.meeting._agents[rank].connection, self.meeting.round)

    @rule()
    def finish(self):
        """Let all finish who are there."""
        number = self.meeting.round
        for agent in list(self.meeting._agents.values()):
            self.receive(agent.connection, {"done": number})

    @rule(message=st.dictionaries(verbs, json_values, max_size=3))
    def greet_with_anything(self, message):
        self.next += 1
        self.open[self.next] = -1
        self.receive(self.next, message)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ahead=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def join(self, data, ahead):
        connection = data.draw(st.sampled_from(sorted(self.open)))
        self.join_as(connection, self.meeting.round + ahead)

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        message=st.sampled_from(["done", "died", "failed", "read", "bye", "beat"]),
        behind=st.sampled_from([0, 0, 0, 1]),
        failure=failures,
    )
    def speak(self, data, message, behind, failure):
        connection = data.draw(st.sampled_from(sorted(self.open)))
        number = self.meeting.round - behind
        value = {"done": number, "died": failure, "failed": failure}.get(message, True)
        self.receive(connection, {message: value, "round": number})

    @precondition(lambda self: self.open)
    @rule(data=st.data(), message=st.dictionaries(verbs, json_values, max_size=3))
    def speak_anything(self, data, message):
        connection = data.draw(st.sampled_from(sorted(self.open)))
        self.receive(connection, message)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        self.lose(data.draw(st.sampled_from(sorted(self.open))))
        self.read_outbox()

    @rule(seconds=st.integers(1, 40), answers=st.booleans())
    def pass_time(self, seconds, answers):
        for _ in range(seconds):
            self.meeting.tick()
            self.read_outbox()
            for connection in list(self.open) if answers else []:
                if connection in self.meeting._ranks:
                    self.receive(connection, {"beat": True})

    @invariant()
    def everybody_there_knows_of_a_failure(self):
        if self.meeting.failure is not None:
            assert self.meeting._ranks.keys() <= self.told_failure

    @invariant()
    def nobody_is_two(self):
        agents = self.meeting._agents
        assert self.meeting._ranks == {a.connection: r for r, a in agents.items()}
        assert self.meeting._ranks.keys() <= self.open.keys()
        assert self.meeting._joined <= agents.keys()
        assert {c.connection for c in self.meeting._candidates.values()} <= (
            self.open.keys()
        )

    @invariant()
    def it_ends_once(self):
        assert not (self.meeting.finished and self.meeting.failure)
        assert self.meeting.failure == self.first or not self.told_failure
        assert self.meeting.round <= 2


AnyMeeting.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAnyMeeting = AnyMeeting.TestCase
