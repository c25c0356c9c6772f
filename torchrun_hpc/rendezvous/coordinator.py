"""What the coordinator decides: which agents it accepts, when a round starts and ends.

A state machine without clock or network: each message and each second is passed to it,
and it leaves what is to be sent in `Coordinator.outbox`.

It counts its own seconds. So a job that was suspended for an hour has not aged by that
hour, and a clock that is set back or forth changes nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, waiting, wire
from torchrun_hpc.failures.collection import Collection
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.key_value_store import KeyValueStore
from torchrun_hpc.rendezvous.protocol import JoinRequest, Refusal
from torchrun_hpc.reporting.reporter import told_to_report
from torchrun_hpc.wire import WireError, printable

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torchrun_hpc.rendezvous.key_value_store import Answer

# Seconds.
HEARTBEAT_INTERVAL = 5
_RESTART_REPORT = 2  # until others have failed, of which one may have been the first
CANDIDATE_TIMEOUT = 10  # for an agent whose node rank another one claims, to answer
_BESIDE = 2  # at most, between the loss of an agent and SIGTERM for the others
SILENCE_REPORT = 30  # after these, the user reads that an agent does not answer

# How a job may fail while some nodes have not connected yet.
_WHILE_STARTING = (Kind.AGENT, Kind.LOST, Kind.REFUSED)

_SHORT = 60  # characters of what is shown of an agent that is refused
_COMPARED = (Refusal.STARTED, Refusal.NODES, Refusal.RUN_ID, Refusal.SPARES)
_DIFFERENT = {
    Refusal.VERSION: "torchrun_hpc {} instead of {}",
    Refusal.NODES: "{} nodes instead of {}",
    Refusal.RUN_ID: "--rdzv_id={} instead of {}",
    Refusal.SPARES: "--hpc-spares={} instead of {}",
    Refusal.STARTED: "{} instead of {}",
    Refusal.TAKEN: "process {} on {} instead of process {} on {}",
}

# In the outbox: close, or reset, this connection. A process that lives resets those of
# agents: an end of file means to them that it has ended.
CLOSE: dict[str, Any] = {"close": True}
RESET: dict[str, Any] = {"reset": True}


@dataclass(frozen=True)
class Settings:
    """What all agents of a job agree on.

    Attributes:
        job: The launch id.
        run_id: Torch's rendezvous id.
        nodes: Number of nodes.
        coordinator: Node rank of the coordinator; -1 where it is another node.
        max_restarts: How often the job may restart.
        join_timeout: Seconds that a round waits for all nodes.
        silence_timeout: Seconds after which an agent that does not answer ends the
            job.
        spares: How many of the nodes wait to take the place of another one.
        started: As in `JoinRequest`.
        signals_on_loss: Whether the launcher sends SIGTERM to all agents when one is
            lost. PBS does not: it kills the agents of a job that is deleted.
    """

    job: str
    run_id: str
    nodes: int
    coordinator: int
    max_restarts: int
    join_timeout: int
    silence_timeout: int
    spares: int = 0
    started: str = ""
    signals_on_loss: bool = True


@dataclass
class _Agent:
    """An agent that was accepted, or claims the node rank of one."""

    connection: Hashable
    request: JoinRequest
    silent_for: int = 0  # seconds since its last message
    heartbeat: float = True  # its last one, by its own clock
    is_reported: bool = False  # to the user, as silent
    has_joined: bool = False  # any round yet


def ranks_by_site(sites: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the node ranks that use each site, that of the first node first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(sites):
        found.setdefault(sites[rank], []).append(rank)
    return found


class Coordinator:
    """The coordinator's view of a job.

    Args:
        settings: What all agents agree on.

    Attributes:
        outbox: Pairs of a connection and a message to send there, in order.
        round: The round that is waited for, or running. It is also the number of
            restarts.
        running: Whether it has started.
        failure: Why the job failed.
        finished: Whether all nodes have finished.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.outbox: list[Answer] = []
        self.round = 0
        self.running = False
        self.failure: Failure | None = None
        self.finished = False
        limit = settings.silence_timeout // 3
        self._heartbeat_interval = min(HEARTBEAT_INTERVAL, max(1, limit))
        self._agents: dict[int, _Agent] = {}
        self._ranks: dict[Hashable, int] = {}
        self._candidates: dict[int, _Agent] = {}
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._informed: set[int] = set()  # node ranks to which the failure was sent
        self._unread: set[Hashable] = set()  # connections that have not confirmed it
        self._has_run = False  # any round
        self._reported: set[Refusal] = set()  # why others were refused
        self._cause: Failure | None = None  # of the latest restart
        self._worker_failures = Collection()  # of this round
        self._restart_reported_in = -1  # seconds; below 0 there is none to report
        self._is_reported = False  # to the user, which workers have failed
        # The second in which an agent was lost last, and which one.
        self._loss = -1 - _BESIDE, Failure(Kind.LOST)
        # Agents that have received SIGTERM, or have failed since then.
        self._stopped: dict[int, Failure] = {}
        self._stopped_at = 0  # the second in which the first has
        self._workers_store: Any = None
        self._waited = 0
        self._seconds = 0
        self._store = KeyValueStore()

    @property
    def all_informed(self) -> bool:
        """Whether every agent knows how the job ended."""
        waits_for = self._agents if self.failure is None else self._unread
        return not waits_for and not self.expects_nodes

    @property
    def expects_nodes(self) -> bool:
        """Whether nodes may still come that cannot know that the job has ended."""
        if self.failure is None or self.failure.kind not in _WHILE_STARTING:
            return False
        return not self._has_run and len(self._informed) < self.settings.nodes

    # --- events -------------------------------------------------------------------

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """Handle a message.

        Raises:
            WireError: It is not valid; the connection is to be closed.
        """
        rank = self._ranks.get(connection)
        if rank is None:
            self._handle_request(connection, message)
            return
        agent = self._agents[rank]
        agent.silent_for = 0
        if type(heartbeat := message.get("heartbeat")) is float:
            agent.heartbeat = heartbeat
        if "bye" not in message:
            self._refuse_candidate(rank)
        if "join" in message and not self._stopped:
            self._join(agent, message)
        self._report_workers(agent, message)
        self._pass_on(agent, message)
        if "failed" in message:
            self._agent_failed(rank, wire.decode(Failure, message["failed"]))
        if "done" in message:
            self._node_done(rank, message["done"])
        if "ask" in message:
            self.outbox += self._store.ask(connection, message)
        if "read" in message:
            self._unread.discard(connection)
        if "bye" in message:
            self._remove(rank)
            self._accept_candidate(rank)

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:  # noqa: ARG002
        """Handle the end of a connection.

        Args:
            connection: The connection.
            ended: Whether the process at its other end has ended. Only an end of file
                proves that.
        """
        rank = self._ranks.get(connection)
        if rank is None:
            for claimed, candidate in list(self._candidates.items()):
                if candidate.connection == connection:
                    del self._candidates[claimed]
            return
        had_joined = self._agents[rank].has_joined
        self._remove(rank)
        has_ended = self.finished or rank in {*self._done, *self._stopped}
        if had_joined and not has_ended:
            self._loss = self._seconds, Failure(Kind.LOST, (rank,))
            if self._stopped:
                self.fail(self._loss[1])
            self._agent_lost(rank)
        self._accept_candidate(rank)

    def tick(self, seconds: int = 1) -> None:
        """Handle that a second has passed, however late.

        Args:
            seconds: How many seconds have passed. Only a job with spares counts them:
                members and other coordinators count them, too, and expect that this
                one gives up in time.
        """
        self._seconds += 1
        timeout = self.settings.silence_timeout
        silent = []
        answering = [
            rank
            for rank, agent in self._agents.items()
            if agent.is_reported and agent.silent_for < SILENCE_REPORT
        ]
        for rank, agent in list(self._agents.items()):
            agent.silent_for += seconds if self.settings.spares else 1
            if (self._seconds + rank) % self._heartbeat_interval == 0:  # spread
                self._send(agent, {"heartbeat": agent.heartbeat})
            if agent.silent_for >= timeout:
                self._agent_silent(rank)
            elif agent.silent_for >= SILENCE_REPORT and not agent.is_reported:
                silent.append(rank)
            agent.is_reported = agent.silent_for >= SILENCE_REPORT
        for rank, candidate in list(self._candidates.items()):
            candidate.silent_for += 1
            if candidate.silent_for >= CANDIDATE_TIMEOUT:  # the first did not answer
                self.disconnected(self._agents[rank].connection)
        if self.failure is not None or self.finished:
            return
        if silent:
            self._report({"silent": silent, "left": timeout - SILENCE_REPORT})
        if answering:
            self._report({"answering": answering})
        self._wait()

    def fail(self, failure: Failure) -> None:
        """End the job, and inform all agents; only the first failure counts."""
        if self.failure is not None or self.finished:
            return
        self.failure = failure
        if failure.kind in _WHILE_STARTING:
            self._informed.update(failure.nodes)
        for rank, agent in self._agents.items():
            self._inform(rank, agent.connection, failure)

    # --- which agents are accepted ------------------------------------------------

    def _handle_request(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        version = message.get("protocol")
        candidates = (each.connection for each in self._candidates.values())
        if type(version) is not int or connection in candidates:
            raise WireError("not a join request, or the second one")
        if message.get("job") != self.settings.job:
            self._refuse(connection, Refusal.UNKNOWN)  # whoever asks
            return
        rank, release = message.get("rank"), message.get("release")
        if version != protocol.VERSION:
            self._refuse(connection, Refusal.VERSION, rank, release, __version__)
            return
        request = wire.decode(JoinRequest, message)
        for reason in _COMPARED:
            theirs, own = (getattr(x, reason.value) for x in (request, self.settings))
            # Who only tells why its node cannot start does not know the id.
            if theirs != own and "" not in (theirs, own):
                self._refuse(connection, reason, rank, theirs, own)
                return
        self._check_rank(connection, request, message.get("failed"))

    def _check_rank(
        self, connection: Hashable, request: JoinRequest, failure: Any
    ) -> None:
        """Accept an agent, unless another one has its node rank."""
        first = self._agents.get(request.rank)
        if first is None:
            if failure is not None:
                self._agent_failed(request.rank, wire.decode(Failure, failure))
            self._accept(connection, request)
        elif first.request.agent == request.agent:
            # It has closed its first connection, of which the end is yet to come.
            self._remove(request.rank)
            self._accept(connection, request)
        else:
            # A second agent; or it was started again, and the end of the first one's
            # connection was not seen: a heartbeat shows whether that one still runs.
            older = self._candidates.get(request.rank)
            if older is not None:
                self.outbox.append((older.connection, CLOSE))
            self._candidates[request.rank] = _Agent(connection, request)
            self._send(first, {"heartbeat": first.heartbeat})

    def _refuse_candidate(self, rank: int) -> None:
        """Refuse the second agent of a node rank whose first one has just answered."""
        if rank in self._candidates:
            second, first = self._candidates.pop(rank), self._agents[rank].request
            who = second.request.pid, second.request.host, first.pid, first.host
            self._refuse(second.connection, Refusal.TAKEN, rank, *who)

    def _accept_candidate(self, rank: int) -> None:
        """Accept the second agent of a node rank, of which the first has gone."""
        if second := self._candidates.pop(rank, None):
            self._accept(second.connection, second.request)

    def _accept(self, connection: Hashable, request: JoinRequest) -> None:
        if self.failure is None:
            self._agent_came(request.rank)
        self._agents[request.rank] = _Agent(connection, request)
        self._ranks[connection] = request.rank
        if self.failure is not None:
            self._inform(request.rank, connection, self.failure)
        else:
            self.outbox.append((connection, self._welcome()))
        if self.finished:  # it was not here when that was sent
            self.outbox.append((connection, self._end()))

    def _agent_came(self, rank: int) -> None:
        """Begin another round with an agent that was started again."""
        if self.running:
            self._end_round(Failure(Kind.LOST, (rank,)))

    def _welcome(self) -> dict[str, Any]:
        job, number = self.settings.job, self.round
        return {"welcome": protocol.VERSION, "job": job, "round": number}

    def _refuse(
        self, connection: Hashable, reason: Refusal, rank: Any = None, *values: Any
    ) -> None:
        """Refuse an agent, which hears the reason only: anybody may have asked.

        It ends the job only if the job waits for it. Otherwise node 0 reports it.

        Args:
            connection: Where it is.
            reason: Why. Node 0 reports more, unless the agent is of another job.
            rank: The node rank that it claims.
            values: What is different: its own values, and those of the job.
        """
        self.outbox += [(connection, {"refused": reason.value}), (connection, CLOSE)]
        if reason is Refusal.UNKNOWN:
            return
        text = _DIFFERENT[reason].format(*(printable(str(v), _SHORT) for v in values))
        nodes = (rank,) if type(rank) is int and 0 <= rank < self.settings.nodes else ()
        is_news = reason not in self._reported and not (self.failure or self.finished)
        # An agent of another command belongs to another launch: ours is still to come.
        is_awaited = not self._has_run and reason is not Refusal.STARTED
        if nodes and is_awaited and rank not in self._agents:
            self.fail(Failure(Kind.REFUSED, nodes, text=text))
            self._informed.update(nodes)
        elif is_news and self._report({"stranger": nodes, "because": text}):
            self._reported.add(reason)

    def _remove(self, rank: int) -> None:
        connection = self._agents.pop(rank).connection
        del self._ranks[connection]
        self._unread.discard(connection)
        self._store.forget(connection)
        self._joined.discard(rank)
        self.outbox.append((connection, RESET))

    # --- rounds -------------------------------------------------------------------

    def _join(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        wanted = message["join"]
        if self.finished:
            return
        rank = agent.request.rank
        if self.running and wanted == self.round + 1:
            text = "it wanted another restart"
            self._end_round(Failure(Kind.AGENT, (rank,), text=text, by=rank))
        if self.failure is not None:
            return
        if self.running or wanted != self.round:
            raise WireError(f"join of round {wanted} in round {self.round}")
        agent.has_joined = True
        self._joined.add(rank)
        if rank == 0:
            self._workers_store = message.get("store")
        if self._joined.issuperset(self._in_round):
            self._start_round()

    @property
    def _in_round(self) -> Sequence[int]:
        """Ranks of the nodes that take part in a round."""
        return range(self.settings.nodes)

    def _start_round(self) -> None:
        if not self._has_run:
            sites = {rank: agent.request.site for rank, agent in self._agents.items()}
            if len(by_site := ranks_by_site(sites)) > 1:
                self._report({"sites": by_site})
        self._report_restart()
        self._worker_failures.clear()
        self.running = True
        self._has_run = True
        self._done.clear()
        self._store = KeyValueStore()
        go = {"go": self.round, "store": self._workers_store}
        for rank in self._in_round:
            self._send(self._agents[rank], go)

    def _report_workers(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        """Collect the failures of workers, of which the first one ends the round."""
        # Of a round that has just ended, too: it may have been the first.
        own_round = self.round if self.running else self.round - 1
        if "died" in message and message.get("round") == own_round:
            worker = wire.decode(Failure, message["died"])
            rank = agent.request.rank
            worker = replace(worker, nodes=(rank,), by=rank)
            self._worker_failures.add(worker)
            if self.failure is None and self.running and not self._stopped:
                self._end_round(worker)
        if "report" in message:
            summary = self._worker_failures.summary()
            self._send(agent, {"report": summary and wire.encode(summary)})
        if "printed" in message:
            self._is_reported = True
            for other in self._agents.values():
                self._send(other, {"printed": True})

    def _pass_on(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        """Pass on a question of an agent to all, and the answers to it."""
        own = agent.request.rank
        if type(message.get("stacks")) is int:
            for other in self._agents.values():
                self._send(other, {"stacks": [own, message["stacks"]]})
        match message.get("sampled"):
            case [int(rank), int(number)] if rank in self._agents:
                answer = {"sampled": number, "node": own, "of": message.get("of")}
                self._send(self._agents[rank], answer)

    def _end_round(self, failure: Failure) -> None:
        """Let all join the next round, or end the job if there is none."""
        has_ended = self.failure is not None or self.finished
        if has_ended or self._done or self.round >= self.settings.max_restarts:
            self.fail(replace(failure, finished=len(self._done)))
            return
        self._cause = failure
        self.running = False
        self._waited = 0
        self._joined.clear()
        for agent in self._agents.values():
            self._send(agent, {"over": self.round})
        self.round += 1
        self._restart_reported_in = _RESTART_REPORT

    def _report_restart(self) -> None:
        """Report the latest restart, once, with the failure that was the first."""
        cause, summary = self._cause, self._worker_failures.summary()
        if self._restart_reported_in < 0 or cause is None or cause.kind is Kind.LOST:
            return
        self._restart_reported_in = -1
        if summary is not None and cause.kind is Kind.WORKER:
            cause = summary.first
        self._report({"restart": self.round, "because": wire.encode(cause)})

    def _agent_lost(self, rank: int) -> None:
        """Wait for an agent to be started again, if the job may restart."""
        failure = Failure(Kind.LOST, (rank,))
        if self.running:
            self._end_round(failure)
        elif self.round >= self.settings.max_restarts:
            self.fail(failure)
        if self.failure is None:
            self._report({"lost": rank})

    def _agent_failed(self, rank: int, failure: Failure) -> None:
        """End the job: an agent gives up, or cannot start.

        A launcher that loses an agent sends SIGTERM to all others. The coordinator may
        see the signal before it sees the loss. So it waits a moment for the loss.
        """
        is_stop = (failure.kind, failure.code) == (Kind.SIGNAL, signal.SIGTERM)
        is_stop = is_stop and self.settings.signals_on_loss
        second, loss = self._loss
        if is_stop and self._seconds - second <= _BESIDE:
            self.fail(loss)
        elif self.running and (is_stop or self._stopped):
            if not self._stopped:
                self._stopped_at = self._seconds
            self._stopped.setdefault(rank, failure)
            if not self._agents.keys() <= self._stopped.keys():
                return  # one of the others may be lost
        self.fail(next(iter(self._stopped.values()), failure))

    def _agent_silent(self, rank: int) -> None:
        """End the job."""
        timeout = self.settings.silence_timeout
        self.fail(Failure(Kind.SILENT, (rank,), code=timeout))

    def _node_done(self, rank: int, done: Any) -> None:
        if self.failure is not None:
            return
        if not self.running:
            # It had finished before it heard of the restart, and takes no part in it.
            if self._cause is not None and done == self.round - 1:
                self.fail(replace(self._cause, finished=1))
            return
        if done != self.round:
            return
        self._done.add(rank)
        self._waited = 0
        if self._done.issuperset(self._in_round):
            self.finished = True
            for other in self._agents.values():
                self._send(other, self._end())

    def _wait(self) -> None:
        """Report which nodes are waited for, and end the job when its time is up."""
        if self._stopped and self._seconds - self._stopped_at >= _BESIDE:
            self.fail(next(iter(self._stopped.values())))
            return
        self._restart_reported_in -= 1
        if self._restart_reported_in == 0:
            self._report_restart()
        ready = self._ready
        if not ready:  # all are at work; or a dry run, which joins nothing
            return
        self._waited += 1
        missing = [rank for rank in self._in_round if rank not in ready]
        if waiting.is_report_due(self._waited):
            key = "finishing" if self.running else "waiting"
            self._report({key: missing, "seconds": self._waited})
        timeout = self.settings.join_timeout
        if not self.running and self._waited >= timeout:
            self.fail(Failure(Kind.MISSING, tuple(missing), code=timeout))

    @property
    def _ready(self) -> set[int]:
        """Ranks of the nodes that wait for the others: at the end, or at the start."""
        return self._done if self.running else self._joined

    # --- what is sent -------------------------------------------------------------

    def _report(self, message: Mapping[str, Any]) -> bool:
        """Send something for the user to the node that reports, if it is there."""
        reporter = self._agents.get(self._reporter)
        reporter = reporter or self._agents.get(self.settings.coordinator)
        if reporter is not None:
            self._send(reporter, message)
        return reporter is not None

    def _end(self) -> dict[str, Any]:
        """Return what all hear when the job has ended well."""
        return {"finished": self.round, **self._last_words()}

    def _last_words(self) -> dict[str, Any]:
        """Return what all are to know at the end."""
        return {}

    @property
    def _reporter(self) -> int:
        """Rank of the node that reports."""
        settings = self.settings
        return told_to_report(settings.coordinator, has_spares=settings.spares > 0)

    def _inform(self, rank: int, connection: Hashable, failure: Failure) -> None:
        """Send the failure to an agent, which is to confirm it."""
        message = {"failed": wire.encode(failure.brief), **self._last_words()}
        if rank == self._reporter:
            message["reports"] = True
        self.outbox.append((connection, message))
        self._unread.add(connection)
        self._informed.add(rank)
        if self._is_reported:
            self.outbox.append((connection, {"printed": True}))

    def _send(self, agent: _Agent, message: Mapping[str, Any]) -> None:
        self.outbox.append((agent.connection, message))
