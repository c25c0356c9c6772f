from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support import loopback
from tests.support.loopback import as_sent, request_of, worker_failure
from torchrun_hpc import __version__, limits, wire
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.names import placed
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.messages import (
    Answering,
    Differ,
    Finishing,
    Lost,
    Restart,
    Silent,
    Stranger,
    Unproved,
    Waiting,
)
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Add,
    Answer,
    Ask,
    Bye,
    Check,
    Close,
    Confirm,
    Died,
    Done,
    Ended,
    GaveUp,
    Get,
    Go,
    Heartbeat,
    Join,
    Over,
    Prepare,
    Present,
    Printed,
    Question,
    QuestionOver,
    Read,
    Reply,
    Report,
    Set,
    Unhealthy,
    WantsReport,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.rounds import Phase
from torchrun_hpc.wire import WireError

SETTINGS = replace(loopback.SETTINGS, join_timeout=900)
STORE = ("10.20.0.1", 40000)


def to(connections, *messages):
    """Return what is sent where the same is sent to all of these."""
    return {connection: list(messages) for connection in connections}


def failure(kind, node=1, **values):
    return Failure(kind, (node,), **values)


def welcome(number=0, *, is_over=False):
    return Welcome(number, (number if is_over else number - 1, (0, 0)), coordinator=0)


def go(number=0):
    return Go(number, STORE)


def over(number=0):
    return Over(number, hangs=False)


def last_words(value, rank):
    """Return what an agent is sent after a failure: that of node 0 reports it."""
    return Ended(value, reports=not rank)


KILLED = worker_failure(5, code=-9)


def member_of(rank, settings):
    """Return what a node knows of a job that has not begun."""
    nodes, spares = settings.nodes, settings.spares * settings.has_spares
    return Member(rank, first_record(nodes, spares, settings.coordinator))


def coordinator_of(settings):
    """Return the coordinator of a job that has not begun."""
    member = member_of(settings.coordinator, settings)
    made = Coordinator(settings, member)
    made.coordinate(member.record)
    return made


def read(request):
    """Read the first line of a connection as the server does."""
    return read_request(json.loads(json.dumps(request)))


class Job:
    """A coordinator, and what it has sent to each connection.

    A connection is the rank of its agent, unless a test says otherwise.

    Attributes:
        confirms: Whether agents confirm the rounds that are prepared.
        news: The news of restarts.
        records: The records that were sent, of prepared rounds, and others.
    """

    def __init__(self, **settings):
        self.coordinator = coordinator_of(replace(SETTINGS, **settings))
        self.nodes = self.coordinator.settings.nodes
        self.members = {}  # what agents know, by connection
        self.confirms = True
        self.news = []
        self.records = []

    @property
    def rounds(self):
        return self.coordinator.rounds

    @property
    def is_running(self):
        return self.rounds.phase is Phase.RUN

    @property
    def is_finished(self):
        return self.rounds.phase is Phase.FINISHED

    def sent(self):
        """Return what was sent since the last time: connection to messages.

        But for records, which agents answer, and for the news of a restart, which has a
        test of its own.
        """
        sent = defaultdict(list)
        while self.coordinator.outbox:
            outbox = [*self.coordinator.outbox]
            self.coordinator.outbox.clear()
            for connection, message in outbox:
                if isinstance(message, Close):
                    sent[connection].append("close")
                    continue
                arrived = as_sent(message, FROM_COORDINATOR)
                if isinstance(arrived, Restart):
                    self.news.append((connection, arrived))
                elif isinstance(arrived, Prepare | Record):
                    self.records.append((connection, arrived))
                else:
                    sent[connection].append(arrived)
                if self.coordinator.members.rank_of(connection) is not None:
                    self.answer(connection, arrived)
        return dict(sent)

    def answer(self, connection, message):
        """Let an agent answer at once what it is asked."""
        match message:
            case Welcome():
                rank = self.coordinator.members.rank_of(connection)
                member = member_of(rank, self.coordinator.settings)
                self.members[connection] = member
                for reply in member.accepted(message):
                    self.receive(connection, reply)
            case Prepare(record) if self.confirms:
                member = self.members[connection]
                if member.prepared(record) is not None:
                    confirm = member.confirmation(record, lambda: STORE)
                    self.receive(connection, confirm)

    def receive(self, connection, message):
        self.coordinator.receive(connection, as_sent(message, FROM_AGENT))

    def send(self, connection, message):
        self.receive(connection, message)
        return self.sent()

    def send_line(self, connection, data):
        """Send what may be no message: as the server does, which closes then."""
        self.coordinator.receive(connection, wire.decode(FROM_AGENT, data))
        return self.sent()

    def request(self, connection, request):
        """Send the first line of a connection."""
        self.coordinator.request(connection, read(request))
        return self.sent()

    def connect(self, connection, **changes):
        return self.request(
            connection, request_of(connection, nodes=self.nodes) | changes
        )

    def died(self, worker, number=0, connection=None):
        """Let the agent of a worker's node report that it has failed in a round."""
        agent = worker.nodes[0] if connection is None else connection
        return self.send(agent, Died(worker, number))

    def reported(self):
        """Let node 0 ask which workers have failed, and return the answer."""
        ((message,),) = self.send(0, WantsReport()).values()
        assert isinstance(message, Report)
        return message.summary

    def lose(self, connection):
        self.coordinator.disconnected(connection)
        return self.sent()

    def wait(self, seconds, *answering):
        """Let time pass; return the messages by second, without heartbeats.

        Args:
            seconds: How long.
            answering: The connections that answer a heartbeat.
        """
        sent = {}
        for second in range(1, seconds + 1):
            self.coordinator.tick()
            for connection, messages in self.sent().items():
                for message in messages:
                    if not isinstance(message, Heartbeat):
                        sent.setdefault(second, []).append((connection, message))
                    elif connection in answering:
                        self.receive(connection, Heartbeat())
        return sent

    def join(self, *ranks):
        """Let nodes join the next round; return what was sent since the first one."""
        for rank in ranks:
            self.receive(rank, Join())
        return self.sent()

    def finish(self, *ranks):
        """Let nodes finish, by default all; return what was sent since the first."""
        for rank in ranks or range(self.nodes):
            self.receive(rank, Done(self.rounds.round))
        return self.sent()

    def all_there(self):
        for rank in range(self.nodes):
            self.connect(rank)
        return self

    def all_at_work(self):
        self.all_there().join(*range(self.nodes))
        assert self.is_running
        return self

    def failed(self, value):
        """Return what is sent to all after a failure."""
        return {rank: [last_words(value, rank)] for rank in range(self.nodes)}


# --- a job that goes well -----------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end():
    job = Job()
    job.confirms = False
    for rank in (2, 0, 1):
        assert job.connect(rank) == {rank: [welcome()]}
    for rank in (1, 0, 2):
        assert job.records == []
        assert job.send(rank, Join()) == {}
    assert job.records == [(0, Prepare(Record((0, 0), 0, (0, 1, 2))))]
    # Node 0 gives the address of the workers' store.
    assert job.send(1, Confirm((0, 0), 0, ("10.9.9.9", 1))) == {}
    assert job.send(0, Confirm((0, 0), 0, STORE)) == to(range(3), go())
    assert job.send(2, Done(0)) == {}
    assert job.send(0, Done(0)) == {}
    assert not job.is_finished
    assert job.send(1, Done(0)) == to(range(3), Ended())
    assert job.is_finished
    for rank in range(3):
        assert not job.coordinator.all_informed
        assert job.send(rank, Bye()) == {rank: ["close"]}
    assert job.coordinator.all_informed
    assert job.rounds.failure is None


