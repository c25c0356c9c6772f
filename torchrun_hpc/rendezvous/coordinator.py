"""What the head decides: who is there, when a round starts, and when all is over.

A state machine without clock or network. It is told what arrives and that a second
has passed, and leaves what is to be sent in `Coordinator.outbox`.

Time is counted in its own seconds, so that a job that is suspended for an hour is an
hour younger, and a clock that is set back or forth does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import __version__
from torchrun_hpc.rendezvous.protocol import (
    VERSION,
    Failure,
    JoinRequest,
    Kind,
    ProtocolError,
    Refusal,
    hello,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

# Seconds. After `SILENCE`, an agent that does not answer is named to the user.
BEAT = 5
PATIENCE = 10  # with an agent whose node rank another one claims
SILENCE = 30
FIRST_REPORT = 10
NEXT_REPORT = 30

# Characters that agents may leave in the store; torch needs 100 per node.
STORE_LIMIT = 64 * 2**20

# What may happen before all nodes are there, while the others are on their way.
_EARLY = (Kind.AGENT, Kind.LOST, Kind.REFUSED)

CLOSE: dict[str, Any] = {}  # in the outbox: end this connection


@dataclass(frozen=True)
class Settings:
    """What all agents of a job agree on.

    Attributes:
        job: The launch's identity.
        run_id: Torch's rendezvous id.
        nodes: Number of nodes.
        head: Node rank of the head.
        max_restarts: How often the job may restart.
        join_timeout: Seconds that a round waits for all nodes.
        silence_timeout: Seconds after which a silent agent ends the job.
    """

    job: str
    run_id: str
    nodes: int
    head: int
    max_restarts: int
    join_timeout: int
    silence_timeout: int


@dataclass
class _Agent:
    """An agent that was let in."""

    connection: Hashable
    said: JoinRequest
    quiet: int = 0  # seconds since it last said anything
    is_named: bool = False  # to the user, as silent
    has_joined: bool = False  # any round yet

    @property
    def answers_again(self) -> bool:
        """Whether it has said something since it was named."""
        return self.is_named and self.quiet < SILENCE


def ranks_by_site(sites: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the node ranks that use each site, that of the first node first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(sites):
        found.setdefault(sites[rank], []).append(rank)
    return found


class _Question(NamedTuple):
    """A question to the store."""

    connection: Hashable
    number: int
    keys: list[str]
    start: int = 0  # the keys before this one are there


@dataclass
class Coordinator:
    """The head's view of a job.

    Attributes:
        terms: What all agree on.
        outbox: Pairs of a connection and a message to send there, in order.
        round: The round that is waited for, or running. It is also the number of
            restarts.
        running: Whether it has started.
        failure: Why the job failed.
        finished: Whether it ended well.
    """

    terms: Settings
    outbox: list[tuple[Hashable, Mapping[str, Any]]] = field(default_factory=list)
    round: int = 0
    running: bool = False
    failure: Failure | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        """Start with nobody there."""
        self._beat = min(BEAT, max(1, self.terms.silence_timeout // 3))
        self._agents: dict[int, _Agent] = {}
        self._ranks: dict[Hashable, int] = {}
        self._candidates: dict[int, _Agent] = {}
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._unread: set[Hashable] = set()
        self._heard: set[int] = set()  # of the failure
        self._has_run = False  # any round
        self._cause: Failure | None = None  # of the latest restart
        self._workers_store: Any = None
        self._waited = 0
        self._seconds = 0
        self._store: dict[str, str] = {}
        self._stored = 0
        # Questions that cannot be answered yet, by a key that is not there.
        self._questions: dict[str, list[_Question]] = {}

    @property
    def all_know(self) -> bool:
        """Whether there is nobody left who has to hear how it ended."""
        if self.failure is None:
            return not self._agents
        return not self._unread and not self.some_come

    @property
    def some_come(self) -> bool:
        """Whether the job failed before all were there, so that others still come."""
        return (
            self.failure is not None
            and self.failure.kind in _EARLY
            and not self._has_run
            and len(self._heard) < self.terms.nodes
        )

    # --- what happens -------------------------------------------------------------

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """Take a message.

        Raises:
            ProtocolError: It makes no sense; the connection is to be closed.
        """
        rank = self._ranks.get(connection)
        if rank is None:
            self._greet(connection, message)
            return
        agent = self._agents[rank]
        agent.quiet = 0
        self._decide_candidate(rank)
        for verb, take in (
            ("join", self._join),
            ("died", self._died),
            ("failed", self._failed),
            ("done", self._take_done),
            ("ask", self._ask),
        ):
            if verb in message:
                take(agent, message)
        if "read" in message:
            self._unread.discard(connection)
        if "bye" in message:
            self._forget(rank)

    def lost(self, connection: Hashable) -> None:
        """Take note that a connection has ended."""
        rank = self._ranks.get(connection)
        if rank is None:
            self._candidates = {
                rank: candidate
                for rank, candidate in self._candidates.items()
                if candidate.connection != connection
            }
            return
        had_joined = self._agents[rank].has_joined
        self._forget(rank)
        candidate = self._candidates.pop(rank, None)
        if had_joined and not self.finished and rank not in self._done:
            self._agent_lost(rank)
        if candidate is not None:
            self._let_in(candidate.connection, candidate.said)

    def tick(self) -> None:
        """Take note that a second has passed."""
        self._seconds += 1
        silent = []
        answering = [r for r, a in self._agents.items() if a.answers_again]
        for rank, agent in list(self._agents.items()):
            agent.quiet += 1
            agent.is_named = agent.quiet >= SILENCE
            if (self._seconds + rank) % self._beat == 0:  # not all at once
                self._send(agent, {"beat": True})
            if agent.quiet == SILENCE:
                silent.append(rank)
            if agent.quiet >= self.terms.silence_timeout:
                self._fail(
                    Failure(Kind.SILENT, (rank,), code=self.terms.silence_timeout)
                )
        for rank, candidate in list(self._candidates.items()):
            candidate.quiet += 1
            if candidate.quiet >= PATIENCE:  # the first has not answered
                self.lost(self._agents[rank].connection)
        if self.failure is not None or self.finished:
            return
        left = self.terms.silence_timeout - SILENCE
        self._tell_of(silent, {"silent": silent, "left": left})
        self._tell_of(answering, {"answering": answering})
        self._wait()

    def fail(self, failure: Failure) -> None:
        """End the job, for a reason of the head's own."""
        self._fail(failure)

    # --- who is there -------------------------------------------------------------

    def _greet(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        version = message.get("hello")
        if type(version) is not int:
            raise ProtocolError("not a hello")
        if message.get("job") != self.terms.job:
            self._refuse(connection, Refusal.STRANGER, "")  # whoever asks
            return
        if version != VERSION:
            self._refuse(connection, Refusal.VERSION, __version__)
            rank = message.get("rank")
            nodes = (rank,) if type(rank) is int else ()
            self._fail(Failure(Kind.REFUSED, nodes, text="another torchrun_hpc"))
            return
        said = hello(message)
        misfit = self._misfit(said)
        # Who comes only to tell a failure, or only to be told one, need not agree.
        if misfit is not None and self.failure is None and "failed" not in message:
            self._refuse(connection, *misfit)
            if said.rank not in self._agents:  # else it is one too many
                text = f"it has --rdzv_id={said.run_id} and {said.nodes} nodes"
                self._fail(Failure(Kind.REFUSED, (said.rank,), text=text))
            return
        self._admit(connection, said, message.get("failed"))

    def _admit(self, connection: Hashable, said: JoinRequest, failure: Any) -> None:
        """Let an agent in, unless another one has its node rank."""
        there = self._agents.get(said.rank)
        if there is None:
            if failure is not None:
                self._fail(unpacked(failure))
            self._let_in(connection, said)
        elif (there.said.host, there.said.pid) == (said.host, said.pid):
            # It gave up one connection, and this one was faster.
            self._forget(said.rank)
            self._let_in(connection, said)
        else:
            # Two, or one that was started again where the end of the first was not
            # seen: ask whether it is still there.
            older = self._candidates.get(said.rank)
            if older is not None:
                self.outbox.append((older.connection, CLOSE))
            self._candidates[said.rank] = _Agent(connection, said)
            self._send(there, {"beat": True})

    def _misfit(self, said: JoinRequest) -> tuple[Refusal, str] | None:
        """Return in what an agent differs from the job, and how that is here."""
        if said.nodes != self.terms.nodes or not 0 <= said.rank < said.nodes:
            return Refusal.NODES, str(self.terms.nodes)
        if said.run_id != self.terms.run_id:
            return Refusal.RUN_ID, self.terms.run_id
        return None

    def _decide_candidate(self, rank: int) -> None:
        """Send away the second agent of a node rank whose first has just spoken."""
        if rank in self._candidates:
            connection = self._candidates.pop(rank).connection
            there = self._agents[rank].said
            value = f"process {there.pid} on {there.host}"
            self._refuse(connection, Refusal.TAKEN, value)

    def _let_in(self, connection: Hashable, said: JoinRequest) -> None:
        self._agents[said.rank] = _Agent(connection, said)
        self._ranks[connection] = said.rank
        if self.failure is not None:
            self.outbox.append((connection, {"failed": packed(self.failure)}))
            self._unread.add(connection)
            self._heard.add(said.rank)
            return
        if self.running:  # it was started again, and takes part in the next round
            self._round_over(Failure(Kind.LOST, (said.rank,)))
        welcome = {"welcome": VERSION, "job": self.terms.job, "round": self.round}
        self.outbox.append((connection, welcome))

    def _refuse(self, connection: Hashable, reason: Refusal, value: str) -> None:
        self.outbox.append((connection, {"refused": reason.value, "value": value}))
        self.outbox.append((connection, CLOSE))

    def _forget(self, rank: int) -> None:
        connection = self._agents.pop(rank).connection
        del self._ranks[connection]
        self._unread.discard(connection)
        self._joined.discard(rank)
        self.outbox.append((connection, CLOSE))

    # --- rounds -------------------------------------------------------------------

    def _join(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        wanted = message["join"]
        if self.finished:
            return
        rank = agent.said.rank
        if self.running and wanted == self.round + 1:
            text = "it wanted another restart"
            self._round_over(Failure(Kind.AGENT, (rank,), text=text))
        if self.failure is not None:
            return
        if self.running or wanted != self.round:
            raise ProtocolError(f"join of round {wanted} in round {self.round}")
        agent.has_joined = True
        self._joined.add(rank)
        if rank == 0:
            self._workers_store = message.get("store")
        if len(self._joined) == self.terms.nodes:
            self._go()

    def _go(self) -> None:
        if not self._has_run:
            sites = {rank: agent.said.site for rank, agent in self._agents.items()}
            if len(by_site := ranks_by_site(sites)) > 1:
                self._tell({"sites": by_site})
        self.running = True
        self._has_run = True
        self._done.clear()
        self._store.clear()
        self._questions.clear()
        self._stored = 0
        for agent in self._agents.values():
            self._send(agent, {"go": self.round, "store": self._workers_store})

    def _round_over(self, failure: Failure) -> None:
        """Let all join the next round, or end the job if there is none."""
        has_ended = self.failure is not None or self.finished
        if has_ended or self._done or self.round >= self.terms.max_restarts:
            self._fail(replace(failure, finished=len(self._done)))
            return
        self._cause = failure
        self.running = False
        self._waited = 0
        self._joined.clear()
        for agent in self._agents.values():
            self._send(agent, {"over": self.round})
        self.round += 1
        if failure.kind is not Kind.LOST:
            self._tell({"restart": self.round, "because": packed(failure)})

    def _died(self, _agent: _Agent, message: Mapping[str, Any]) -> None:
        if self.running and message.get("round") == self.round:
            self._round_over(unpacked(message["died"]))

    def _agent_lost(self, rank: int) -> None:
        """Wait for it to be started again, if the job may restart."""
        failure = Failure(Kind.LOST, (rank,))
        if self.running:
            self._round_over(failure)
        elif self.round >= self.terms.max_restarts:
            self._fail(failure)
        if self.failure is None:
            self._tell({"lost": rank})

    def _take_done(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        rank, done = agent.said.rank, message["done"]
        if self.failure is not None:
            return
        if not self.running:
            # It had finished before it heard of the restart, and takes no part in it.
            if self._cause is not None and done == self.round - 1:
                self._fail(replace(self._cause, finished=1))
            return
        if done != self.round:
            return
        self._done.add(rank)
        self._waited = 0
        if len(self._done) == self.terms.nodes:
            self.finished = True
            for other in self._agents.values():
                self._send(other, {"finished": self.round})

    # --- the end ------------------------------------------------------------------

    def _failed(self, _agent: _Agent, message: Mapping[str, Any]) -> None:
        self._fail(unpacked(message["failed"]))

    def _fail(self, failure: Failure) -> None:
        """Let everybody know; the first failure counts."""
        if self.failure is not None or self.finished:
            return
        self.failure = failure
        if failure.kind in _EARLY:
            self._heard.update(failure.nodes)
        for rank, agent in self._agents.items():
            self._send(agent, {"failed": packed(failure)})
            self._unread.add(agent.connection)
            self._heard.add(rank)

    # --- waiting ------------------------------------------------------------------

    def _wait(self) -> None:
        """Say what is waited for, and for how long."""
        there = self._done if self.running else self._joined
        if not there:  # all at work, or a dry run
            return
        self._waited += 1
        missing = [rank for rank in range(self.terms.nodes) if rank not in there]
        if self._waited >= FIRST_REPORT and (
            (self._waited - FIRST_REPORT) % NEXT_REPORT == 0
        ):
            verb = "finishing" if self.running else "waiting"
            self._tell({verb: missing, "seconds": self._waited})
        if not self.running and self._waited >= self.terms.join_timeout:
            waited = self.terms.join_timeout
            self._fail(Failure(Kind.MISSING, tuple(missing), code=waited))

    def _tell(self, message: Mapping[str, Any]) -> None:
        """Send something to the node that speaks to the user."""
        speaker = self._agents.get(0) or self._agents.get(self.terms.head)
        if speaker is not None:
            self._send(speaker, message)

    def _tell_of(self, ranks: list[int], message: Mapping[str, Any]) -> None:
        if ranks:
            self._tell(message)

    def _send(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        self.outbox.append((agent.connection, message))

    # --- the store of torch's agents ----------------------------------------------

    def _ask(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        number = message["ask"]
        try:
            if "set" in message:
                self._set({str(k): str(v) for k, v in message["set"].items()})
                answer: Any = True
            elif "add" in message:
                key = str(message["add"])
                answer = int(self._store.get(key, "0")) + int(message["by"])
                self._set({key: str(answer)})
            elif "check" in message:
                answer = all(key in self._store for key in message["check"])
            else:
                keys = [str(key) for key in message["get"]]
                self._answer(_Question(agent.connection, number, keys))
                return
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            raise ProtocolError("not a question to the store") from None
        self._send(agent, {"answer": number, "value": answer})

    def _set(self, values: Mapping[str, str]) -> None:
        for key, value in values.items():
            old = len(key) + len(self._store[key]) if key in self._store else 0
            stored = self._stored + len(key) + len(value) - old
            if stored > STORE_LIMIT:
                raise ProtocolError("too much for the store")
            self._stored = stored
            self._store[key] = value
        for key in values:
            for question in self._questions.pop(key, ()):
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        """Answer now, or when all keys are there."""
        for number in range(question.start, len(question.keys)):
            key = question.keys[number]
            if key not in self._store:
                later = question._replace(start=number)
                self._questions.setdefault(key, []).append(later)
                return
        values = [self._store[key] for key in question.keys]
        answer = {"answer": question.number, "value": values}
        self.outbox.append((question.connection, answer))
