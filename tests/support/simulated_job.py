"""A job in memory: a coordinator, its members, and what they send each other.

There is no socket, no thread and no clock. Each message passes through JSON, as on the
network, and the test sees what the coordinator sends because of it::

    job = SimulatedJob(max_restarts=1).at_work()
    assert job.died(worker_failure(5)) == to(range(3), over(0))
    assert job.join(0, 1, 2) == job.begun(1, (0, 1, 2))
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.messages import News
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    LINE_LIMIT,
    Close,
    Died,
    Done,
    Ended,
    Go,
    Heartbeat,
    Join,
    JoinRequest,
    Over,
    Prepare,
    Present,
    Report,
    Settings,
    WantsReport,
    Welcome,
    read_request,
)
from torchrun_hpc.rendezvous.record import Record, first_record
from torchrun_hpc.rendezvous.rounds import Phase
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from typing_extensions import Self, Unpack

    from torchrun_hpc.rendezvous.record import Address
    from torchrun_hpc.rendezvous.roster import Roster
    from torchrun_hpc.rendezvous.rounds import Rounds

# What was sent: by connection, its messages in order.
Sent: TypeAlias = "dict[Hashable, list[Any]]"

# Seconds.
SILENCE, KILL, SPARE_AFTER, JOIN = 40, 5, 60, 200
LEASE = SILENCE + KILL

STORE = ("10.20.0.1", 40000)
SETTINGS = Settings(
    run_id="mine",
    nodes=3,
    coordinator=0,
    silence_timeout=SILENCE,
    join_timeout=JOIN,
    spare_after=SPARE_AFTER,
    kill=KILL,
)
# Its release is not `__version__`: the coordinator refuses another version with its own
# release, and a test must tell that from the agent's.
REQUEST = JoinRequest("mine", 3, 0, "n0", 100, "0.1.0", "agent 0")

_OF_WORKERS = {field.name for field in fields(WorkerPart)}


class Changes(TypedDict, total=False):
    """The settings that a test may change."""

    run_id: str
    nodes: int
    coordinator: int
    silence_timeout: int
    join_timeout: int
    max_restarts: int
    started: str
    signals_on_loss: bool
    health_check: int


# --- what agents and the coordinator send ---------------------------------------------


def worker_failure(rank: int, **changes: Any) -> Failure:
    """Return how a worker failed, of four on each of three nodes.

    Args:
        rank: Its global rank.
        changes: ``node``, and other fields of the failure, or of its part for a worker.
    """
    node = changes.pop("node", rank // 4)
    part: dict[str, Any] = {"size": 12, "local_rank": rank % 4}
    part |= {k: changes.pop(k) for k in {*changes} & _OF_WORKERS}
    values = {"code": 1, "time": 1.7e9} | changes
    return Failure(Kind.WORKER, (node,), **values, worker=WorkerPart(rank, **part))


def agent_of(rank: int) -> dict[str, Any]:
    """Return what differs in the join requests of a job's agents."""
    return {
        "rank": rank,
        "host": f"n{rank}",
        "pid": 100 + rank,
        "agent": f"agent {rank}",
    }


def request_of(rank: int, **changes: Any) -> dict[str, Any]:
    """Return the first line of an agent, as plain data."""
    return {**wire.encode(replace(REQUEST, **agent_of(rank))), **changes}


def as_sent(message: Any, kind: Any) -> Any:
    """Return a message as it arrives on the other side, and check that it is equal."""
    line = wire.to_line(wire.encode(message, kind))
    assert len(line) <= LINE_LIMIT
    try:
        arrived = wire.decode(kind, wire.from_json(line))
    except WireError as error:  # which would only end a connection
        raise AssertionError(message) from error
    assert repr(arrived) == repr(message)  # text, because NaN is not itself
    return arrived