def test_only_the_prepared_round_is_confirmed():
    job = Job()
    job.confirms = False
    job.all_there().join(0, 1, 2)
    for confirm in Confirm((0, 0), 1, STORE), Confirm((1, 0), 0, STORE):
        for rank in range(3):
            assert job.send(rank, confirm) == {}
    with pytest.raises(WireError, match="no store"):
        job.send(0, Confirm((0, 0), 0))
    assert job.sent() == {}
    assert not job.is_running


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        (("", "", ""), None),
        (("jsc", "jsc", "jsc"), None),
        (("derecho", "", ""), {"derecho": (0,), "": (1, 2)}),
        (("", "derecho", ""), {"": (0, 2), "derecho": (1,)}),
        (("a", "b", "c"), {"a": (0,), "b": (1,), "c": (2,)}),
    ],
)
def test_nodes_with_different_values_are_named_once(values, reported):
    job = Job(max_restarts=1)
    for rank in (2, 1, 0):
        job.connect(rank, compared=values[rank])
    first = [] if reported is None else [Differ(reported)]
    assert job.join(0, 1, 2) == to(range(3), go()) | {0: [*first, go()]}
    job.died(KILLED)
    assert job.join(0, 1, 2) == to(range(3), go(1))


def test_each_node_tells_its_own_name():
    """Slurm 26.05 numbers tasks by topology: ranks are no places in its list."""
    job = Job()
    for rank, host in ((0, "n2"), (2, "n1"), (1, "n3")):
        job.connect(rank, host=host)
    job.lose(1)
    told = job.coordinator.members.hosts
    assert placed(("n1", "n2", "n3"), told) == ("n2", "n3", "n1")


# --- restarts -----------------------------------------------------------------------


def test_a_worker_that_dies_is_a_restart_for_all():
    job = Job(max_restarts=1).all_at_work()
    sent = job.died(KILLED)
    assert sent == to(range(3), over())
    assert not job.is_running
    # The others' workers end because of it.
    assert job.died(worker_failure(9)) == {}
    assert job.join(0, 1, 2) == to(range(3), go(1))


def test_an_agent_that_joins_the_next_round_restarts_all():
    """Where torch's agent saw it first."""
    job = Job(max_restarts=1).all_at_work()
    assert job.send(1, Join()) == to(range(3), over())
    assert job.join(0, 2) == to(range(3), go(1))
    job.send(1, Join())
    text = "it asked for another restart"
    assert job.rounds.failure == failure(Kind.AGENT, text=text)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_restarts_are_counted_for_the_job(max_restarts):
    """Not for each node: another one's workers die each time."""
    job = Job(max_restarts=max_restarts).all_at_work()
    for number in range(max_restarts):
        job.died(worker_failure(4 * (number % 3)), number)
        assert job.rounds.round == number + 1
        job.join(0, 1, 2)
        job.sent()
    sent = job.died(KILLED, max_restarts)
    assert sent == job.failed(KILLED)
    assert job.rounds.failure == KILLED


def test_the_store_is_empty_after_a_restart():
    job = Job(max_restarts=1).all_at_work()
    job.send(1, Ask(1, Set({"torchelastic/role_info/1": "old"})))
    job.died(KILLED)
    job.join(0, 1, 2)
    sent = job.send(0, Ask(7, Check(("torchelastic/role_info/1",))))
    assert sent == {0: [Answer(7, value=False)]}


def test_no_restart_after_others_have_finished():
    """They would never come."""
    job = Job(max_restarts=3).all_at_work()
    job.finish(0, 2)
    assert job.died(KILLED) == job.failed(replace(KILLED, finished=2))


def test_no_restart_if_one_finished_before_it_was_informed():
    """The end of its workers and the restart have crossed each other."""
    job = Job(max_restarts=3).all_at_work()
    job.died(KILLED)
    job.join(1)
    assert job.send(2, Done(0)) == job.failed(replace(KILLED, finished=1))
    assert not job.is_finished


@pytest.mark.parametrize("done", [-1, 1])
def test_no_end_of_a_round_that_does_not_run(done):
    job = Job(max_restarts=3).all_there()
    assert job.send(2, Done(done)) == {}
    job.join(0, 1, 2)
    assert job.send(2, Done(done)) == {}
    assert job.is_running
    job.died(KILLED)
    assert job.send(2, Done(done)) == {}  # it is not of the round that has ended
    assert job.rounds.failure is None


def test_agents_hear_that_a_collective_failed():
    """They look at their workers before they stop them."""
    job = Job(max_restarts=1).all_at_work()
    sent = job.died(worker_failure(1, text="Timed out waiting 9ms for recv operation"))
    assert [each[-1] for each in sent.values()] == [Over(0, hangs=True)] * 3


def test_a_restart_is_reported_with_its_cause():
    job = Job(max_restarts=1).all_at_work()
    job.died(KILLED)
    assert job.news == []  # another one may have been the first
    job.wait(3)
    assert job.news == [(0, Restart(1, KILLED))]


def test_a_restart_is_reported_with_the_failure_that_was_the_first():
    job = Job(max_restarts=1).all_at_work()
    job.died(worker_failure(9, text=CLOSED.format(2)))
    job.died(KILLED)
    job.join(0, 1, 2)
    assert job.news == [(0, Restart(1, KILLED))]
    job.wait(5)
    assert len(job.news) == 1


# --- which workers have failed ------------------------------------------------------

BAD = "ValueError: bad batch {}"
CLOSED = "RuntimeError: Connection closed by peer [10.20.0.{}]:4711"


def test_what_follows_from_a_failure_comes_after_it():
    """Even if it arrives before."""
    job = Job().all_at_work()
    peer = worker_failure(0, text=CLOSED.format(2))
    first = worker_failure(5, text=BAD.format(17))
    assert job.died(peer) == job.failed(peer)
    assert job.died(first) == {}
    assert job.died(worker_failure(9, text=CLOSED.format(1))) == {}
    summary = job.reported()
    assert (summary.first, summary.same_as_first) == (first, ())
    assert summary.others == (("RuntimeError: Connection closed by peer", (0, 9)),)


def test_equal_failures_are_counted():
    job = Job().all_at_work()
    for rank in (5, 8, 0, 11, 2):
        job.died(worker_failure(rank, text=BAD.format(rank)))
    job.died(KILLED)  # once more: it has failed already
    summary = job.reported()
    assert summary.first == worker_failure(5, text=BAD.format(5))
    assert (summary.same_as_first, summary.others, summary.unlisted) == (
        (0, 2, 8, 11),
        (),
        0,
    )


@pytest.mark.parametrize("claimed", [0, 2, -1, 99])
def test_a_worker_is_on_the_node_of_its_agent(claimed):
    job = Job().all_at_work()
    elsewhere = replace(KILLED, nodes=(claimed,))
    assert job.died(elsewhere, connection=1) == job.failed(KILLED)
    assert job.reported().first == KILLED


def test_only_the_report_has_what_a_worker_wrote():
    """Of a failure that all nodes hear of, the tracebacks would be the most."""
    job = Job().all_at_work()
    first = worker_failure(5, text=BAD.format(17), lines=("x" * 500,) * 16)
    assert job.died(first) == job.failed(first.brief)
    assert job.reported().first == first


def test_failures_before_a_restart_are_not_reported_after_it():
    job = Job(max_restarts=1).all_at_work()
    job.died(worker_failure(9))
    job.join(0, 1, 2)
    assert job.reported() is None
    job.died(KILLED, 1)
    assert (job.reported().first, job.reported().same_as_first) == (KILLED, ())


# When a worker fails of which nobody is to hear, and the round that its agent names.
TOO_EARLY_OR_TOO_LATE = {
    "nobody has joined": ((), 0),
    "a node has not joined": ((0, 1), 0),
    "another round": ((0, 1, 2), 1),
    "a round before the first": ((0, 1, 2), -1),
}


