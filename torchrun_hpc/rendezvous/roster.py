"""The coordinator's nodes: the connected agents, and who takes part.

With spares, the workers of an unreachable node may continue, perhaps with another
coordinator. So a new round waits until their leases end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import __version__, limits
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.names import ranks_by
from torchrun_hpc.rendezvous import record as records
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.messages import (
    Answering,
    Differ,
    Excluded,
    Silent,
    Unproved,
)
from torchrun_hpc.rendezvous.protocol import (
    Close,
    Ended,
    Heartbeat,
    JoinRequest,
    Prepare,
    Version,
)
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from collections.abc import Set as AbstractSet

    from torchrun_hpc.rendezvous.messages import NewsOfCoordinator
    from torchrun_hpc.rendezvous.protocol import (
        FromCoordinator,
        Outgoing,
        Present,
        Settings,
    )
    from torchrun_hpc.rendezvous.record import Address, Record, Term

_SHORT = 200  # characters of a refused agent's values, or of a reason to exclude a node
_MOST_UNPROVED = 8  # addresses that the user reads
_COMPARED = (Refused.STARTED, Refused.NODES, Refused.RUN_ID, Refused.SPARES)
_DIFFERENT = {
    Refused.VERSION: "torchrun_hpc {} instead of {}",
    Refused.NODES: "{} nodes instead of {}",
    Refused.RUN_ID: "--rdzv_id={} instead of {}",
    Refused.SPARES: "--hpc-spares={} instead of {}",
    Refused.STARTED: "{} instead of {}",
    Refused.TAKEN: "process {} on {} instead of process {} on {}",
}


@dataclass
class Agent:
    """An accepted agent, or one that claims the node rank of another.

    `silent_for` is in seconds. `heartbeat` is its last answer, by its own clock. The
    loss of an agent counts only if it `has_joined` a round.
    """

    connection: Hashable
    request: JoinRequest
    silent_for: int = 0
    heartbeat: float = 0.0
    has_joined: bool = False


class Rejection(NamedTuple):
    """A refused agent. `rank` is ``None`` if the job has no such rank."""

    reason: Refused
    rank: int | None
    text: str


class Members:
    """The connected agents of a job, by node rank.

    `hosts` are the names of all that have been connected. Agents with node ranks in
    `accounted_for` have been connected, or never will be. `unread` connections have not
    confirmed a failure. `candidates` claim the node rank of another agent. `unproved`
    are addresses of callers without a proof, and whether the user has read each.
    """

    def __init__(self, settings: Settings, outbox: list[Outgoing]) -> None:
        self.agents: dict[int, Agent] = {}
        self.hosts: dict[int, str] = {}
        self.accounted_for: set[int] = set()
        self.unread: set[Hashable] = set()
        self._settings = settings
        self._outbox = outbox
        self._ranks: dict[Hashable, int] = {}
        self.candidates: dict[int, Agent] = {}
        self.unproved: dict[str, bool] = {}
        self._key = ""  # the name of this node's key
        self._silent: set[int] = set()  # agents reported as silent
        self.seconds = 0
        limit = settings.silence_timeout // 3
        self._heartbeat_interval = min(limits.HEARTBEAT_INTERVAL, max(1, limit))

    def rank_of(self, connection: Hashable) -> int | None:
        """Return the node rank of a connected agent, or ``None``."""
        return self._ranks.get(connection)

    # --- admission ----------------------------------------------------------------

    def examine(
        self, connection: Hashable, request: JoinRequest | Version
    ) -> JoinRequest | Rejection:
        """Return the request of an agent that belongs to the job, or refuse it."""
        if isinstance(request, Version):
            releases = request.release, __version__
            return self._refuse(connection, Refused.VERSION, request.rank, *releases)
        for reason in _COMPARED:
            value = getattr(request, reason.value)
            expected = getattr(self._settings, reason.value)
            # An agent that only reports why it cannot start does not know the id.
            if value != expected and "" not in (value, expected):
                return self._refuse(connection, reason, request.rank, value, expected)
        return request

    def _refuse(
        self, connection: Hashable, reason: Refused, rank: Any, *values: object
    ) -> Rejection:
        """Refuse an agent. It learns only the reason: anybody may have asked."""
        self._outbox += [(connection, reason), (connection, Close.CLOSE)]
        is_rank = type(rank) is int and 0 <= rank < self._settings.nodes
        shown = (printable(str(value), _SHORT) for value in values)
        text = _DIFFERENT[reason].format(*shown)
        return Rejection(reason, rank if is_rank else None, text)

    def accept(self, connection: Hashable, request: JoinRequest) -> None:
        """Accept an agent."""
        self.agents[request.rank] = Agent(connection, request)
        self.hosts[request.rank] = request.host
        self._ranks[connection] = request.rank
        self.accounted_for.add(request.rank)

    def joined(self, rank: int) -> None:
        """Take note that an agent has joined a round, so its loss counts."""
        self.agents[rank].has_joined = True

    def report_differences(self) -> None:
        """Report which nodes have different values of what must be equal."""
        agents = self.agents.items()
        ranks = ranks_by({rank: agent.request.compared for rank, agent in agents})
        if len(ranks) > 1:
            self.report(Differ({value: tuple(ranks[value]) for value in ranks}))

    def remove(self, rank: int) -> Hashable:
        """Remove an agent, and reset its connection; return this connection."""
        connection = self.agents.pop(rank).connection
        del self._ranks[connection]
        self.unread.discard(connection)
        self._silent.discard(rank)
        self._outbox.append((connection, Close.RESET))
        return connection

    def reset(self) -> None:
        """Reset the connections of all agents and candidates."""
        for agent in (*self.agents.values(), *self.candidates.values()):
            self._outbox.append((agent.connection, Close.RESET))

    # --- candidates ---------------------------------------------------------------

    def claim(self, connection: Hashable, request: JoinRequest) -> None:
        """Keep a second agent of a node rank as a candidate.

        Perhaps the agent was started again, and the end of its first connection has not
        arrived yet. A heartbeat shows whether the first agent still runs.
        """
        if older := self.candidates.get(request.rank):
            self._outbox.append((older.connection, Close.CLOSE))
        self.candidates[request.rank] = Agent(connection, request)
        self._send_heartbeat(self.agents[request.rank])

    def refuse_candidate(self, rank: int) -> Rejection:
        """Refuse a candidate, because the first agent has just answered."""
        second, first = self.candidates.pop(rank), self.agents[rank].request
        who = second.request.pid, second.request.host, first.pid, first.host
        return self._refuse(second.connection, Refused.TAKEN, rank, *who)

    def forget_candidate(self, connection: Hashable) -> None:
        """Forget a candidate whose connection has ended."""
        for rank, candidate in list(self.candidates.items()):
            if candidate.connection == connection:
                del self.candidates[rank]

    # --- heartbeats ---------------------------------------------------------------

    def answered(self, rank: int, heartbeat: float | None = None) -> None:
        """Take note that an agent has sent something, perhaps a heartbeat."""
        agent = self.agents[rank]
        agent.silent_for = 0
        agent.heartbeat = agent.heartbeat if heartbeat is None else heartbeat

    def tick(self, seconds: int) -> None:
        """Count a second, and send the heartbeats that are due.

        With spares, an agent's silence is counted in the real `seconds`, because the
        members expect this coordinator to give up in time.
        """
        self.seconds += 1
        for rank, agent in self.agents.items():
            agent.silent_for += seconds if self._settings.has_spares else 1
            if (self.seconds + rank) % self._heartbeat_interval == 0:  # spread
                self._send_heartbeat(agent)
        for candidate in self.candidates.values():
            candidate.silent_for += 1

    def silent(self, seconds: int) -> list[int]:
        """Return the node ranks of agents that have been silent for so long."""
        return [rank for rank, a in self.agents.items() if a.silent_for >= seconds]

    def replaced(self) -> list[Hashable]:
        """Return the connections of agents that their candidates replace.

        These agents have not answered since the candidates came.
        """
        claimed, limit = self.candidates.items(), limits.CANDIDATE_TIMEOUT
        ranks = [r for r, second in claimed if second.silent_for >= limit]
        return [self.agents[rank].connection for rank in ranks]

    def report_silence(self) -> None:
        """Report which agents do not answer, and which answer again."""
        silent = self.silent(limits.SILENCE_REPORT)
        news = [rank for rank in silent if rank not in self._silent]
        again = self._silent.difference(silent)
        answering = [rank for rank in self.agents if rank in again]
        self._silent = set(silent)
        if news:
            left = self._settings.silence_timeout - limits.SILENCE_REPORT
            self.report(Silent(tuple(news), limits.SILENCE_REPORT, left))
        if answering:
            self.report(Answering(tuple(answering)))

    def came_unproved(self, address: str, key: str) -> None:
        """Report the address of a caller without a proof, once for each address.

        `key` names this node's key. A program on this node can use all of 127.0.0.0/8.
        """
        address = "127.0.0.1" if address.startswith("127.") else address
        self._key = key
        if len(self.unproved) < _MOST_UNPROVED:
            self.unproved.setdefault(address, False)
            self.report_unproved()  # at once: the job may be ending

    def report_unproved(self) -> None:
        """Report the addresses of callers without a proof, each once."""
        for address, is_told in self.unproved.items():
            news = Unproved(address, self._key)
            self.unproved[address] = is_told or self.report(news)

    def _send_heartbeat(self, agent: Agent) -> None:
        self._outbox.append((agent.connection, Heartbeat(agent.heartbeat)))

    # --- messages -----------------------------------------------------------------

    def send(self, rank: int, message: FromCoordinator) -> None:
        """Send a message to an agent, if it is connected."""
        if rank in self.agents:
            self._outbox.append((self.agents[rank].connection, message))

    def send_all(self, message: FromCoordinator) -> None:
        """Send a message to all agents."""
        self._outbox += [(agent.connection, message) for agent in self.agents.values()]

    def report(self, news: NewsOfCoordinator) -> bool:
        """Send news for the user to this node's agent; return whether there is one."""
        self.send(self._settings.coordinator, news)
        return self._settings.coordinator in self.agents

    def inform(self, rank: int, ending: Ended) -> None:
        """Tell an agent how the job ended. This node's agent also reports it."""
        is_own = rank == self._settings.coordinator
        reports = ending.failure is not None and is_own
        self.send(rank, replace(ending, reports=True) if reports else ending)
        agent = self.agents[rank]
        if agent.silent_for < self._settings.silence_timeout:
            self.unread.add(agent.connection)