def each_wrong(values: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return changes of plain data: each field with each value that it cannot have."""
    return [{name: value} for name in values for value in values[name]]


def to(connections: Iterable[Hashable], *messages: Any) -> Sent:
    """Return what is sent if each of these connections gets the same messages."""
    return {connection: list(messages) for connection in connections}


def welcome(number: int = 0, *, age: Any = None, coordinator: int = 0) -> Welcome:
    """Return the answer to an agent that joins before a round."""
    return Welcome(number, (number - 1, (0, 0)) if age is None else age, coordinator)


def go(number: int) -> Go:
    """Return the message with which a round begins."""
    return Go(number, STORE)


def over(number: int) -> Over:
    """Return the message that a round is over."""
    return Over(number, hangs=False)


def address(rank: int) -> Address:
    """Return where a member listens for the others."""
    return f"n{rank}", 4000 + rank


def addresses(*ranks: int) -> dict[int, Address]:
    """Return the addresses of some members, as they are in a record."""
    return {rank: address(rank) for rank in ranks}


KILLED = worker_failure(5, code=-9)
# Causes: a fault of the script, and a consequence of a fault on another node.
BAD = "ValueError: bad batch {}"
CLOSED = "RuntimeError: Connection closed by peer [10.20.0.{}]:4711"


# --- the job --------------------------------------------------------------------------


class SimulatedJob:
    """A coordinator, the members that are connected to it, and what it has sent.

    A connection is the rank of its node, unless a test says otherwise. Members answer
    at once: they say what they know when they are accepted, and confirm a round.

    Args:
        record: The coordinator's knowledge of the job; by default, the job is new.
        spares: How many of the nodes are spares. There are three others by default.
        coordinates: Whether it coordinates from the beginning, or is on standby.
        **changes: Other settings.

    Attributes:
        member: The member on the coordinator's node.
        confirms: Whether members confirm the rounds that the coordinator prepares.
        news: What the coordinator's node reports to the user, in order.
        records: Each record that was sent, with its connection: prepared, or known.
        heartbeats: Each heartbeat that was sent, with its connection.
    """

    def __init__(
        self,
        record: Record | None = None,
        *,
        spares: int = 0,
        coordinates: bool = True,
        **changes: Unpack[Changes],
    ) -> None:
        settings = replace(SETTINGS, nodes=3 + spares, spares=spares)
        self.settings = settings = replace(settings, **changes)
        coordinator = settings.coordinator if record is None else record.term[1]
        self._first = first_record(
            settings.nodes, spares * settings.has_spares, coordinator
        )
        self.member = self._member(settings.coordinator, record or self._first)
        self.coordinator = Coordinator(settings, self.member)
        if coordinates:
            self.coordinator.coordinate(self.member.record)
        self.confirms = True
        self.news: list[Any] = []
        self.records: list[tuple[Hashable, Prepare | Record]] = []
        self.heartbeats: list[tuple[Hashable, Heartbeat]] = []
        self._members: dict[Hashable, Member] = {}

    def _member(self, rank: int, record: Record) -> Member:
        member = Member(rank, record)
        if self.settings.has_spares:
            member.listens(address(rank), addresses(*range(self.settings.nodes)))
        return member

    # --- what it knows ------------------------------------------------------------

    @property
    def rounds(self) -> Rounds:
        """The rounds of the job."""
        return self.coordinator.rounds

    @property
    def roster(self) -> Roster:
        """The job's nodes, as the coordinator knows them."""
        return self.coordinator.roster

    @property
    def record(self) -> Record:
        """What all nodes know of the job."""
        return self.roster.record

    @property
    def active(self) -> tuple[int, ...]:
        """The active nodes, in the order of their node ranks."""
        return self.record.active

    @property
    def failure(self) -> Failure | None:
        """Why the job has failed."""
        return self.rounds.failure

    @property
    def is_running(self) -> bool:
        """Whether workers run."""
        return self.rounds.phase is Phase.RUN

    @property
    def is_finished(self) -> bool:
        """Whether all workers have finished."""
        return self.rounds.phase is Phase.FINISHED

    @property
    def connected(self) -> set[int]:
        """The ranks of the accepted agents."""
        return {*self.coordinator.members.agents}

    @property
    def absent(self) -> set[int]:
        """The nodes that the coordinator looks for."""
        return {*(self.coordinator.absent(ask_all=False) or ())}

    def reported(self) -> Any:
        """Let node 0 ask which workers have failed; return the summary, or None."""
        ((message,),) = self.send(0, WantsReport()).values()
        assert isinstance(message, Report)
        return message.summary

    # --- messages -----------------------------------------------------------------

    def sent(self) -> Sent:
        """Return what was sent since the last call: connection to messages.

        The end of a connection is the text "close" or "reset". `news`, `records` and
        `heartbeats` are left out.
        """
        sent = defaultdict(list)
        while self.coordinator.outbox:
            outbox = [*self.coordinator.outbox]
            self.coordinator.outbox.clear()
            for connection, message in outbox:
                if isinstance(message, Close):
                    sent[connection].append(message.name.lower())
                    continue
                arrived = as_sent(message, FROM_COORDINATOR)
                rank = self.coordinator.members.rank_of(connection)
                if isinstance(arrived, Prepare | Record):
                    self.records.append((connection, arrived))
                elif isinstance(arrived, News) and rank == self.settings.coordinator:
                    self.news.append(arrived)
                elif isinstance(arrived, Heartbeat):
                    self.heartbeats.append((connection, arrived))
                else:
                    sent[connection].append(arrived)
                if rank is not None:
                    self._answer(connection, rank, arrived)
        return dict(sent)

    def _answer(self, connection: Hashable, rank: int, message: Any) -> None:
        """Let a member answer at once what it is asked."""
        if isinstance(message, Welcome):
            member = self._member(rank, self._first)
            member = self._members.setdefault(connection, member)
            for reply in member.accepted(message):
                self.receive(connection, reply)
        elif isinstance(message, Prepare) and self.confirms:
            self._confirm(connection, message.record)

    def _confirm(self, connection: Hashable, record: Record) -> None:
        member = self._members[connection]
        if member.prepared(record) is not None:
            self.receive(connection, member.confirmation(record, lambda: STORE))

    def receive(self, connection: Hashable, message: Any) -> None:
        """Let the coordinator handle a message."""
        self.coordinator.receive(connection, as_sent(message, FROM_AGENT))

    def send(self, connection: Hashable, message: Any) -> Sent:
        """Send a message; return what is sent because of it."""
        self.receive(connection, message)
        return self.sent()

    def send_line(self, connection: Hashable, data: Any) -> Sent:
        """Send what may be no message; then the server closes the connection.

        Raises:
            WireError: It is no message.
        """
        self.coordinator.receive(connection, wire.decode(FROM_AGENT, data))
        return self.sent()

    def request(self, connection: Hashable, request: dict[str, Any]) -> Sent:
        """Send the first line of a connection."""
        arrived = read_request(json.loads(json.dumps(request)))
        self.coordinator.request(connection, arrived)
        return self.sent()

    # --- what happens to its nodes ------------------------------------------------

    def connect(
        self,
        *ranks: int,
        connection: Hashable = None,
        knows: Record | None = None,
        is_done: bool = False,
        **changes: Any,
    ) -> Sent:
        """Let agents connect; return what is sent because of it.

        Args:
            ranks: Their node ranks.
            connection: The connection of the only one, if it is not its rank.
            knows: The record that they know; by default, that of a new job.
            is_done: Whether their workers have finished.
            **changes: Changes of their join requests.
        """
        sent: Sent = defaultdict(list)
        fits = {"nodes": self.settings.nodes, "spares": self.settings.spares}
        for rank in ranks:
            caller = rank if connection is None else connection
            self._members[caller] = member = self._member(rank, knows or self._first)
            member.is_done = is_done
            request = request_of(rank, **fits) | changes
            for each, messages in self.request(caller, request).items():
                sent[each] += messages
        return dict(sent)

    def join(self, *ranks: Hashable) -> Sent:
        """Let nodes join the next round; return what is sent since the first one."""
        for rank in ranks:
            self.receive(rank, Join())
        return self.sent()

    def come(self, *ranks: int) -> Sent:
        """Let nodes connect and join; return what is sent since the first joined."""
        self.connect(*ranks)
        return self.join(*ranks)

    def confirm(self, *ranks: int) -> Sent:
        """Let nodes confirm the round that was prepared, by default all active ones."""
        for rank in ranks or self.active:
            self._confirm(rank, self.record)
        return self.sent()

    def finish(self, *ranks: int) -> Sent:
        """Let nodes finish, by default all active ones; return what is sent."""
        for rank in ranks or self.active:
            self.receive(rank, Done(self.rounds.round))
        return self.sent()

    def died(
        self, worker: Failure, number: int | None = None, connection: Hashable = None
    ) -> Sent:
        """Let the agent of a worker's node report that it has failed in a round.

        Args:
            worker: How it failed.
            number: The round; by default, the last one that began.
            connection: The agent's; by default, the rank of the node.
        """
        agent = worker.nodes[0] if connection is None else connection
        number = self.rounds.began if number is None else number
        return self.send(agent, Died(worker, number))

    def lose(self, *connections: Hashable, ended: bool = False) -> Sent:
        """End connections; return what is sent because of it.

        Args:
            connections: The connections.
            ended: Whether the agents' processes have ended, as an end of file proves.
        """
        for connection in connections:
            self.coordinator.disconnected(connection, ended=ended)
        return self.sent()

    def gone(self, *ranks: int, number: int | None = None) -> None:
        """Let another member report that it saw the end of agents, in a round."""
        for rank in ranks:
            witness = next(each for each in self.connected if each != rank)
            record = self.record
            present = Present(
                address(witness),
                done=False,
                term=record.term,
                round=record.round,
                gone=(rank, record.round if number is None else number),
            )
            self.receive(witness, present)

    def wait(self, seconds: int, *silent: Hashable) -> dict[int, Sent]:
        """Let time pass; return what is sent, by second.

        Args:
            seconds: How long.
            silent: The connections that do not answer.
        """
        sent = {}
        for second in range(1, seconds + 1):
            self.coordinator.tick()
            for agent in [*self.coordinator.members.agents.values()]:
                if agent.connection not in silent:
                    self.receive(agent.connection, Heartbeat(1.0))
            if messages := self.sent():
                sent[second] = messages
        return sent

    def news_within(self, seconds: int, *silent: Hashable) -> dict[int, list[Any]]:
        """Let time pass, as `wait` does; return the news by second."""
        news = {}
        for second in range(1, seconds + 1):
            before = len(self.news)
            self.wait(1, *silent)
            if len(self.news) > before:
                news[second] = self.news[before:]
        return news

    def all_connected(self) -> Self:
        """Let all nodes connect."""
        self.connect(*range(self.settings.nodes))
        return self

    def at_work(self) -> Self:
        """Let all nodes connect and join: the first round runs."""
        self.come(*range(self.settings.nodes))
        assert self.is_running
        if self.settings.has_spares:
            self.wait(1)  # all hear where the others are
        return self

    def begun(self, number: int, active: Iterable[int]) -> Sent:
        """Return what is sent when a round begins; check the order of its nodes."""
        assert self.active == (*active,)
        return to(self.active, go(number))

    def ended(self, failure: Failure, **changes: Any) -> Sent:
        """Return what all agents are sent after a failure: one node reports it."""
        return {
            rank: [Ended(failure, reports=rank == self.settings.coordinator, **changes)]
            for rank in sorted(self.connected)
        }