@pytest.mark.parametrize("case", TOO_EARLY_OR_TOO_LATE)
def test_a_worker_of_another_round_is_ignored(case):
    joined, number = TOO_EARLY_OR_TOO_LATE[case]
    job = Job(max_restarts=1).all_there()
    job.join(*joined)
    assert job.died(KILLED, number) == {}
    assert job.reported() is None
    assert (job.rounds.round, job.rounds.failure) == (0, None)


@pytest.mark.parametrize("number", [None, "0", True, 0.0])
def test_a_round_is_a_number(number):
    job = Job(max_restarts=1).all_at_work()
    for message in {"failure": wire.encode(KILLED)}, {}:
        name = "died" if message else "done"
        with pytest.raises(WireError):
            job.send_line(1, {name: message | {"round": number}})
    assert job.reported() is None
    assert job.is_running


def test_all_hear_that_the_failures_are_reported():
    job = Job().all_at_work()
    job.died(KILLED)
    assert job.send(0, Printed()) == to(range(3), Printed())


# --- what the workers are doing -----------------------------------------------------

SAMPLES = [{"rank": 9, "node": 2, "frames": ["f a.py:1"], "problem": ""}]


def ask(number=7):
    """Return a question of an agent to all."""
    return Question(number, "stacks", ["about it"])


def asked_by(rank, number=7):
    """Return the question as it is passed on."""
    return Question(number, "stacks", ["about it"], rank)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_agents_are_asked(rank):
    """Also the one that asks: it gets the replies, whoever else asks, too."""
    job = Job().all_at_work()
    assert job.send(rank, ask()) == to(range(3), asked_by(rank))
    job.send((rank + 1) % 3, ask())
    for other in (2, 0, 1):
        sent = job.send(other, Reply(rank, 7, SAMPLES))
        assert sent == {rank: [Reply(rank, 7, SAMPLES, other)]}


WRONG_QUESTIONS = [
    *({"number": wrong} for wrong in (None, "x" * 1000, [1], {"a": 1}, 1.5, True)),
    *({"what": wrong} for wrong in (None, "x" * 1000, [1], {"a": 1}, 1.5, True)),
]


@pytest.mark.parametrize("wrong", WRONG_QUESTIONS, ids=str)
def test_a_question_is_a_number_and_a_name(wrong):
    """All agents get it."""
    job = Job().all_at_work()
    with pytest.raises(WireError):
        job.send_line(1, {"question": wire.encode(ask()) | wrong})
    assert job.sent() == {}


def test_a_reply_to_an_agent_that_is_gone():
    job = Job(max_restarts=1).all_at_work()
    job.send(1, ask())
    job.lose(1)
    assert job.send(2, Reply(1, 7, [])) == {}
    job.request("again", request_of(1, agent="second"))
    assert job.send(0, ask(8))["again"] == [asked_by(0, 8)]


def test_who_asks_hears_of_an_agent_that_goes():
    """It will not reply; a second one of its rank is asked again."""
    job = Job(max_restarts=1).all_at_work()
    job.send(1, ask())
    gone = Reply(1, 7, None, 2)
    assert job.lose(2)[1][0] == gone
    assert asked_by(1) in job.request("again", request_of(2, agent="second"))["again"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_agent_that_reconnects_gets_no_question_twice(is_lost):
    """It still replies to the first one."""
    job = Job(max_restarts=1).all_at_work()
    job.send(1, ask())
    if is_lost:  # otherwise it connects before the end of the first connection arrives
        job.lose(2)
    assert asked_by(1) not in job.request("again", request_of(2))["again"]
    sent = job.send("again", Reply(1, 7, SAMPLES))
    assert sent == {1: [Reply(1, 7, SAMPLES, 2)]}


def test_an_agent_that_comes_later_is_asked_too():
    job = Job()
    job.connect(0)
    job.send(0, ask())
    assert job.connect(1) == {1: [welcome(), asked_by(0)]}
    job.send(0, QuestionOver(7))
    assert job.connect(2) == {2: [welcome()]}


def test_an_agent_asks_several_questions_at_once():
    """The end of one does not end the others."""
    job = Job(max_restarts=1)
    job.connect(0)
    for number in (7, 8, 9):
        job.send(0, ask(number))
    job.send(0, QuestionOver(8))
    assert job.connect(1) == {1: [welcome(), asked_by(0, 7), asked_by(0, 9)]}
    assert job.lose(1)[0] == [Reply(0, number, None, 1) for number in (7, 9)]
    job.lose(0)
    assert job.request("again", request_of(0, agent="second")) == {"again": [welcome()]}


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_stacks_may_be_asked_for_at_any_time(failures):
    """While it waits, while it restarts, and when it has failed."""
    job = Job(max_restarts=1).all_there()
    for number in range(failures):
        job.join(0, 1, 2)
        job.died(KILLED, number)
    assert job.send(2, ask()) == to(range(3), asked_by(2))
    assert job.send(0, Reply(2, 7, []))[2][0].number == 7


@pytest.mark.parametrize("asker", [3, -1, 10**19])
def test_a_reply_for_nobody(asker):
    job = Job().all_at_work()
    assert job.send(2, Reply(asker, 7, SAMPLES)) == {}
    assert job.rounds.failure is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"asker": wrong} for wrong in (None, True, "", "0", [], {}, [0], 0.0)),
        *({"number": wrong} for wrong in (None, True, "7", [], {}, [7], 7.0)),
    ],
    ids=str,
)
def test_a_reply_is_for_a_number_of_an_agent(wrong):
    """Nothing else is passed on: who gets it would end the connection."""
    job = Job().all_at_work()
    with pytest.raises(WireError):
        job.send_line(2, {"reply": wire.encode(Reply(0, 7, SAMPLES)) | wrong})
    assert job.sent() == {}
    assert job.rounds.failure is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
)


@given(st.sampled_from([ask(), Reply(0, 7, [])]), json_values, st.data())
def test_whatever_is_asked_or_replied(message, value, data):
    job = Job().all_at_work()
    ((name, sent),) = wire.encode(message, FROM_AGENT).items()
    changes = {data.draw(st.sampled_from([*sent])): value, "content": value}
    with suppress(WireError):
        job.send_line(1, {name: sent | changes})
    assert job.is_running


# --- agents that are gone -----------------------------------------------------------


@pytest.mark.parametrize("how", ["its connection ends", "it leaves"])
def test_nothing_is_kept_of_what_an_agent_waited_for(how):
    job = Job(max_restarts=1).all_at_work()
    job.send(1, Ask(1, Get(("a",))))
    store = job.rounds.store
    assert list(store._missing) == [1]
    if how == "it leaves":
        job.send(1, Bye())
    else:
        job.lose(1)
    assert not store._missing
    assert not store._waiting


@pytest.mark.parametrize("joined", [(0, 1, 2), (0, 2)])
def test_an_agent_is_lost_for_good(joined):
    """At work, or while others are waited for."""
    job = Job().all_there()
    job.join(*joined)
    expected = job.failed(Failure(Kind.LOST, (2,)))
    assert job.lose(2) == expected | {2: ["close"]}


def test_an_agent_is_lost_and_started_again():
    job = Job(max_restarts=1).all_at_work()
    assert job.lose(2) == {0: [over(), Lost(2)], 1: [over()], 2: ["close"]}
    job.join(0, 1)
    assert job.request("again", request_of(2, agent="second")) == {
        "again": [welcome(1)]
    }
    assert job.send("again", Join()) == to((0, 1, "again"), go(1))


