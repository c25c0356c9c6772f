"""Whatever agents and strangers send in any order, the coordinator stays consistent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.simulated_job import BAD, CLOSED, STORE, SimulatedJob, request_of
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    Add,
    Ask,
    Bye,
    Check,
    Confirm,
    Died,
    Done,
    Ended,
    GaveUp,
    Get,
    Go,
    Heartbeat,
    Join,
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
)
from torchrun_hpc.wire import WireError

ENDS = ("close", "reset")

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


ODD: Any = {0: {"nodes": 4}, 1: {"run_id": "x"}, 2: {"spares": 1}, 3: {"protocol": 5}}


class AnyCoordinator(RuleBasedStateMachine):
    """Agents that do what agents do, and a peer that sends anything at all."""

    def __init__(self):
        super().__init__()
        self.job = SimulatedJob(max_restarts=2, join_timeout=40)
        self.job.confirms = False
        self.members = self.job.coordinator.members
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
                self.joined.add(self.members.rank_of(connection))
            self.job.coordinator.receive(connection, message)
        except WireError:
            self.lose(connection)
        self.read_sent()

    def tell(self, connection, message):
        self.receive(connection, wire.encode(message, FROM_AGENT))

    def lose(self, connection):
        self.open.remove(connection)
        self.prepared.pop(connection, None)
        self.job.coordinator.disconnected(connection)

    def connect_as(self, rank, changes):
        self.request(request_of(rank) | changes)

    def request(self, request):
        self.next += 1
        self.open.add(self.next)
        try:
            sent = self.job.request(self.next, request)
        except WireError:
            self.lose(self.next)
            sent = {}
        self.read_sent(sent)

    def confirm_as(self, connection):
        record = self.prepared.pop(connection)
        store = None if self.members.rank_of(connection) else STORE
        self.tell(connection, Confirm(record.term, record.round, store))

    def read_sent(self, sent=None):
        """Handle all that was sent, and what follows from it."""
        sent = sent or self.job.sent()
        for connection, message in self.job.records:
            if connection in self.open and isinstance(message, Prepare):
                self.prepared[connection] = message.record
        self.job.records.clear()
        for connection, messages in sent.items():
            for message in messages:
                if connection in self.open and message not in ENDS:
                    self.arrived(connection, message)
        if any(isinstance(m, Go) for messages in sent.values() for m in messages):
            self.joined.clear()
        closed = {each for each, messages in sent.items() if messages[-1] in ENDS}
        for connection in closed & self.open:
            self.lose(connection)
        if sent:
            self.read_sent()

    def arrived(self, connection, message):
        match message:
            case Go():
                assert self.job.connected == {0, 1, 2}
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
            if rank not in self.members.agents:
                self.connect_as(rank, {})
        for rank in range(3):
            if rank in self.members.agents:
                self.tell(self.members.agents[rank].connection, Join())
        for connection in sorted(self.prepared):
            if connection in self.prepared:
                self.confirm_as(connection)

    @rule()
    def finish(self):
        """Let all finish who are there."""
        number = self.job.rounds.round
        for agent in list(self.members.agents.values()):
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
        number = self.job.rounds.round - behind
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
        self.read_sent()

    @rule(seconds=st.integers(1, 40), answers=st.booleans())
    def pass_time(self, seconds, answers):
        for _ in range(seconds):
            self.job.coordinator.tick()
            self.read_sent()
            for connection in list(self.open) if answers else []:
                if self.members.rank_of(connection) is not None:
                    self.tell(connection, Heartbeat())

    @invariant()
    def everybody_there_knows_of_a_failure(self):
        if self.job.failure is not None:
            assert self.members._ranks.keys() <= self.informed

    @invariant()
    def nobody_is_two(self):
        agents = self.members.agents
        assert self.members._ranks == {a.connection: r for r, a in agents.items()}
        assert self.members._ranks.keys() <= self.open
        assert self.job.roster.ready <= agents.keys()
        candidates = self.members.candidates.values()
        assert {each.connection for each in candidates} <= self.open

    @invariant()
    def it_ends_once(self):
        assert not (self.job.is_finished and self.job.failure)
        assert self.job.failure == self.first or not self.informed
        assert self.job.rounds.round <= 2


AnyCoordinator.TestCase.settings = hypothesis_settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestAnyCoordinator = AnyCoordinator.TestCase
