"""The coordinator's agents: admission, heartbeats, candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import __version__, wire
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.protocol import CLOSE, RESET, JoinRequest, Refusal
from torchrun_hpc.wire import WireError, printable

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torchrun_hpc.rendezvous.key_value_store import Outgoing
    from torchrun_hpc.rendezvous.protocol import Settings

# Seconds.
HEARTBEAT_INTERVAL = 5
CANDIDATE_TIMEOUT = 10  # for the first of two agents of a node rank to answer
SILENCE_REPORT = 30  # until a silent agent is reported

_SHORT = 200  # characters of a refused agent's values
_COMPARED = (Refusal.STARTED, Refusal.NODES, Refusal.RUN_ID, Refusal.SPARES)
_DIFFERENT = {
    Refusal.VERSION: "torchrun_hpc {} instead of {}",
    Refusal.NODES: "{} nodes instead of {}",
    Refusal.RUN_ID: "--rdzv_id={} instead of {}",
    Refusal.SPARES: "--hpc-spares={} instead of {}",
    Refusal.STARTED: "{} instead of {}",
    Refusal.TAKEN: "process {} on {} instead of process {} on {}",
}


@dataclass
class Agent:
    """An accepted agent, or one that claims the node rank of another.

    `silent_for` is in seconds. `heartbeat` is its last answer, by its own clock. Only
    the loss of an agent that `has_joined` a round counts.
    """

    connection: Hashable
    request: JoinRequest
    silent_for: int = 0
    heartbeat: float = True
    has_joined: bool = False


class Refused(NamedTuple):
    """A refused agent. `rank` is ``None`` if the job has no such rank."""

    reason: Refusal
    rank: int | None
    text: str


class Members:
    """The connected agents of a job, by node rank.

    `hosts` are the names of all that have been here. `seen` are node ranks of agents
    that have been connected, or never will be. `unread` connections have not confirmed
    a failure. `candidates` claim the node rank of another agent. `unproved` are
    addresses of callers without a proof, and whether the user has read each.
    """

    def __init__(self, settings: Settings, outbox: list[Outgoing]) -> None:
        self.agents: dict[int, Agent] = {}
        self.hosts: dict[int, str] = {}
        self.seen: set[int] = set()
        self.unread: set[Hashable] = set()
        self._settings = settings
        self._outbox = outbox
        self._ranks: dict[Hashable, int] = {}
        self.candidates: dict[int, Agent] = {}
        self.unproved: dict[str, bool] = {}
        self._silent: set[int] = set()  # reported ones
        self.seconds = 0
        limit = settings.silence_timeout // 3
        self._heartbeat_interval = min(HEARTBEAT_INTERVAL, max(1, limit))

    def rank_of(self, connection: Hashable) -> int | None:
        """Return the node rank of a connected agent, or ``None``."""
        return self._ranks.get(connection)

    # --- admission ----------------------------------------------------------------

    def examine(
        self, connection: Hashable, message: Mapping[str, Any]
    ) -> JoinRequest | Refused:
        """Return the request of an agent that belongs to the job, or refuse it.

        Raise `WireError` if it is no join request, or the second one.
        """
        version = message.get("protocol")
        candidates = (each.connection for each in self.candidates.values())
        if type(version) is not int or connection in candidates:
            raise WireError("not a join request, or the second one")
        rank, release = message.get("rank"), message.get("release")
        if version != protocol.VERSION:
            return self._refuse(connection, Refusal.VERSION, rank, release, __version__)
        request = wire.decode(JoinRequest, message)
        for reason in _COMPARED:
            theirs, own = (getattr(x, reason.value) for x in (request, self._settings))
            # An agent that only reports why it cannot start does not know the id.
            if theirs != own and "" not in (theirs, own):
                return self._refuse(connection, reason, rank, theirs, own)
        return request

    def _refuse(
        self, connection: Hashable, reason: Refusal, rank: Any = None, *values: Any
    ) -> Refused:
        """Refuse an agent. It hears only the reason: anybody may have asked."""
        self._outbox += [(connection, {"refused": reason.value}), (connection, CLOSE)]
        is_rank = type(rank) is int and 0 <= rank < self._settings.nodes
        shown = (printable(str(value), _SHORT) for value in values)
        text = _DIFFERENT[reason].format(*shown)
        return Refused(reason, rank if is_rank else None, text)

    def accept(self, connection: Hashable, request: JoinRequest) -> None:
        """Accept an agent."""
        self.agents[request.rank] = Agent(connection, request)
        self.hosts[request.rank] = request.host
        self._ranks[connection] = request.rank
        self.seen.add(request.rank)

    def remove(self, rank: int) -> Hashable:
        """Remove an agent; return its connection, which is reset."""
        connection = self.agents.pop(rank).connection
        del self._ranks[connection]
        self.unread.discard(connection)
        self._silent.discard(rank)
        self._outbox.append((connection, RESET))
        return connection

    def reset(self) -> None:
        """Reset the connections of all agents and candidates."""
        known = (*self.agents.values(), *self.candidates.values())
        self._outbox += [(each.connection, RESET) for each in known]

    # --- candidates ---------------------------------------------------------------

    def claim(self, connection: Hashable, request: JoinRequest) -> None:
        """Keep a second agent of a node rank as a candidate.

        Perhaps it was started again, and the first one's connection has not ended yet.
        A heartbeat shows whether the first one still runs.
        """
        if older := self.candidates.get(request.rank):
            self._outbox.append((older.connection, CLOSE))
        self.candidates[request.rank] = Agent(connection, request)
        self._send_heartbeat(self.agents[request.rank])

    def refuse_candidate(self, rank: int) -> Refused:
        """Refuse a candidate, because the first agent has just answered."""
        second, first = self.candidates.pop(rank), self.agents[rank].request
        who = second.request.pid, second.request.host, first.pid, first.host
        return self._refuse(second.connection, Refusal.TAKEN, rank, *who)

    def forget_candidate(self, connection: Hashable) -> None:
        """Forget a candidate whose connection has ended."""
        for rank, candidate in list(self.candidates.items()):
            if candidate.connection == connection:
                del self.candidates[rank]

    # --- heartbeats ---------------------------------------------------------------

    def answered(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take note that an agent has sent something."""
        agent = self.agents[rank]
        agent.silent_for = 0
        if type(heartbeat := message.get("heartbeat")) is float:
            agent.heartbeat = heartbeat

    def tick(self, seconds: int) -> None:
        """Count the passed seconds, and send the heartbeats that are due.

        Late seconds count only with spares: members expect this coordinator to give up
        in time.
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
        """Return the connections of agents whose candidates replace them.

        These agents have been silent for as long as the candidate has waited.
        """
        claimed = self.candidates.items()
        ranks = [r for r, second in claimed if second.silent_for >= CANDIDATE_TIMEOUT]
        return [self.agents[rank].connection for rank in ranks]

    def report_silence(self) -> None:
        """Report which agents do not answer, and which answer again."""
        silent = self.silent(SILENCE_REPORT)
        news = [rank for rank in silent if rank not in self._silent]
        again = self._silent.difference(silent)
        answering = [rank for rank in self.agents if rank in again]
        self._silent = set(silent)
        if news:
            left = self._settings.silence_timeout - SILENCE_REPORT
            self.report({"silent": news, "left": left})
        if answering:
            self.report({"answering": answering})

    def report_unproved(self) -> None:
        """Report the addresses of callers without a proof, each once."""
        for address, is_told in self.unproved.items():
            self.unproved[address] = is_told or self.report({"unproved": address})

    def _send_heartbeat(self, agent: Agent) -> None:
        self._outbox.append((agent.connection, {"heartbeat": agent.heartbeat}))

    # --- messages -----------------------------------------------------------------

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """Send a message to an agent, if it is connected."""
        if rank in self.agents:
            self._outbox.append((self.agents[rank].connection, message))

    def send_all(self, message: Mapping[str, Any]) -> None:
        """Send a message to all agents."""
        self._outbox += [(agent.connection, message) for agent in self.agents.values()]

    def report(self, message: Mapping[str, Any]) -> bool:
        """Send a message for the user to this node's own agent, if it is there."""
        self.send(self._settings.coordinator, message)
        return self._settings.coordinator in self.agents

    def inform(self, rank: int, message: Mapping[str, Any]) -> None:
        """Tell an agent how the job ended, and this node's own one to report it."""
        reports = "failed" in message and rank == self._settings.coordinator
        self.send(rank, {**message, "reports": True} if reports else message)
        agent = self.agents[rank]
        if agent.silent_for < self._settings.silence_timeout:
            self.unread.add(agent.connection)
