"""The coordinator: a state machine without clock or network.

It counts its own seconds. So a suspended job does not age, and changes of the clock
have no effect.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.messages import Lost, Stranger, Suspended
from torchrun_hpc.rendezvous.protocol import (
    Ask,
    Bye,
    Close,
    Confirm,
    Died,
    Done,
    Ended,
    GaveUp,
    Heartbeat,
    Join,
    JoinRequest,
    Present,
    Printed,
    Question,
    QuestionOver,
    Read,
    Reply,
    Report,
    Standby,
    Unhealthy,
    Version,
    WantsReport,
    Welcome,
)
from torchrun_hpc.rendezvous.roster import Members, Rejection, Roster
from torchrun_hpc.rendezvous.rounds import WHILE_STARTING, Phase, Rounds
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.protocol import (
        FromAgent,
        Outgoing,
        Settings,
    )
    from torchrun_hpc.rendezvous.record import Address, Record


class Coordinator:
    """The coordinator's view of a job.

    `outbox` has pairs of connection and message, in order. `member` has this node's
    knowledge. The coordinator is on standby until `coordinate` is called.
    """

    def __init__(self, settings: Settings, member: Member) -> None:
        self.settings = settings
        self.outbox: list[Outgoing] = []
        self._member = member
        self._reset(member.record)

    def _reset(self, record: Record) -> None:
        settings = self.settings
        self.members = Members(settings, self.outbox)
        self.roster = Roster(settings, self.members, record)
        self.rounds = Rounds(settings, self.members, self.roster)
        # Seconds in which nodes may join for the first time.
        self._expected_for = settings.join_timeout if record.round < 0 else 0
        self._reported: set[Refused] = set()  # reasons that the user has read
        # Questions to all agents, by node rank and number, and who has received each.
        self._questions: dict[tuple[int, int], tuple[Question, set[str]]] = {}
        self._printed = False  # the user knows which workers have failed
        # When the latest agent was lost, in seconds, and how.
        self._loss = -1 - limits.LOSS_TO_TERM, Failure(Kind.LOST)
        # Agents that have received SIGTERM, or have failed since then.
        self._stopped: dict[int, Failure] = {}
        self._stopped_at = 0  # when the first of them was stopped, in seconds

    # --- taking over --------------------------------------------------------------

    def coordinate(self, record: Record) -> None:
        """Become the coordinator: of a new job, or instead of a lost coordinator."""
        if self.rounds.phase is Phase.STANDBY:
            self._reset(record)
            self.rounds.take_over()

    def step_down(self) -> bool:
        """Stop coordinating if too few nodes are connected; return whether it has."""
        if not (self.rounds.has_quorum or self.rounds.has_ended):
            self.members.reset()
            self._reset(self.roster.record)
        return self.rounds.phase is Phase.STANDBY

    def absent(self, *, ask_all: bool) -> dict[int, Address] | None:
        """Return the addresses of absent nodes; ``None`` if enough are connected.

        `ask_all` includes nodes that have not joined yet.
        """
        if self.rounds.has_quorum or self.rounds.has_ended:
            return None
        addresses = {**self._member.addresses, **self.roster.addresses}
        has_begun = self.rounds.began >= 0
        absent = {*addresses} if ask_all else self.roster.absent(has_begun=has_begun)
        absent -= self.members.agents.keys()
        return {node: addresses[node] for node in absent if node in addresses}

    def _answer_peer(self, connection: Hashable) -> None:
        coordinates = self.rounds.phase is not Phase.STANDBY
        has_quorum = coordinates and self.rounds.has_quorum
        standby = Standby(self._member.follows, coordinates, has_quorum)
        self.outbox += [(connection, standby), (connection, Close.CLOSE)]

    # --- for its server -----------------------------------------------------------

    @property
    def all_informed(self) -> bool:
        """Whether every agent knows how the job ended."""
        members = self.members
        waits_for = members.unread if self.rounds.failure else members.agents
        return not waits_for and not self.expects_nodes

    @property
    def expects_nodes(self) -> bool:
        """Whether nodes may still join: they cannot know that the job has ended."""
        members, failure = self.members, self.rounds.failure
        if self.rounds.began < 0:
            may_come = failure is not None and failure.kind in WHILE_STARTING
        else:  # a short job may end before a spare joins
            is_signal = failure is not None and failure.kind is Kind.SIGNAL
            may_come = members.seconds < self._expected_for and not is_signal
        return may_come and len(members.accounted_for) < self.settings.nodes

    # --- events -------------------------------------------------------------------

    def request(self, connection: Hashable, request: JoinRequest | Version) -> None:
        """Handle a join request."""
        only_asks = isinstance(request, JoinRequest) and request.asks
        if self.rounds.phase is Phase.STANDBY or only_asks:
            self._answer_peer(connection)
            return
        examined = self.members.examine(connection, request)
        if isinstance(examined, Rejection):
            self._refused(examined)
        else:
            self._admit(connection, examined)

    def _admit(self, connection: Hashable, request: JoinRequest) -> None:
        first = self.members.agents.get(request.rank)
        if first is not None and first.request.agent != request.agent:
            self.members.claim(connection, request)
            return
        if first is not None:
            # It has closed its first connection, whose end has not arrived yet.
            self._remove(request.rank)
        elif request.failed is not None:
            self._gave_up(request.rank, request.failed)
        self._accept(connection, request)

    def receive(self, connection: Hashable, message: FromAgent) -> None:  # noqa: C901, PLR0912 - a branch for each message
        """Handle an agent's message. After a `WireError`, close its connection."""
        rounds, members = self.rounds, self.members
        rank = members.rank_of(connection)
        if rank is None:
            raise WireError("not an accepted agent")
        members.answered(rank)
        if rank in members.candidates and not isinstance(message, Bye):
            self._refused(members.refuse_candidate(rank))
        match message:
            case Heartbeat(seconds):
                members.answered(rank, seconds)
            case Present():
                rounds.came(rank, message)
            case Unhealthy(reason):
                rounds.unhealthy(rank, reason)
            case Join():
                if not self._stopped:
                    rounds.join(rank)
            case Confirm():
                rounds.confirm(rank, message)
            case Done(number):
                rounds.done(rank, number)
            case Died(failure, number):
                rounds.died(rank, failure, number, may_restart=not self._stopped)
            case GaveUp(failure):
                self._gave_up(rank, failure)
            case Read():
                members.unread.discard(connection)
            case WantsReport():
                members.send(rank, Report(rounds.failures.summary()))
            case Printed():
                self._printed = True
                members.send_all(message)
            case Question(number):
                question = replace(message, asker=rank), set[str]()
                self._questions[rank, number] = question
                for each in members.agents:
                    self._pass_on(each, *question)
            case QuestionOver(number):
                self._questions.pop((rank, number), None)
            case Reply(asker):
                members.send(asker, replace(message, node=rank))
            case Ask():
                self.outbox += rounds.store.ask(connection, message)
            case Bye():
                self._leave(rank, has_ended=True)  # its workers have ended before

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:
        """Handle the end of a connection.

        `ended` is true after an end of file: only that proves that the other process
        has ended.
        """
        rank = self.members.rank_of(connection)
        if rank is None:
            self.members.forget_candidate(connection)
            return
        members, failure = self.members, None
        is_needed = members.agents[rank].has_joined and not self.rounds.is_done(rank)
        if is_needed and rank not in self._stopped:
            failure = Failure(Kind.LOST, (rank,))
            self._loss = members.seconds, failure
        self._leave(rank, failure, has_ended=ended)

    def tick(self, seconds: int = 1) -> None:
        """Count the passed seconds, usually one; see `Members.tick`."""
        members = self.members
        members.tick(seconds)
        for rank in members.silent(self.settings.silence_timeout):
            self._silent(rank)
        for connection in members.replaced():
            self.disconnected(connection)
        if self.rounds.has_ended:
            return
        members.report_silence()
        members.report_unproved()
        if self._stopped and members.seconds - self._stopped_at >= limits.LOSS_TO_TERM:
            self.fail(next(iter(self._stopped.values())))
        else:
            self.rounds.wait()

    def fail(self, failure: Failure) -> None:
        """End the job, and inform all agents. Only the first failure counts."""
        self.rounds.fail(failure)

    # --- who comes ----------------------------------------------------------------

    def _accept(self, connection: Hashable, request: JoinRequest) -> None:
        rank, rounds = request.rank, self.rounds
        if rounds.phase is Phase.RUN:
            # Another round begins with an agent that was started again.
            rounds.lose(rank, Failure(Kind.LOST, (rank,)))
        self.members.accept(connection, request)
        if rounds.failure is None:
            age, this_node = self.roster.record.age, self.settings.coordinator
            self.members.send(rank, Welcome(rounds.round, age, this_node))
            for question in self._questions.values():
                self._pass_on(rank, *question)
        if rounds.has_ended:  # it was not connected when that was sent
            self.members.inform(rank, rounds.ending)
            if self._printed:
                self.members.send(rank, Printed())

    def _pass_on(self, rank: int, question: Question, received: set[str]) -> None:
        agent = self.members.agents[rank].request.agent
        if agent not in received:
            received.add(agent)
            self.members.send(rank, question)

    def _refused(self, refused: Rejection) -> None:
        reason, rank, text = refused
        nodes = () if rank is None else (rank,)
        is_news = reason not in self._reported and not self.rounds.has_ended
        # An agent of another command belongs to another launch. Ours has yet to join.
        is_awaited = self.rounds.began < 0 and reason is not Refused.STARTED
        if nodes and is_awaited and rank not in self.members.agents:
            self.fail(Failure(Kind.REFUSED, nodes, text=text))
            self.members.accounted_for.update(nodes)
        elif is_news and self.members.report(Stranger(nodes, text)):
            self._reported.add(reason)

    # --- who goes -----------------------------------------------------------------

    def _leave(
        self, rank: int, failure: Failure | None = None, *, has_ended: bool = False
    ) -> None:
        """Continue without an agent, or with another agent of its node rank.

        Without a `failure`, it has left, or is not needed. If it `has_ended`, its
        process, or at least its workers, have ended.
        """
        rounds, has_spares = self.rounds, self.settings.has_spares
        self._remove(rank)
        for asker, number in self._questions:
            self.members.send(asker, Reply(asker, number, None, rank))
        if failure is not None:
            if self._stopped:
                self.fail(failure)
            rounds.lose(rank, failure)
            if not (has_spares or rounds.has_ended):
                self.members.report(Lost(rank))
        if second := self.members.candidates.pop(rank, None):
            self._accept(second.connection, second.request)
        elif has_ended and has_spares:
            rounds.ended(rank, self.roster.record.round)

    def _remove(self, rank: int) -> None:
        questions = self._questions.items()
        self._questions = {key: each for key, each in questions if key[0] != rank}
        self.rounds.removed(rank, self.members.remove(rank))

    def _silent(self, rank: int) -> None:
        timeout = self.settings.silence_timeout
        failure = Failure(Kind.SILENT, (rank,), code=timeout)
        if not self.settings.has_spares:
            self.fail(failure)
            return
        silent_for = self.members.agents[rank].silent_for
        # It has no time to end its workers.
        if silent_for > timeout + limits.SUSPENSION:
            self.members.report(Suspended(silent_for))
        self._leave(rank, failure)

    def _gave_up(self, rank: int, failure: Failure) -> None:
        """End the job, or continue if enough other nodes are left.

        A launcher that loses an agent sends SIGTERM to all others. Their reports may
        arrive before the loss is noticed, so wait for it.
        """
        rounds = self.rounds
        is_own_fault = failure.kind is Kind.AGENT and rank != self.settings.coordinator
        are_enough = len(self.roster.left - {rank}) >= self.roster.wanted
        if is_own_fault and are_enough and not rounds.has_ended:
            rounds.exclude(rank, failure.text)
            rounds.lose(rank, failure)
            if rank in self.members.agents:
                self.members.inform(rank, Ended(failure, is_certain=False))
            return
        is_stop = (failure.kind, failure.code) == (Kind.SIGNAL, signal.SIGTERM)
        is_stop = is_stop and self.settings.signals_on_loss
        lost_at, loss = self._loss
        if is_stop and self.members.seconds - lost_at <= limits.LOSS_TO_TERM:
            self.fail(loss)
        elif self.rounds.phase is Phase.RUN and (is_stop or self._stopped):
            if not self._stopped:
                self._stopped_at = self.members.seconds
            self._stopped.setdefault(rank, failure)
            if not self.members.agents.keys() <= self._stopped.keys():
                return  # one of the others may be lost
        self.fail(next(iter(self._stopped.values()), failure))