def test_an_agent_is_lost_while_others_are_waited_for():
    """That is no restart: no worker runs yet."""
    job = Job(max_restarts=1).all_there()
    job.join(0, 2)
    assert job.lose(2) == {0: [Lost(2)], 2: ["close"]}
    job.request("again", request_of(2, agent="second"))
    assert (job.rounds.round, job.rounds.failure) == (0, None)
    job.join(1)
    assert not job.is_running
    job.send("again", Join())
    assert job.is_running


def test_an_agent_is_lost_before_it_confirms():
    job = Job(max_restarts=1).all_there()
    job.confirms = False
    job.join(0, 1, 2)
    job.confirms = True
    assert job.lose(2) == {0: [Lost(2)], 2: ["close"]}
    job.request("again", request_of(2, agent="second"))
    assert not job.is_running
    job.send("again", Join())
    assert job.is_running


def test_an_agent_that_has_only_looked_may_go():
    """A dry run does: it joins nothing."""
    job = Job().all_there()
    assert job.lose(2) == {2: ["close"]}
    assert job.rounds.failure is None
    assert job.connect(2) == {2: [welcome()]}


def test_an_agent_that_leaves_as_it_should_is_no_loss():
    job = Job().all_at_work()
    assert job.send(2, Bye()) == {2: ["close"]}
    assert job.lose(2) == {}
    assert job.rounds.failure is None


def test_an_agent_that_has_finished_is_no_loss():
    job = Job().all_at_work()
    job.finish(2)
    assert job.lose(2) == {2: ["close"]}
    assert job.finish(0, 1) == to((0, 1), Ended())


def test_an_agent_that_is_started_again_after_it_has_finished():
    job = Job(max_restarts=1).all_at_work()
    job.finish(2)
    job.lose(2)
    sent = job.request("again", request_of(2, agent="second"))
    expected = Failure(Kind.LOST, (2,), finished=1)
    assert sent["again"][0].failure == expected


def test_the_last_agents_of_a_job_that_has_finished():
    """One that connects anew hears of the end."""
    job = Job(max_restarts=1).all_at_work()
    job.finish()
    assert job.lose(2) == {2: ["close"]}
    assert job.send(1, GaveUp(KILLED)) == {}
    assert job.send(1, Join()) == {}
    assert job.rounds.failure is None
    assert job.connect(2) == {2: [welcome(is_over=True), Ended()]}


def test_which_node_reports_where_node_0_is_gone():
    for node, expected in ((0, None), (1, 1), (2, 2)):
        job = Job(max_restarts=1, coordinator=node)
        job.all_at_work()
        sent = job.lose(0)
        reporters = [c for c, messages in sent.items() if Lost(0) in messages]
        assert reporters == ([] if expected is None else [expected])


# --- two agents of one rank ---------------------------------------------------------


@pytest.mark.parametrize("answer", [Heartbeat(), Done(0)])
def test_the_first_one_answers_and_the_second_is_refused(answer):
    """The job goes on, and node 0 says who instead of whom."""
    job = Job().all_at_work()
    second = request_of(1, agent="second", pid=7, host="n10")
    assert job.request("second", second) == {1: [Heartbeat()]}
    text = "process 7 on n10 instead of process 101 on n1"
    assert job.send(1, answer) == refusal(Refused.TAKEN, "second") | stranger(text)
    assert job.send(1, answer) == {}
    assert job.lose("second") == {}
    assert job.rounds.failure is None


def test_the_first_one_is_gone_and_the_second_is_accepted():
    job = Job(max_restarts=1).all_at_work()
    job.request("second", request_of(1, agent="second"))
    sent = job.lose(1)
    assert sent["second"] == [welcome(1)]
    assert sent[0] == [over(), Lost(1)]
    job.join(0, 2)
    assert job.send("second", Join())["second"] == [go(1)]


def test_the_first_one_is_gone_and_the_job_with_it():
    job = Job().all_at_work()
    job.request("second", request_of(1, agent="second"))
    sent = job.lose(1)
    assert sent["second"] == job.failed(Failure(Kind.LOST, (1,)))[1]


def test_the_first_one_says_nothing_and_the_second_is_accepted():
    """Its node is lost: nothing closes its connection."""
    job = Job(max_restarts=1).all_at_work()
    job.request("second", request_of(1, agent="second"))
    assert job.wait(limits.CANDIDATE_TIMEOUT - 1, 0, 2) == {}
    sent = job.wait(1, 0, 2)[1]
    assert ("second", welcome(1)) in sent
    assert (1, "close") in sent
    assert (0, Lost(1)) in sent


def test_the_second_one_does_not_wait():
    job = Job().all_at_work()
    job.request("second", request_of(1, agent="second"))
    assert job.lose("second") == {}
    assert job.send(1, Heartbeat()) == {}


def test_a_third_one():
    job = Job(max_restarts=1).all_at_work()
    job.request("second", request_of(1, agent="other"))
    job.request("third", request_of(1, agent="second"))
    assert job.lose("second") == {}
    assert job.lose(1)["third"][0] == welcome(1)


def test_two_containers_of_one_host_are_two_agents():
    """Each has process numbers of its own, so both may be the same process there."""
    job = Job(max_restarts=1).all_at_work()
    second = request_of(1, agent="second")
    assert (second["host"], second["pid"]) == ("n1", 101)
    assert job.request("second", second) == {1: [Heartbeat()]}
    sent = job.send(1, Heartbeat())
    text = "process 101 on n1 instead of process 101 on n1"
    assert sent == refusal(Refused.TAKEN, "second") | stranger(text)
    assert job.is_running


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_connection_does_not_claim_a_second_node_rank(rank):
    job = Job(max_restarts=1).all_at_work()
    job.request("second", request_of(1, agent="second"))
    with pytest.raises(WireError):
        job.send_line("second", request_of(rank, agent="second"))
    job.lose("second")  # as the server does then
    job.lose(rank)
    assert job.wait(limits.CANDIDATE_TIMEOUT, 0, 1, 2) is not None
    assert job.coordinator.members.rank_of("second") is None


def test_an_agent_that_connects_anew_is_accepted_first():
    """It knows nothing of the round that ends. Its first connection ends later."""
    job = Job(max_restarts=1).all_at_work()
    sent = job.request("again", request_of(1))
    assert sent == to((0, 2), over()) | {1: ["close"], "again": [welcome(1)]}
    assert job.lose(1) == {}
    assert job.rounds.failure is None


# --- which agents are refused -------------------------------------------------------


def refusal(reason, connection="new"):
    """Return what is sent to an agent that is refused: no more than the reason."""
    return {connection: [reason, "close"]}


def stranger(text, *ranks):
    """Return what node 0 is to report."""
    return {0: [Stranger(ranks or (1,), text)]}