class Roster:
    """The roster of all nodes.

    Attributes:
        record: What all nodes know of the job.
        ready: Nodes that wait for the next round, because their workers have ended.
        present: Connected nodes that have sent what they know.
        addresses: The addresses of all nodes that have joined so far.
        gone: Nodes whose agent has ended, and their last round.
        lost: Active nodes lost since the last round, and how.
        late: Active nodes that are not waited for.
        leases: The seconds for which nodes may still have workers, at most.
        coordinators: Nodes that may coordinate some of the others.
    """

    def __init__(self, settings: Settings, members: Members, record: Record) -> None:
        self.record = record
        self.ready: set[int] = set()
        self.present: set[int] = set()
        self.addresses = {**record.addresses}
        self.gone: dict[int, int] = {}
        self.lost: dict[int, Failure] = {}
        self.late: set[int] = set()
        self.leases: dict[int, int] = {}
        self.coordinators = {record.term[1]}
        self._settings = settings
        self._members = members
        self._successors: dict[int, Address] = {}  # as all nodes know them

    # --- who can take part --------------------------------------------------------

    @property
    def active(self) -> tuple[int, ...]:
        """The active node of each node rank in the last round that was formed."""
        return self.record.active

    @property
    def wanted(self) -> int:
        """The number of active nodes in a round."""
        return len(self.active)

    @property
    def is_complete(self) -> bool:
        """Whether so many nodes are connected that the others are too few for a round.

        Without spares, no other node can coordinate them.
        """
        fit = self.present - self.record.excluded.keys()
        return not self._settings.has_spares or len(fit) >= self.wanted

    @property
    def left(self) -> set[int]:
        """Nodes that may be active again."""
        out = self.gone.keys() | self.record.excluded.keys()
        return set(range(self._settings.nodes)) - out

    @property
    def away(self) -> set[int]:
        """Nodes that are neither connected nor gone, and may be a world elsewhere."""
        connected = self._members.agents.keys()
        return set(range(self._settings.nodes)) - self.gone.keys() - connected

    def absent(self, *, has_begun: bool) -> set[int]:
        """Return nodes in `away` that have been connected, or active in a round."""
        return self.away & {*self.addresses, *(self.active if has_begun else ())}

    def assigned(self) -> tuple[int, ...] | None:
        """Return the active nodes of the next round; ``None`` if some are missing."""
        if len(self.ready) < self.wanted:
            return None
        # Without spares, nodes do not send what they know.
        ready = self.ready & self.present if self._settings.has_spares else self.ready
        leaving = self.lost.keys() | self.late
        return records.assigned(self.record, ready, leaving)

    @property
    def to_confirm(self) -> set[int]:
        """The nodes that confirm a round: all active ones, so that no other can begin.

        Without spares, no other round can begin. Then only node rank 0 confirms, with
        the workers' store.
        """
        return {*self.active} if self._settings.has_spares else {self.active[0]}

    def prepare(self, active: tuple[int, ...], term: Term, number: int) -> None:
        """Send the record of a new round to all nodes that need it."""
        leased = tuple(sorted(self.leases))
        self.record = replace(
            self.record, term=term, round=number, active=active, leased=leased
        )
        self._successors = self._first_addresses()
        has_spares, agents = self._settings.has_spares, self._members.agents
        self.prepare_again(agents.keys() if has_spares else self.to_confirm)

    def began(self) -> None:
        """Handle that the round has begun: no older workers are left."""
        for old in (self.lost, self.late, self.coordinators):
            old.clear()
        self.record = replace(self.record, leased=())

    def exclude(self, node: int, reason: str) -> None:
        """Exclude a node from the job."""
        self.ready.discard(node)
        reason = printable(reason, _SHORT)
        self._replace(records.excluded(self.record, node, reason))

    def blame(self, node: int) -> None:
        """Record that a worker of an active node was the first to fail."""
        spares = self.ready - {*self.active} - self.record.excluded.keys()
        self._replace(records.blamed(self.record, node, has_spare=bool(spares)))

    def _replace(self, record: Record) -> None:
        changed = record.excluded.keys() ^ self.record.excluded.keys()
        self.record = record
        for node in changed:
            reason = record.excluded.get(node, "")
            for each in {self._settings.coordinator, node}:
                self._members.send(each, Excluded(node, reason))

    def lose(self, node: int, failure: Failure) -> None:
        """Record the loss of an active node."""
        self.record = records.lost(self.record, node)
        self.lost[node] = failure

    def removed(self, node: int) -> None:
        """Handle that a node is no longer connected."""
        self.ready.discard(node)
        self.present.discard(node)

    def why(self, cause: Failure | None) -> Failure:
        """Return why the job cannot continue; `cause` is the latest restart's cause."""
        if self.gone:
            return Failure(Kind.LOST, tuple(sorted(self.gone)))
        if out := self.record.excluded:
            nodes = tuple(sorted(out))
            return Failure(Kind.EXCLUDED, nodes, text=out[nodes[-1]])
        return self.loss or cause or Failure(Kind.AGENT, text="no restart is left")

    @property
    def loss(self) -> Failure | None:
        """How the first of the lost nodes was lost."""
        return next(iter(self.lost.values()), None)

    def ending(
        self, failure: Failure | None, *, has_begun: bool, has_quorum: bool
    ) -> Ended:
        """Return the message about the end: which nodes were lost or excluded.

        If this node has just taken over, others may be on their way.
        """
        settings, members = self._settings, self._members
        bad = set(range(settings.nodes)) if has_begun and settings.has_spares else set()
        if members.seconds < settings.silence_timeout:
            bad &= self.gone.keys() | members.accounted_for | self.record.losses.keys()
        bad = bad - members.agents.keys() | self.record.excluded.keys()
        is_certain = has_quorum or len(self.away) < self.wanted
        return Ended(failure, out_at_end=tuple(sorted(bad)), is_certain=is_certain)

    # --- leases -------------------------------------------------------------------

    @property
    def longest_run(self) -> int:
        """A node's lease: how many seconds its workers may run if nobody can end them.

        Their agent ends them if it has not heard from the coordinator for so long.
        """
        return self._settings.silence_timeout + self._settings.kill

    def lease(self, nodes: Iterable[int]) -> None:
        """Begin the leases of these nodes, and end those of all others.

        Without spares, all nodes must join again, and each ends its workers before.
        """
        self.leases = self._longest(nodes) if self._settings.has_spares else {}

    def _longest(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the seconds until each of these nodes has certainly no workers."""
        limit = self.longest_run
        connected = {self._settings.coordinator, *self._members.agents}
        elsewhere = self.coordinators - connected - self.gone.keys()
        # Until they miss the connected nodes, they may renew the leases of others.
        renews = elsewhere or self.record.leased
        late = self._settings.silence_timeout if renews else 0
        return {n: limit if {n} == elsewhere else limit + late for n in nodes}

    def ended(self, node: int, number: int, *, has_begun: bool) -> None:
        """Record that a node's agent has ended; `number` is its last round."""
        self.gone[node] = number
        self.leases.pop(node, None)
        shorter = self._longest(self.leases)
        self.leases = {n: min(s, shorter[n]) for n, s in self.leases.items()}
        if node in self.active and has_begun:
            self.lost.setdefault(node, Failure(Kind.LOST, (node,)))

    def count(self, *, has_quorum: bool) -> None:
        """Count a second of the leases, if there is a quorum.

        Otherwise begin them again: the other nodes may be a world that continues. It
        has ended when its nodes join this coordinator.
        """
        if has_quorum:
            self.leases = {n: left - 1 for n, left in self.leases.items() if left > 1}
        else:
            self.lease(self.leases)

    # --- what nodes say, and are told ---------------------------------------------

    def came(self, node: int, state: Present) -> tuple[int, int] | None:
        """Record a node's address.

        If it saw the end of an absent node's agent, return that node and its round.
        """
        self.addresses[node] = state.address
        self.present.add(node)
        self.gone.pop(node, None)
        gone, _ = state.gone or (-1, -1)
        agents = self._members.agents
        is_away = gone in range(self._settings.nodes) and gone not in agents
        return state.gone if is_away else None

    def adopt(self, record: Record) -> None:
        """Use another coordinator's record; its round may have begun."""
        self.coordinators.add(record.term[1])
        if record.age > self.record.age:
            self.addresses = {**record.addresses, **self.addresses}
            self.record = record
        running = {*self.leases, *record.active, *record.leased} - self.ready
        self.gone = {n: r for n, r in self.gone.items() if r >= record.round}
        self.lease(running - self.gone.keys())

    def share_news(self) -> None:
        """Send the record to all nodes when other nodes than before may take over."""
        if (first := self._first_addresses()) != self._successors:
            self._successors = first
            whole, rest = self._shared()
            for node in sorted(self._members.agents):
                self._members.send(node, whole if node in first else rest)

    def prepare_again(self, nodes: AbstractSet[int]) -> None:
        """Send nodes the record of a round that they have not confirmed."""
        whole, rest = map(Prepare, self._shared())
        for node in sorted(nodes & self._members.agents.keys()):
            self._members.send(node, whole if node in self._successors else rest)

    def _shared(self) -> tuple[Record, Record]:
        """Return the record for nodes that may take over, and for all others.

        The former need all addresses. The others need only the addresses of nodes that
        may take over: if more nodes are lost, the job cannot continue.
        """
        nodes = self.present & self.addresses.keys()
        addresses = {node: self.addresses[node] for node in nodes}
        self.record = replace(self.record, addresses=addresses)
        return self.record, replace(self.record, addresses=self._successors)

    def _first_addresses(self) -> dict[int, Address]:
        fit = self.present & self.addresses.keys() - self.record.excluded.keys()
        first = sorted(fit)[: self._settings.spares + 1]
        return {node: self.addresses[node] for node in first}
