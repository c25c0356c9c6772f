"""The coordinator: a state machine without clock or network.

It counts its own seconds. So a suspended job does not age, and changes of the clock
have no effect.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import policy, protocol
from torchrun_hpc.rendezvous.members import Members, Refused
from torchrun_hpc.rendezvous.phases import Phase
from torchrun_hpc.rendezvous.protocol import CLOSE, SUSPENDED, Refusal
from torchrun_hpc.rendezvous.record import MemberState
from torchrun_hpc.rendezvous.rounds import WHILE_STARTING, Rounds
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torchrun_hpc.rendezvous.key_value_store import Outgoing
    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.protocol import JoinRequest, Settings
    from torchrun_hpc.rendezvous.record import Address, Record

# Seconds.
_BESIDE = 2  # at most, from the loss of an agent to SIGTERM for the others

_SHORT = 60  # characters of a question to all nodes
_MOST_UNPROVED = 8  # addresses that the user reads


class Coordinator:
    """The coordinator's view of a job.

    `outbox` has pairs of connection and message, in order. With spares, `member` is
    this node's knowledge, and it starts on standby.
    """

    def __init__(self, settings: Settings, member: Member | None = None) -> None:
        self.settings = settings
        self.outbox: list[Outgoing] = []
        self._member = member
        nodes, spares = settings.nodes, settings.spares * settings.has_spares
        record = policy.first_record(nodes, spares, settings.coordinator)
        self._reset(record)
        if member is None:  # nobody takes over from it
            self.coordinate(record)

    def _reset(self, record: Record) -> None:
        settings = self.settings
        self.members = Members(settings, self.outbox)
        self.rounds = Rounds(settings, self.members, record)
        # Seconds in which nodes may join for the first time.
        self._expected_for = settings.join_timeout if record.round < 0 else 0
        self._reported: set[Refusal] = set()  # why others were refused
        # To all, by the asking agent; with the agents that have received it.
        self._questions: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._printed = False  # the user knows which workers have failed
        # The second of the latest loss of an agent, and the loss.
        self._loss = -1 - _BESIDE, Failure(Kind.LOST)
        # Agents that have received SIGTERM, or have failed since then.
        self._stopped: dict[int, Failure] = {}
        self._stopped_at = 0  # the second of the first one

    # --- taking over --------------------------------------------------------------

    def coordinate(self, record: Record) -> None:
        """Become the coordinator. After the first round, the old one was lost."""
        if self.rounds.phase is Phase.STANDBY:
            self._reset(record)
            self.rounds.take_over()

    def step_down(self) -> bool:
        """Stop coordinating if too few nodes are here; return whether it has."""
        if not (self.rounds.has_quorum or self.rounds.has_ended):
            self.members.reset()
            self._reset(self.rounds.roster.record)
        return self.rounds.phase is Phase.STANDBY

    def absent(self, *, ask_all: bool) -> dict[int, Address] | None:
        """Return where to look for other nodes; ``None`` if enough are here.

        `ask_all` includes nodes that have not joined yet.
        """
        roster, here = self.rounds.roster, self.members.agents.keys()
        if self._member is None or self.rounds.has_quorum or self.rounds.has_ended:
            return None
        addresses = {**self._member.addresses, **roster.addresses}
        absent = {*addresses} - here
        if not ask_all:
            active = roster.record.active if self.rounds.began >= 0 else ()
            absent = {*roster.addresses, *active} - here - roster.gone.keys()
        return {node: addresses[node] for node in absent if node in addresses}

    def _answer_peer(self, connection: Hashable) -> None:
        if self._member is None:
            raise WireError("a job without spares")
        coordinates = self.rounds.phase is not Phase.STANDBY
        has_quorum = coordinates and self.rounds.has_quorum
        standby = [self._member.follows, coordinates, has_quorum]
        self.outbox += [(connection, {"standby": standby}), (connection, CLOSE)]

    # --- what others ask ----------------------------------------------------------

    @property
    def all_informed(self) -> bool:
        """Whether every agent knows how the job ended."""
        members = self.members
        waits_for = members.unread if self.rounds.failure else members.agents
        return not waits_for and not self.expects_nodes

    @property
    def expects_nodes(self) -> bool:
        """Whether nodes may still join that cannot know that the job has ended."""
        members, failure = self.members, self.rounds.failure
        if self.rounds.began < 0:
            may_come = failure is not None and failure.kind in WHILE_STARTING
        else:  # a short job may end before a spare joins
            is_signal = failure is not None and failure.kind is Kind.SIGNAL
            may_come = members.seconds < self._expected_for and not is_signal
        return may_come and len(members.seen) < self.settings.nodes

    # --- events -------------------------------------------------------------------

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """Handle a message. After a `WireError` the connection must be closed."""
        if self.rounds.phase is Phase.STANDBY or message.get("asks"):
            self._answer_peer(connection)
            return
        rank = self.members.rank_of(connection)
        if rank is None:
            self._handle_request(connection, message)
            return
        self.members.answered(rank, message)
        if rank in self.members.candidates and "bye" not in message:
            self._refused(self.members.refuse_candidate(rank))
        self._hear_of_rounds(rank, message)
        self._hear_of_workers(rank, message)
        if "failed" in message:
            self._gave_up(rank, wire.decode(Failure, message["failed"]))
        if "ask" in message:
            self.outbox += self.rounds.store.ask(connection, message)
        if "read" in message:
            self.members.unread.discard(connection)
        if "bye" in message:
            self._leave(rank, has_ended=True)  # its workers have ended before

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:
        """Handle the end of a connection.

        Only an end of file proves that the process at its other end has `ended`.
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
        """Count seconds, however late; see `Members.tick`."""
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
        if self._stopped and members.seconds - self._stopped_at >= _BESIDE:
            self.fail(next(iter(self._stopped.values())))
        else:
            self.rounds.wait()

    def fail(self, failure: Failure) -> None:
        """End the job, and inform all agents. Only the first failure counts."""
        self.rounds.fail(failure)

    # --- who comes ----------------------------------------------------------------

    def _handle_request(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        request = self.members.examine(connection, message)
        if isinstance(request, Refused):
            self._refused(request)
            return
        first = self.members.agents.get(request.rank)
        if first is None:
            if (failure := message.get("failed")) is not None:
                self._gave_up(request.rank, wire.decode(Failure, failure))
            self._accept(connection, request)
        elif first.request.agent == request.agent:
            # It has closed its first connection, whose end has not arrived yet.
            self._remove(request.rank)
            self._accept(connection, request)
        else:
            self.members.claim(connection, request)

    def _accept(self, connection: Hashable, request: JoinRequest) -> None:
        rank, rounds = request.rank, self.rounds
        if self.rounds.phase is Phase.RUN and rank in self.rounds.roster.record.active:
            # Another round begins with an agent that was started again.
            rounds.lose(rank, Failure(Kind.LOST, (rank,)))
        self.members.accept(connection, request)
        if not self.settings.has_spares:
            rounds.roster.present.add(rank)
        if self.rounds.failure is None:
            known = {"round": self.rounds.round, "age": self.rounds.roster.record.age}
            own = {"coordinator": self.settings.coordinator}
            self.members.send(rank, {"welcome": protocol.VERSION, **known, **own})
            for question in self._questions.values():
                self._pass_on(rank, *question)
        if rounds.has_ended:  # it was not here when that was sent
            self.members.inform(rank, rounds.ending)
            if self._printed:
                self.members.send(rank, {"printed": True})

    def _pass_on(
        self, rank: int, question: Mapping[str, Any], received: set[str]
    ) -> None:
        agent = self.members.agents[rank].request.agent
        if agent not in received:
            received.add(agent)
            self.members.send(rank, question)

    def _refused(self, refused: Refused) -> None:
        reason, rank, text = refused
        nodes = () if rank is None else (rank,)
        is_news = reason not in self._reported and not self.rounds.has_ended
        # An agent of another command belongs to another launch. Ours has yet to join.
        is_awaited = self.rounds.began < 0 and reason is not Refusal.STARTED
        if nodes and is_awaited and rank not in self.members.agents:
            self.fail(Failure(Kind.REFUSED, nodes, text=text))
            self.members.seen.update(nodes)
        elif is_news and self.members.report({"stranger": nodes, "because": text}):
            self._reported.add(reason)

    def came_unproved(self, address: str) -> None:
        """Note the address of a caller without a proof that it belongs to the job."""
        known, is_local = self.members.unproved, address.startswith("127.")
        if len(known) < _MOST_UNPROVED:  # a program here can use all of 127.0.0.0/8
            known.setdefault("127.0.0.1" if is_local else address, False)
            self.members.report_unproved()  # at once: the job may be ending

    # --- who goes -----------------------------------------------------------------

    def _leave(
        self, rank: int, failure: Failure | None = None, *, has_ended: bool = False
    ) -> None:
        """Continue without an agent, or with the second one of its node rank.

        Without a `failure` it has left, or is not needed. `has_ended` is true if its
        process, or at least its workers, have ended.
        """
        rounds, has_spares = self.rounds, self.settings.has_spares
        self._remove(rank)
        for asks, (question, _) in self._questions.items():
            _, number = question["question"]
            self.members.send(asks, {"replied": number, "node": rank, "of": None})
        if failure is not None:
            if self._stopped:
                self.fail(failure)
            rounds.lose(rank, failure)
            if not (has_spares or rounds.has_ended):
                self.members.report({"lost": rank})
        if second := self.members.candidates.pop(rank, None):
            self._accept(second.connection, second.request)
        elif has_ended and has_spares:
            rounds.ended(rank, rounds.roster.record.round)

    def _remove(self, rank: int) -> None:
        self._questions.pop(rank, None)
        self.rounds.removed(rank, self.members.remove(rank))

    def _silent(self, rank: int) -> None:
        timeout = self.settings.silence_timeout
        failure = Failure(Kind.SILENT, (rank,), code=timeout)
        if not self.settings.has_spares:
            self.fail(failure)
            return
        silent_for = self.members.agents[rank].silent_for
        if silent_for > timeout + SUSPENDED:  # it has no time to end its workers
            self.members.report({"suspended": silent_for})
        self._leave(rank, failure)

    def _gave_up(self, rank: int, failure: Failure) -> None:
        """End the job, or continue if enough others are left.

        A launcher that loses an agent sends SIGTERM to all others. The signal may be
        seen before the loss. So wait a moment for the loss.
        """
        rounds = self.rounds
        is_own_fault = failure.kind is Kind.AGENT and rank != self.settings.coordinator
        are_enough = len(rounds.roster.left - {rank}) >= rounds.roster.wanted
        if is_own_fault and are_enough and not rounds.has_ended:
            rounds.exclude(rank, failure.text)
            rounds.lose(rank, failure)
            if rank in self.members.agents:
                self.members.inform(rank, {"failed": wire.encode(failure)})
            return
        is_stop = (failure.kind, failure.code) == (Kind.SIGNAL, signal.SIGTERM)
        is_stop = is_stop and self.settings.signals_on_loss
        second, loss = self._loss
        if is_stop and self.members.seconds - second <= _BESIDE:
            self.fail(loss)
        elif self.rounds.phase is Phase.RUN and (is_stop or self._stopped):
            if not self._stopped:
                self._stopped_at = self.members.seconds
            self._stopped.setdefault(rank, failure)
            if not self.members.agents.keys() <= self._stopped.keys():
                return  # one of the others may be lost
        self.fail(next(iter(self._stopped.values()), failure))

    # --- what an agent says -------------------------------------------------------

    def _hear_of_rounds(self, rank: int, message: Mapping[str, Any]) -> None:
        rounds, store = self.rounds, message.get("store")
        if "present" in message and self.settings.has_spares:
            self._present(rank, wire.decode(MemberState, message["present"]))
        if "unhealthy" in message and self.settings.has_spares:
            rounds.roster.leases.pop(rank, None)  # its workers have ended
            rounds.exclude(rank, str(message["unhealthy"]))
        if "join" in message and not self._stopped:
            rounds.join(rank, store)
        if "confirm" in message:
            rounds.confirm(rank, message["confirm"], store)
        if "done" in message:
            rounds.done(rank, message["done"])

    def _present(self, node: int, state: MemberState) -> None:
        rounds, roster = self.rounds, self.rounds.roster
        rounds.adopt(state.term, state.record)
        gone = roster.came(node, state)
        if gone is not None and gone[1] >= roster.record.round:
            rounds.ended(*gone)
        record = roster.record
        if record.round > state.round:
            self.members.send(node, {"record": wire.encode(record)})
        if node in record.active and rounds.began >= 0:
            roster.lost.pop(node, None)
            self.members.agents[node].has_joined = True  # its loss counts
        if state.done and (rounds.phase is Phase.RUN or node not in record.active):
            rounds.exclude(node, "its workers finished without the others")
        elif state.done and state.round == record.round:
            lost = next(iter(roster.lost.values()), Failure(Kind.AGENT, (node,)))
            rounds.fail(replace(lost, finished=1))
        elif not state.done and record.losses.get(node, 0) >= policy.LOSSES:
            rounds.exclude(node, f"it was lost {policy.LOSSES} times")
        elif not state.done and node in record.excluded:
            self.members.send(node, {"out": record.excluded[node]})

    def _hear_of_workers(self, rank: int, message: Mapping[str, Any]) -> None:
        rounds, members = self.rounds, self.members
        # Also of a round that has just ended: it may have been the first.
        if "died" in message and message.get("round") == rounds.began:
            failure = wire.decode(Failure, message["died"])
            failure = replace(failure, nodes=(rank,))
            rounds.failures.add(failure)
            if rounds.phase is Phase.RUN and not self._stopped:
                rounds.end(failure.brief)
        if "report" in message:
            summary = rounds.failures.summary()
            members.send(rank, {"report": summary and wire.encode(summary)})
        if "printed" in message:
            self._printed = True
            members.send_all({"printed": True})
        if type(number := message.get("question")) is int:
            self._questions.pop(rank, None)
            what = message.get("what")
            if type(what) is str and len(what) <= _SHORT:
                about = {"what": what, "with": message.get("with")}
                self._questions[rank] = {"question": [rank, number], **about}, set()
                for each in members.agents:
                    self._pass_on(each, *self._questions[rank])
        match message.get("reply"):
            case [int(asks), int(number)]:
                reply = {"replied": number, "node": rank, "of": message.get("of")}
                members.send(asks, reply)