# What differs in a request; why it is refused; both values.
UNFIT = {
    "an older protocol": (
        {"protocol": protocol.VERSION - 1},
        Refused.VERSION,
        f"torchrun_hpc 0.1.0 instead of {__version__}",
    ),
    "a newer protocol, of which all else is different": (
        {"protocol": protocol.VERSION + 1, "nodes": None, "run_id": None, "pid": []},
        Refused.VERSION,
        f"torchrun_hpc 0.1.0 instead of {__version__}",
    ),
    "another id": (
        {"run_id": "other"},
        Refused.RUN_ID,
        "--rdzv_id=other instead of mine",
    ),
    "more nodes": ({"nodes": 4}, Refused.NODES, "4 nodes instead of 3"),
    "fewer nodes": ({"nodes": 2}, Refused.NODES, "2 nodes instead of 3"),
    "spares": ({"spares": 1}, Refused.SPARES, "--hpc-spares=1 instead of 0"),
    "an escape sequence": (
        {"run_id": "\x1b[2Jx\n"},
        Refused.RUN_ID,
        "--rdzv_id= [2Jx  instead of mine",
    ),
    "much text": (
        {"run_id": "x" * 3000},
        Refused.RUN_ID,
        f"--rdzv_id={'x' * 200} instead of mine",
    ),
    "a failure": (
        {"nodes": 4, "failed": wire.encode(failure(Kind.AGENT))},
        Refused.NODES,
        "4 nodes instead of 3",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_agent_that_does_not_fit_ends_a_job_that_starts(case):
    """It is awaited, and so the job cannot start."""
    changes, reason, text = UNFIT[case]
    job = Job()
    job.connect(0)
    job.connect(2)
    failed = Failure(Kind.REFUSED, (1,), text=text)
    others = {rank: [last_words(failed, rank)] for rank in (0, 2)}
    assert job.request("new", request_of(1) | changes) == refusal(reason) | others
    assert job.lose("new") == {}
    # The next one hears nothing of the job but this.
    assert job.request("new", request_of(1) | changes) == refusal(reason)


def running():
    return Job(max_restarts=1).all_at_work()


def restarting():
    """Wait for an agent that is gone."""
    job = running()
    job.lose(1)
    return job


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("start", [Job.all_there, running, restarting])
def test_an_agent_that_does_not_fit_ends_nothing(case, start):
    """Its node has an agent, or had one: a worker launches once more, for example."""
    changes, reason, text = UNFIT[case]
    job = start(Job()) if start is Job.all_there else start()
    expected = refusal(reason) | stranger(text, 1)
    assert job.request("new", request_of(1) | changes) == expected
    assert job.lose("new") == {}
    assert job.request("new", request_of(1) | changes) == refusal(reason)  # once
    assert job.rounds.failure is None


@pytest.mark.parametrize("rank", [None, True, -1, 3, 10**30, "1", 1.0, [1]])
@pytest.mark.parametrize("case", UNFIT)
def test_who_has_no_node_rank_ends_nothing(case, rank):
    """Not even while the job starts."""
    changes, reason, text = UNFIT[case]
    job = Job()
    job.connect(0)
    request = request_of(1) | changes | {"rank": rank}
    try:
        sent = job.request("new", request)
    except WireError:
        assert type(rank) is not int or request["protocol"] == protocol.VERSION
        assert rank != 3 or request["nodes"] < 4
    else:
        expected = {0: [Stranger((), text)]}
        assert sent == refusal(reason) | expected
    assert job.rounds.failure is None


def test_an_agent_of_another_command_ends_nothing():
    """Of two launches in one job that nothing else tells apart: its own will come."""
    job = Job(started="a.py [1]")
    job.connect(0, started="a.py [1]")
    text = "b.py [2] instead of a.py [1]"
    expected = refusal(Refused.STARTED) | stranger(text, 1)
    assert job.request("new", request_of(1) | {"started": "b.py [2]"}) == expected
    assert job.lose("new") == {}
    assert job.rounds.failure is None
    # Only where a launch id does not tell launches apart a command is sent.
    for rank, started in (1, "a.py [1]"), (2, ""):
        assert job.connect(rank, started=started)[rank] == [welcome()]


def test_a_second_agent_whose_first_one_leaves():
    """The first one has only looked whether there is a coordinator."""
    job = Job()
    job.connect(0)
    assert "new" not in job.request("new", request_of(0, agent="another one"))
    assert job.send(0, Bye())["new"] == [welcome()]
    assert job.lose(0) == {}


def test_one_line_that_names_the_job():
    """Of an old release, or of anybody: it ends nothing, at any time."""
    for job in (Job(), Job().all_there(), running(), restarting()):
        sent = job.request("new", {"protocol": 2})
        assert sent["new"] == refusal(Refused.VERSION)["new"]
        assert job.rounds.failure is None


def test_a_stranger_is_reported_once_for_each_reason():
    job = running()
    for number in range(2):
        for changes, reason, _ in UNFIT.values():
            sent = job.request("new", request_of(1) | changes)
            first = next(each for each, why, _ in UNFIT.values() if why is reason)
            is_first = not number and changes == first
            assert (0 in sent) is is_first, changes


def test_a_stranger_is_reported_as_soon_as_somebody_is_there_to_report_it():
    job = Job(coordinator=2)
    other = request_of(3, nodes=4)
    assert job.request("new", other) == refusal(Refused.NODES)
    assert job.request("new", other) == refusal(Refused.NODES)
    job.connect(2)
    sent = job.request("new", other)
    assert sent[2][0].because == "4 nodes instead of 3"
    assert job.request("new", other) == refusal(Refused.NODES)


@pytest.mark.parametrize("end", ["failed", "finished"])
def test_when_a_job_has_ended_a_stranger_is_only_refused(end):
    for changes, reason, _ in UNFIT.values():
        job = running()
        if end == "failed":
            job.send(2, GaveUp(KILLED))
        else:
            job.finish()
        assert job.request("new", request_of(1) | changes) == refusal(reason)


def test_nobody_waits_for_agents_that_were_refused():
    """As of --rdzv-id=$RANDOM, which is different on each node."""
    job = Job()
    job.connect(0)
    job.request("one", request_of(1, run_id="one"))
    job.send(0, Read())
    assert job.coordinator.expects_nodes
    job.request("two", request_of(2, run_id="two"))
    assert job.coordinator.all_informed


@pytest.mark.parametrize(("own", "theirs"), [("", "mine"), ("mine", "")])
def test_who_cannot_know_the_id_fits(own, theirs):
    """A node that cannot start does not know it; the others are to hear of that."""
    job = Job(run_id=own)
    assert job.connect(0, run_id=theirs) == {0: [welcome()]}
    cannot = failure(Kind.AGENT, text="no torch")
    packed = wire.encode(cannot)
    sent = job.request("new", request_of(1, run_id=theirs, failed=packed))
    assert sent == {0: [last_words(cannot, 0)], "new": [last_words(cannot, 1)]}
    assert job.connect(2, run_id=theirs) == {2: [last_words(cannot, 2)]}


SECRET = {
    "run_id": "id4711",
    "nodes": 4711,
    "spares": 1147,
    "max_restarts": 1,
}
requests = st.fixed_dictionaries(
    {"protocol": st.sampled_from([2, protocol.VERSION, protocol.VERSION, 5])},
    optional={
        "run_id": st.sampled_from(["id4711", "", "x"]) | st.text(max_size=9),
        "nodes": st.sampled_from([4711, 3]) | st.integers(),
        "spares": st.sampled_from([1147, 0]) | st.integers(),
        "rank": st.integers(-2, 4) | st.just(4711) | st.integers(),
        "pid": st.just(101) | st.integers(),
        "failed": st.just(wire.encode(KILLED)),
    },
)


@given(
    st.lists(requests, min_size=1, max_size=4),
    st.sampled_from(["starts", "runs", "failed", "finished"]),
)
def test_a_refusal_discloses_nothing(asked, phase):
    """Who does not fit hears of no name, number, release or other agent of the job."""
    job = Job(**SECRET)
    fit = {key: SECRET[key] for key in ("run_id", "nodes", "spares")}
    for rank in (0, 1):
        job.request(rank, request_of(rank) | fit)
    job.rounds.began = -1 if phase == "starts" else 0
    if phase == "finished":
        job.rounds.phase = Phase.FINISHED
    if phase == "failed":
        job.send(1, GaveUp(KILLED))
    for number, changes in enumerate(asked):
        request = request_of(1, agent="second") | fit | changes
        is_fit = request["protocol"] == protocol.VERSION and (
            request["run_id"] in ("", SECRET["run_id"])
            and all(request[key] == SECRET[key] for key in ("nodes", "spares"))
        )
        new = f"new {number}"
        try:
            sent = job.request(new, request)
        except WireError:
            continue
        for messages in sent.values():  # what others hear is short
            assert len(repr(messages)) < 1000
        sent |= job.send(1, Heartbeat())
        if not is_fit or isinstance(sent.get(new, [None])[0], Refused):
            reason = sent[new][0]
            assert sent[new] == [reason, "close"]
            assert (reason is Refused.TAKEN) is is_fit


# --- how it ends --------------------------------------------------------------------


def test_an_agent_that_gives_up():
    job = Job(max_restarts=3).all_at_work()
    gone = failure(Kind.SIGNAL, code=2)
    assert job.send(1, GaveUp(gone)) == job.failed(gone)
    assert not job.coordinator.all_informed
    job.send(0, Read())
    job.send(2, Bye())
    assert not job.coordinator.all_informed
    job.lose(1)
    assert job.coordinator.all_informed


STOP = failure(Kind.SIGNAL, code=15)


def stop(job, *ranks):
    """Let agents report SIGTERM; return what was sent then."""
    for rank in ranks:
        job.receive(rank, GaveUp(failure(Kind.SIGNAL, rank, code=15)))
    return job.sent()


def test_sigterm_for_all_agents_ends_the_job_at_once():
    job = Job(max_restarts=3).all_at_work()
    assert stop(job, 1, 0) == {}
    assert stop(job, 2) == job.failed(STOP)


def test_sigterm_for_one_agent():
    """What follows it, but for the loss of another agent, is no reason."""
    job = Job(max_restarts=3).all_at_work()
    assert stop(job, 1) == {}
    assert job.died(worker_failure(9)) == {}
    assert job.send(2, Join()) == {}
    assert job.lose(1) == {1: ["close"]}  # the launcher has killed it
    sent = job.wait(limits.LOSS_TO_TERM, 0, 2)
    failed = {rank: [last_words(STOP, rank)] for rank in (0, 2)}
    assert sent == {limits.LOSS_TO_TERM: [(r, m) for r in failed for m in failed[r]]}


@pytest.mark.parametrize("kind", [Kind.AGENT, Kind.WORKER])
def test_another_failure_after_sigterm(kind):
    """A loss was first, and is seen later; the others follow."""
    job = Job(max_restarts=3).all_at_work()
    stop(job, 1)
    assert job.send(0, GaveUp(failure(kind, 0))) == {}
    job.lose(2)
    assert job.rounds.failure == failure(Kind.LOST, 2)


def test_sigterm_and_other_failures_of_all_agents():
    job = Job(max_restarts=3).all_at_work()
    stop(job, 1)
    for rank in (0, 2):
        job.send(rank, GaveUp(failure(Kind.WORKER, rank)))
    assert job.rounds.failure == STOP


@pytest.mark.parametrize("seconds", [0, 2, 3])
def test_sigterm_after_a_loss(seconds):
    """Soon after it, its reason is the loss; much later it is another one."""
    job = Job(max_restarts=3).all_at_work()
    job.lose(2)
    job.wait(seconds, 0, 1)
    stop(job, 1)
    assert job.rounds.failure == (failure(Kind.LOST, 2) if seconds < 3 else STOP)


@pytest.mark.parametrize("is_lost", [False, True])
def test_sigterm_of_pbs(is_lost):
    """It does not follow a loss; and PBS kills the tasks of other nodes by SIGKILL."""
    job = Job(signals_on_loss=False, max_restarts=3).all_at_work()
    if is_lost:
        job.lose(2)
    stop(job, 1)
    job.lose(0)
    assert job.rounds.failure == STOP


def test_sigterm_while_a_job_starts():
    job = Job()
    job.connect(1)
    assert stop(job, 1) == {1: [last_words(STOP, 1)]}


def test_the_first_failure_counts():
    job = Job(max_restarts=3).all_at_work()
    job.send(1, GaveUp(KILLED))
    other = failure(Kind.SIGNAL, 2, code=15)
    assert job.send(2, GaveUp(other)) == {}
    assert job.died(worker_failure(9)) == {}
    assert job.send(2, Join()) == {}
    assert job.finish() == {}
    job.coordinator.fail(other)
    assert job.sent() == {}
    assert job.lose(2) == {2: ["close"]}  # nor is anybody waited for
    assert job.rounds.failure == KILLED
    assert (job.rounds.round, job.is_finished) == (0, False)


def test_a_late_agent_is_informed_of_the_failure():
    job = Job()
    job.connect(0)
    job.connect(1)
    job.send(1, GaveUp(KILLED))
    assert job.connect(2) == {2: [last_words(KILLED, 2)]}
    for rank in range(3):
        assert not job.coordinator.all_informed
        job.send(rank, Read())
    assert job.coordinator.all_informed


def test_nobody_is_there():
    job = Job()
    assert job.coordinator.all_informed
    assert job.wait(5000) == {}
    assert job.rounds.failure is None


@pytest.mark.parametrize(
    "message",
    [
        {"gave_up": {"failure": None}},
        {"gave_up": {"failure": {}}},
        {"gave_up": {"failure": {**wire.encode(KILLED), "kind": "bored"}}},
        {"died": {"failure": "worker", "round": 0}},
        {"died": {"failure": None, "round": 0}},
        {"died": {"failure": wire.encode(Failure(Kind.WORKER, (1,))), "round": 0}},
        {"died": {"failure": {**wire.encode(KILLED), "text": "\x1b[2J"}, "round": 0}},
    ],
)
def test_a_failure_that_is_none(message):
    job = Job(max_restarts=1).all_at_work()
    with pytest.raises(WireError):
        job.send_line(1, message)
    assert job.rounds.failure is None
    assert job.is_running


# --- silence ------------------------------------------------------------------------


def silent(*ranks):
    """Return what node 0 is to report of agents that do not answer."""
    return Silent(ranks, seconds=30, left=90)


def test_everybody_is_asked_within_five_seconds_and_not_all_at_once():
    job = Job().all_at_work()
    asked = defaultdict(list)
    for second in range(20):
        job.coordinator.tick()
        for connection in job.sent():
            asked[connection].append(second)
    assert [len(seconds) for seconds in asked.values()] == [4, 4, 4]
    assert len(set(map(tuple, asked.values()))) == 3


def test_an_agent_that_does_not_answer_is_named_and_ends_the_job():
    job = Job(max_restarts=9).all_at_work()
    sent = job.wait(119, 0, 2)
    assert sent == {30: [(0, silent(1))]}
    why = failure(Kind.SILENT, code=120)
    ends = [(rank, last_words(why, rank)) for rank in range(3)]
    assert job.wait(1, 0, 2) == {1: ends}
    assert job.wait(200, 0, 2) == {}  # it is reported once
    job.send(0, Read())
    assert not job.coordinator.all_informed
    job.send(2, Read())
    assert job.coordinator.all_informed  # nobody waits for the silent one


@pytest.mark.parametrize("last", [29, 30, 119])
def test_a_message_ends_the_silence(last):
    job = Job().all_at_work()
    job.wait(last, 0, 2)
    job.send(1, Heartbeat())
    # Who has been named as silent is named once more.
    again = {} if last < 30 else {1: [(0, Answering((1,)))]}
    assert job.wait(29, 0, 2) == again
    assert job.wait(1, 0, 2) == {1: [(0, silent(1))]}
    assert job.rounds.failure is None


def test_several_are_named_together():
    job = Job().all_at_work()
    assert job.wait(60, 0) == {30: [(0, silent(1, 2))]}
    for _ in range(2):
        for rank in (1, 2):
            job.send(rank, Heartbeat())
    assert job.wait(50, 0, 1, 2) == {1: [(0, Answering((1, 2)))]}


@pytest.mark.parametrize("how", ["it ends", "it is started again"])
def test_one_that_comes_anew_does_not_answer_again(how):
    job = Job(max_restarts=1).all_at_work()
    job.wait(60, 0, 2)
    job.lose(1)
    if how == "it is started again":
        job.connect(1, agent="second")
    assert job.wait(20, 0, 1, 2) == {}


def test_a_limit_below_the_first_report():
    """As of --rdzv-conf=keep_alive_interval=5,keep_alive_max_attempt=3."""
    job = Job(silence_timeout=15).all_at_work()
    sent = job.wait(100, 0, 2)
    assert list(sent) == [15]
    assert job.rounds.failure == failure(Kind.SILENT, code=15)


# --- waiting ------------------------------------------------------------------------


def test_missing_nodes_are_reported_until_the_timeout():
    job = Job(join_timeout=100).all_there()
    assert job.wait(50, 0, 1, 2) == {}  # nobody has joined: a dry run
    job.join(2)
    sent = job.wait(100, 0, 1, 2)
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    assert sent == {
        10: [(0, Waiting((0, 1), 10, ()))],
        40: [(0, Waiting((0, 1), 40, ()))],
        70: [(0, Waiting((0, 1), 70, ()))],
        100: [
            (0, Waiting((0, 1), 100, ())),
            *((rank, last_words(missing, rank)) for rank in range(3)),
        ],
    }
    assert job.wait(100, 0, 1, 2) == {}


KEY = "~/.torchrun_hpc/key"


def test_who_comes_without_a_proof_is_reported_once():
    """And again with the nodes that are missing; of many, some are."""
    job = Job()
    job.coordinator.members.came_unproved(
        "10.0.0.7", KEY
    )  # nobody is there to report it
    job.connect(0)
    assert job.wait(1)[1] == [(0, Unproved("10.0.0.7", KEY))]
    job.coordinator.members.came_unproved("10.0.0.7", KEY)
    assert job.sent() == {}
    for number in range(20):
        job.coordinator.members.came_unproved(f"127.0.1.{number}", KEY)
    for number in range(20):
        job.coordinator.members.came_unproved(f"10.0.1.{number}", KEY)
    expected = ["127.0.0.1", *(f"10.0.1.{number}" for number in range(6))]
    assert job.sent() == {0: [Unproved(address, KEY) for address in expected]}
    job.join(0)
    ((_, waiting),) = job.wait(10, 0)[10]
    assert waiting.unproved == ("10.0.0.7", *expected)


def test_no_report_without_node_0_and_the_head_node():
    job = Job(join_timeout=100, coordinator=-1)
    job.connect(2)
    job.join(2)
    sent = job.wait(100, 2)
    missing = Failure(Kind.MISSING, (0, 1), code=100)
    assert sent == {100: [(2, last_words(missing, 2))]}


def test_a_restart_has_all_the_time_of_a_start():
    job = Job(join_timeout=100, max_restarts=1).all_there()
    job.join(0)
    job.wait(99, 0, 1, 2)
    job.join(1, 2)
    assert job.wait(1000, 0, 1, 2) == {}  # at work
    job.died(KILLED)
    assert job.wait(50, 0, 1, 2) == {}  # their workers end first
    job.join(0, 1)
    assert sorted(job.wait(99, 0, 1, 2)) == [10, 40, 70]
    assert job.rounds.failure is None
    job.wait(1, 0, 1, 2)
    assert job.rounds.failure == Failure(Kind.MISSING, (2,), code=100)


def test_the_workers_store_has_all_the_time_of_a_start():
    """The last node may join late, and node 0 open the store in the next second."""
    job = Job(join_timeout=100).all_there()
    job.confirms = False
    job.join(0)
    job.wait(99, 0, 1, 2)
    job.join(1, 2)
    assert sorted(job.wait(99, 0, 1, 2)) == [10, 40, 70]
    assert job.rounds.failure is None
    job.wait(1, 0, 1, 2)
    assert job.rounds.failure == Failure(Kind.MISSING, (0,), code=100)


def test_nodes_at_work_are_reported_without_a_timeout():
    job = Job(join_timeout=20).all_at_work()
    assert job.wait(100, 0, 1, 2) == {}
    job.send(2, Done(0))
    sent = job.wait(45, 0, 1, 2)
    assert sent == {
        10: [(0, Finishing((0, 1), 10))],
        40: [(0, Finishing((0, 1), 40))],
    }
    job.send(0, Done(0))
    assert job.wait(12, 0, 1, 2) == {10: [(0, Finishing((1,), 10))]}
    job.send(1, Done(0))
    assert job.wait(100, 0, 1, 2) == {}
    assert job.rounds.failure is None


# --- the store of torch's agents ----------------------------------------------------


def test_agents_share_values():
    job = Job().all_at_work()
    assert job.send(1, Ask(4, Get(("a",)))) == {}
    assert job.send(0, Ask(1, Set({"a": "1"}))) == {
        1: [Answer(4, ["1"])],
        0: [Answer(1, value=True)],
    }
    with pytest.raises(WireError):
        job.send_line(1, {"get": {"number": 1}})


def test_a_question_of_an_agent_that_is_gone():
    job = Job(max_restarts=1).all_at_work()
    job.send(1, Ask(4, Get(("a",))))
    job.lose(1)
    sent = job.send(0, Ask(1, Set({"a": "1"})))
    assert sent[0] == [Answer(1, value=True)]


# --- how much is sent ---------------------------------------------------------------


@pytest.mark.parametrize("nodes", [10, 1000])
def test_each_node_receives_the_same_amount_in_a_job_of_any_size(nodes):
    job = Job(nodes=nodes, max_restarts=1)
    amounts = defaultdict(int)

    def count():
        sent = [(each, m) for each, messages in job.sent().items() for m in messages]
        for connection, message in sent:
            line = wire.to_line(wire.encode(message, FROM_COORDINATOR))
            amounts[connection] += len(line)

    for rank in range(nodes):
        job.coordinator.request(rank, read(request_of(rank, nodes=nodes)))
    for number in range(2):
        for rank in range(nodes):
            job.coordinator.receive(rank, Join())
        count()
        if number == 0:
            job.coordinator.receive(5, Died(KILLED, 0))
    for rank in range(nodes):
        job.coordinator.receive(rank, Done(1))
    count()
    assert job.is_finished
    assert len(amounts) == nodes
    assert max(amounts.values()) == min(amounts.values()) < 300


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
keys = st.sampled_from(["a", "b", "1"])
small = st.integers(-1, 3)
texts = st.sampled_from(["", "a", "\x1b[2J"])
# Messages that agents may send, but not as these do here.
odd_messages = st.one_of(
    st.builds(
        Present,
        address=st.just(("n1", 4000)),
        done=st.booleans(),
        term=st.tuples(small, small),
        round=small,
        gone=st.none() | st.tuples(small, small),
        record=st.none(),
    ),
    st.builds(Confirm, st.tuples(small, small), small, st.none() | st.just(STORE)),
    st.builds(Unhealthy, texts),
    st.builds(Question, small, texts, json_values),
    st.builds(QuestionOver, small),
    st.builds(Reply, small, small, json_values),
    st.builds(
        Ask,
        small,
        st.builds(Set, st.dictionaries(keys, keys))
        | st.builds(Add, keys, small)
        | st.builds(Get, st.lists(keys).map(tuple))
        | st.builds(Check, st.lists(keys).map(tuple)),
    ),
).map(lambda message: wire.encode(message, FROM_AGENT))
names = st.sampled_from(
    [
        *("present", "join", "confirm", "unhealthy", "died", "gave_up", "done", "read"),
        *("bye", "heartbeat", "ask", "reply", "question", "wants_report", "printed"),
    ]
)
parts = st.sampled_from(["round", "term", "store", "failure", "number", "request"])
# And what is no message, but may look like one.
no_messages = st.dictionaries(
    names, json_values | st.dictionaries(parts, json_values, max_size=3), max_size=2
)
failures = st.builds(
    Failure, st.sampled_from(Kind), st.lists(st.integers(-1, 3)).map(tuple)
)
worker_failures = st.builds(
    Failure,
    st.sampled_from([Kind.WORKER, Kind.WORKER, Kind.LOST]),
    st.lists(st.integers(-1, 12)).map(tuple),
    code=st.sampled_from([1, 255, -9, -15]),
    time=st.floats(),
    text=st.sampled_from(["", BAD.format(17), BAD.format(18), CLOSED.format(1)]),
    worker=st.none()
    | st.builds(
        WorkerPart,
        **dict.fromkeys(("rank", "size", "local_rank"), st.integers(-1, 12)),
    ),
)


ODD = {0: {"nodes": 4}, 1: {"run_id": "x"}, 2: {"spares": 1}, 3: {"protocol": 5}}


class AnyCoordinator(RuleBasedStateMachine):
    """Agents that do what agents do, and a peer that sends anything at all."""

    @property
    def rounds(self):
        return self.coordinator.rounds

    @property
    def is_finished(self):
        return self.rounds.phase is Phase.FINISHED

    def __init__(self):
        super().__init__()
        self.coordinator = coordinator_of(
            replace(SETTINGS, max_restarts=2, join_timeout=40)
        )
        self.open = set()
        self.joined = set()  # the ranks that have joined since the last round began
        self.prepared = {}  # connection to the record that it has not confirmed
        self.informed = set()
        self.first = None
        self.next = 0

    def receive(self, connection, data):
        """Do what the server does."""
        try:
            message = wire.decode(FROM_AGENT, json.loads(json.dumps(data)))
            if message == Join():
                self.joined.add(self.coordinator.members.rank_of(connection))
            self.coordinator.receive(connection, message)
        except WireError:
            self.lose(connection)
        self.read_outbox()

    def tell(self, connection, message):
        self.receive(connection, wire.encode(message, FROM_AGENT))

    def lose(self, connection):
        self.open.remove(connection)
        self.prepared.pop(connection, None)
        self.coordinator.disconnected(connection)

    def connect_as(self, rank, changes):
        self.request(request_of(rank) | changes)

    def request(self, request):
        self.next += 1
        self.open.add(self.next)
        try:
            self.coordinator.request(self.next, read(request))
        except WireError:
            self.lose(self.next)
        self.read_outbox()

    def confirm_as(self, connection):
        record = self.prepared.pop(connection)
        store = None if self.coordinator.members.rank_of(connection) else STORE
        self.tell(connection, Confirm(record.term, record.round, store))

    def read_outbox(self):
        outbox = [*self.coordinator.outbox]
        self.coordinator.outbox.clear()
        for connection, message in outbox:
            if not isinstance(message, Close):
                arrived = as_sent(message, FROM_COORDINATOR)
                if connection in self.open:
                    self.arrived(connection, arrived)
        if any(isinstance(message, Go) for _, message in outbox):
            self.joined.clear()
        closed = [each for each, m in outbox if isinstance(m, Close)]
        for connection in closed:
            if connection in self.open:
                self.lose(connection)
        if closed:
            self.read_outbox()
        for connection, message in outbox:
            if isinstance(message, Welcome) and connection in self.open:
                self.accepted(connection, message)

    def accepted(self, connection, message):
        rank = self.coordinator.members.rank_of(connection)
        for reply in member_of(rank, self.coordinator.settings).accepted(message):
            self.tell(connection, reply)

    def arrived(self, connection, message):
        match message:
            case Prepare(record):
                self.prepared[connection] = record
            case Go():
                assert {*self.coordinator.members.agents} == {0, 1, 2}
                assert self.joined >= {0, 1, 2}
                assert self.first is None
            case Ended(failure=Failure() as failure):
                assert connection not in self.informed
                self.informed.add(connection)
                assert self.first in (None, failure)
                self.first = failure
            case Report(summary):
                assert summary is None or summary.first.nodes[0] in range(3)

    @rule(rank=st.integers(0, 2), agent=st.sampled_from("ab"), odd=st.integers(0, 19))
    def connect(self, rank, agent, odd):
        self.connect_as(rank, {"agent": agent} | ODD.get(odd, {}))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rank=st.integers(0, 2), odd=st.integers(0, 9))
    def ask_again(self, data, rank, odd):
        """Send one more join request on a connection: nobody has two node ranks."""
        connection = data.draw(st.sampled_from(sorted(self.open)))
        self.receive(connection, request_of(rank) | ODD.get(odd, {}))
        assert connection not in self.open

    @rule()
    def start(self):
        """Let those come that are missing, and all join."""
        for rank in range(3):
            if rank not in self.coordinator.members.agents:
                self.connect_as(rank, {})
        for rank in range(3):
            if rank in self.coordinator.members.agents:
                self.tell(self.coordinator.members.agents[rank].connection, Join())
        for connection in sorted(self.prepared):
            if connection in self.prepared:
                self.confirm_as(connection)

    @rule()
    def finish(self):
        """Let all finish who are there."""
        number = self.rounds.round
        for agent in list(self.coordinator.members.agents.values()):
            self.tell(agent.connection, Done(number))

    @rule(
        request=st.dictionaries(
            st.sampled_from([*request_of(0)]), json_values, max_size=3
        ),
        is_whole=st.booleans(),
    )
    def connect_with_anything(self, request, is_whole):
        self.request(request_of(0) | request if is_whole else request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def join(self, data):
        self.tell(data.draw(st.sampled_from(sorted(self.open))), Join())

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def confirm(self, data):
        self.confirm_as(data.draw(st.sampled_from(sorted(self.prepared))))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        kind=st.sampled_from(
            [Done, Died, Died, GaveUp, Read, Bye, Heartbeat, WantsReport, Printed]
        ),
        behind=st.sampled_from([0, 0, 0, 1]),
        failure=failures,
        worker=worker_failures,
    )
    def send(self, data, kind, behind, failure, worker):
        connection = data.draw(st.sampled_from(sorted(self.open)))
        number = self.rounds.round - behind
        values = {Done: (number,), Died: (worker, number), GaveUp: (failure,)}
        self.tell(connection, kind(*values.get(kind, ())))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), message=odd_messages | no_messages)
    def send_anything(self, data, message):
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
            self.coordinator.tick()
            self.read_outbox()
            for connection in list(self.open) if answers else []:
                if self.coordinator.members.rank_of(connection) is not None:
                    self.tell(connection, Heartbeat())

    @invariant()
    def everybody_there_knows_of_a_failure(self):
        if self.coordinator.rounds.failure is not None:
            assert self.coordinator.members._ranks.keys() <= self.informed

    @invariant()
    def nobody_is_two(self):
        agents = self.coordinator.members.agents
        assert self.coordinator.members._ranks == {
            a.connection: r for r, a in agents.items()
        }
        assert self.coordinator.members._ranks.keys() <= self.open
        assert self.coordinator.roster.ready <= agents.keys()
        candidates = self.coordinator.members.candidates.values()
        assert {each.connection for each in candidates} <= self.open

    @invariant()
    def it_ends_once(self):
        assert not (self.is_finished and self.coordinator.rounds.failure)
        assert self.coordinator.rounds.failure == self.first or not self.informed
        assert self.rounds.round <= 2


AnyCoordinator.TestCase.settings = hypothesis_settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAnyCoordinator = AnyCoordinator.TestCase
