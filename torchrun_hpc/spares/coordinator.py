"""The coordinator of a job with spares: it forms each round out of those that are left.

    gather ──► prepare ──► confirm ──► go ──► over
       ▲                                       │
       └───────────────────────────────────────┘

Members connect, and say that they are ready: their workers have ended, their node is
well. When each node rank has a member, the coordinator sends the record of the round to
all; the active ones confirm it, and their workers start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import waiting, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.coordinator import Coordinator, Settings
from torchrun_hpc.spares import record as records
from torchrun_hpc.spares.record import MemberState
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torchrun_hpc.rendezvous.coordinator import _Agent
    from torchrun_hpc.spares.record import Address, Record

_LOST = (Kind.LOST, Kind.SILENT)  # what the coordinator of nodes reports otherwise

_REASON = 200  # characters of why a node is out
SUSPENDED = 2  # seconds: who notices later that a lease has ended was suspended
_AGAIN = 5  # seconds until a member that has not confirmed a round is asked again


class Limits(NamedTuple):
    """Seconds, of a job with spares.

    Attributes:
        spare_after: Until a spare takes the place of a member that has not come.
        kill: Until the workers of a node have ended that are told to.
        health_check: That the health check of a node may take.
    """

    spare_after: int
    kill: int
    health_check: int = 0


class SparesCoordinator(Coordinator):
    """The coordinator's view of a job with spares; ``nodes`` are its members.

    Args:
        settings: What all agents agree on; its ``coordinator`` is this member.
        limits: How long things may take.
        record: What this member knows of the job. After the first round its
            coordinator was lost, and this one takes over.

    Attributes:
        record: What is known of the job.
        addresses: Where the members can be asked that have come so far.
    """

    def __init__(self, settings: Settings, limits: Limits, record: Record) -> None:
        super().__init__(settings)
        self.record = record
        self.addresses = {**record.addresses}
        self._limits = limits
        self._term = record.term  # the highest one that any member has confirmed
        self._newest = record.round  # the latest round that was prepared anywhere
        self.round = record.round + 1
        self._has_run = self.round > 0
        # Seconds in which members may come for the first time.
        self._expected_for = 0 if self._has_run else settings.join_timeout
        self._present: set[int] = set()  # members that have said where they are
        # Members of which the process has ended, and the round that they had come to.
        self._gone: dict[int, int] = {}
        self._missed: set[int] = set()  # members that were here
        self._lost: dict[int, Failure] = {}  # active members, and how
        self._late: set[int] = set()  # active members that are not waited for
        self._may_run: dict[int, int] = {}  # members with workers: seconds, at most
        self._others = {record.term[1]}  # members that may coordinate some
        self._confirmed: set[int] | None = None  # none, while there is no record
        self._has_news = False  # workers have failed, and nobody is blamed yet
        self._replaced: list[tuple[int, int, int]] = []  # node rank, who by whom
        self._formed_for = 0  # seconds
        self._was_strong = False  # a second ago
        self._next_ones: dict[int, Address] = {}  # may take over, as all know
        before = record.term[1]
        if self._has_run:
            self._may_run = self._time_for({*record.active, *record.may_run})
            self._cause = Failure(Kind.LOST, (before,))
            self._lose(before, self._cause)
        elif before != settings.coordinator:
            self._late.add(before)  # all have looked for it

    @property
    def wanted(self) -> int:
        """How many members are active in a round."""
        return len(self.record.active)

    @property
    def is_strong(self) -> bool:
        """Whether there are enough members here, so that there are not elsewhere."""
        here = self._present - self.record.out.keys()
        return self.running or len(here) >= self.wanted

    @property
    def _longest_run(self) -> int:
        """Seconds for which workers may run that nobody can end: a member's lease.

        Their agent ends them when it has not heard of the coordinator for so long.
        """
        return self.settings.silence_timeout + self._limits.kill

    @property
    def here(self) -> AbstractSet[int]:
        """Members that are connected."""
        return self._agents.keys()

    @property
    def absent(self) -> Collection[int]:
        """Members of which it is to be found out whether they are still there."""
        if self.running or self.failure is not None or self.finished:
            return ()
        came = {*self.addresses, *(self.record.active if self._has_run else ())}
        return came - self._agents.keys() - self._gone.keys()

    @property
    def expects_nodes(self) -> bool:
        """See `Coordinator`. A short job may end before a spare has come."""
        if not self._has_run or self._seconds >= self._expected_for:
            return super().expects_nodes
        is_signal = self.failure is not None and self.failure.kind is Kind.SIGNAL
        return not is_signal and len(self.here | self._missed) < self.settings.nodes

    # --- events -------------------------------------------------------------------

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """Handle a message.

        Raises:
            WireError: It is not valid; the connection is to be closed.
        """
        member = self._ranks.get(connection)
        if member is not None and "present" in message:
            self._handle_present(member, message["present"])
        if member is not None and "unfit" in message:
            self._may_run.pop(member, None)  # it is asked when they have ended
            self._put_out(member, str(message["unfit"]))
        super().receive(connection, message)
        if member is not None and "confirm" in message:
            self._confirm(member, message)
        if member is not None and "bye" in message:  # its workers have ended before
            self._end_of(member, self.record.round)

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:
        """Handle the end of a connection; see `Coordinator.disconnected`."""
        member = self._ranks.get(connection)
        super().disconnected(connection)
        if ended and member is not None and member not in self._agents:
            self._end_of(member, self.record.round)

    def tick(self, seconds: int = 1) -> None:
        """Handle that a second has passed, however late; see `Coordinator.tick`."""
        super().tick(seconds)
        if self.running and self._first_addresses() != self._next_ones:
            self._share_with_all("record")

    def _end_of(self, member: int, number: int) -> None:
        """Take note that the process of a member has ended, which was in a round."""
        self._gone[member] = number
        self._may_run.pop(member, None)
        shorter = self._time_for(self._may_run)
        self._may_run = {m: min(s, shorter[m]) for m, s in self._may_run.items()}
        if member in self.record.active and self._has_run:
            self._lost.setdefault(member, Failure(Kind.LOST, (member,)))
        if not self.running:  # those that are active may finish without it
            self._go_on()

    def _handle_present(self, member: int, value: Any) -> None:
        """Take note where a member can be asked, and what it knows."""
        state = wire.decode(MemberState, value)
        gone, gone_in = state.gone or (-1, -1)
        self._term = max(self._term, state.term)
        if state.record is not None:
            self._learn(state.record)
        self.addresses[member] = state.address
        self._present.add(member)
        self._gone.pop(member, None)
        is_gone = gone in range(self.settings.nodes) and gone not in self._agents
        if is_gone and gone_in >= self.record.round:
            self._end_of(gone, gone_in)
        if self.record.round > state.round:
            self._send(self._agents[member], {"record": wire.encode(self.record)})
        if self._has_run and member in self.record.active:
            self._lost.pop(member, None)
            self._agents[member].has_joined = True  # its loss counts
        if state.done:
            self._came_done(member, state.round)
        elif self.record.losses.get(member, 0) >= records.LOSSES:
            self._put_out(member, f"it was lost {records.LOSSES} times")
        elif member in self.record.out:
            self._send(self._agents[member], {"out": self.record.out[member]})

    def _came_done(self, member: int, number: int) -> None:
        """Take note that the workers of a member had finished a round."""
        if self.running or member not in self.record.active:
            self._put_out(member, "its workers had finished, without the others")
        elif number == self.record.round:
            lost = next(iter(self._lost.values()), Failure(Kind.AGENT, (member,)))
            self.fail(replace(lost, finished=1))

    def _time_for(self, members: Collection[int]) -> dict[int, int]:
        """Return the seconds after which members cannot have workers any more."""
        limit, here = self._longest_run, {self.settings.coordinator, *self._agents}
        elsewhere = self._others - here - self._gone.keys()
        # Until they miss those that are here, they may renew the leases of others.
        renews = elsewhere or self.record.may_run
        late = self.settings.silence_timeout if renews else 0
        return {m: limit if {m} == elsewhere else limit + late for m in members}

    def _first_addresses(self) -> dict[int, Address]:
        """Return where those are that may have to take over."""
        fit = sorted(self._present - self.record.out.keys())
        first = fit[: self.settings.spares + 1]
        return {member: self.addresses[member] for member in first}

    def _learn(self, known: Record) -> None:
        """Use a newer record, of a round that has begun, or might have.

        Another coordinator, of a higher term, may still begin an earlier round.
        """
        is_newer = known.age > self.record.age
        if known.active == () or not (is_newer or known.term > self.record.term):
            return
        self._newest = max(self._newest, known.round)
        if self.running:  # that one never began: too few were there
            return
        self._others.add(known.term[1])
        if is_newer:
            self.addresses = {**known.addresses, **self.addresses}
            self.record = known
        self._confirmed = None
        self._has_run = True
        running = {*self._may_run, *known.active, *known.may_run}
        self._gone = {m: n for m, n in self._gone.items() if n >= known.round}
        self._may_run = self._time_for(running - self._joined - self._gone.keys())

    def _agent_came(self, rank: int) -> None:
        """Begin another round where an active member has lost its connection."""
        if self.running and rank in self.record.active:
            self._agent_lost(rank)

    def _welcome(self) -> dict[str, Any]:
        own = self.settings.coordinator
        return {**super()._welcome(), "age": self.record.age, "coordinator": own}

    def _remove(self, rank: int) -> None:
        super()._remove(rank)
        self._present.discard(rank)
        self._missed.add(rank)
        if rank in self.record.active:
            self._confirmed = None

    # --- who is lost, or out ------------------------------------------------------

    def _agent_lost(self, rank: int) -> None:
        self._lose(rank, Failure(Kind.LOST, (rank,)))

    def _agent_failed(self, rank: int, failure: Failure) -> None:
        """Go on without a member that gives up, or cannot start, if there are enough.

        It is told so as if the job had failed: for this member it has.
        """
        left = self._left - {rank}
        is_own_fault = failure.kind is Kind.AGENT and rank != self.settings.coordinator
        has_ended = self.finished or self.failure is not None
        if has_ended or not is_own_fault or len(left) < self.wanted:
            super()._agent_failed(rank, failure)
            return
        self._put_out(rank, failure.text)
        self._lose(rank, failure)
        if rank in self._agents:
            self._inform(rank, self._agents[rank].connection, failure)

    def _agent_silent(self, rank: int) -> None:
        silent_for = self._agents[rank].silent_for
        if silent_for > self.settings.silence_timeout + SUSPENDED:
            self._report({"suspended": silent_for})  # it has no time to end its workers
        self._remove(rank)
        timeout = self.settings.silence_timeout
        self._lose(rank, Failure(Kind.SILENT, (rank,), code=timeout))
        self._accept_candidate(rank)

    def _lose(self, member: int, failure: Failure) -> None:
        """Go on without a member."""
        if member not in self.record.active:
            return
        self.record = records.lost(self.record, member)
        self._has_news = False  # who fails then, fails of it
        self._lost[member] = failure
        if self.running:
            self._end_round(failure)
        if failure.kind is Kind.SILENT and member in self._may_run:
            self._may_run[member] = self._limits.kill + 1  # this second counts, too
        self._confirmed = None
        self._go_on()

    def _put_out(self, member: int, reason: str) -> None:
        if member in self.record.out:
            return
        reason = printable(reason, _REASON)
        self.record = records.put_out(self.record, member, reason)
        self._joined.discard(member)
        self._report({"excluded": member, "because": reason})
        if member in self._agents:
            self._send(self._agents[member], {"out": reason})
        if member in self.record.active and not self.running:
            self._confirmed = None
        self._go_on()

    def _go_on(self) -> None:
        """Form the round, or end the job if too few members can be left."""
        if len(self._left) < self.wanted:
            self.fail(self._why())
        self._form()

    @property
    def _left(self) -> set[int]:
        """Members that may be active once more."""
        gone_or_out = self._gone.keys() | self.record.out.keys()
        return set(range(self.settings.nodes)) - gone_or_out

    def _why(self) -> Failure:
        """Return why the job cannot go on."""
        if self._gone:
            return Failure(Kind.LOST, tuple(sorted(self._gone)))
        if self.record.out:
            nodes = tuple(sorted(self.record.out))
            return Failure(Kind.UNFIT, nodes, text=self.record.out[nodes[-1]])
        lost = next(iter(self._lost.values()), None)
        return lost or self._cause or Failure(Kind.AGENT, text="no restart is left")

    # --- rounds -------------------------------------------------------------------

    @property
    def _in_round(self) -> Sequence[int]:
        return self.record.active

    def _join(self, agent: _Agent, _message: Mapping[str, Any]) -> None:
        """Take note that a member is ready for a round: its workers have ended."""
        member = agent.request.rank
        if self.running and member in self.record.active:
            text = "it wanted another restart"
            self._end_round(Failure(Kind.AGENT, (member,), text=text))
        if self.finished or self.failure is not None:
            return
        agent.has_joined = True
        self._joined.add(member)
        self._may_run.pop(member, None)
        self._form()

    def _end_round(self, failure: Failure) -> None:
        super()._end_round(failure)
        if self.failure is None:
            self._has_news = failure.kind is Kind.WORKER
            self._may_run = self._time_for(self.record.active)
            self._formed_for = 0

    def _form(self) -> None:
        """Prepare the round, if there is a member for each node rank."""
        has_ended = self.failure is not None or self.finished
        if has_ended or self.running or self._confirmed is not None:
            self._commit()
            return
        active = self._assigned()
        if active is not None and self._has_news:
            self._blame()
            active = self._assigned()
        if active is None:
            return
        before = self.record.active
        self._replaced = [
            (rank, old, new)
            for rank, (old, new) in enumerate(zip(before, active, strict=True))
            if old != new
        ]
        number, coordinator = self._term
        if coordinator != self.settings.coordinator:
            self._term = number + 1, self.settings.coordinator
        self.round = self._newest + 1
        if self.round > self.settings.max_restarts:
            self.fail(self._why())
            return
        self._newest = self.round
        self.record = replace(
            self.record,
            term=self._term,
            round=self.round,
            active=active,
            may_run=tuple(sorted(self._may_run)),
        )
        self._confirmed = set()
        self._share_with_all("prepare")

    def _share_with_all(self, key: str) -> None:
        """Send the record to all, who then know where those are that may take over."""
        self._next_ones = self._first_addresses()
        self._share(key, self._agents.keys())

    def _share(self, key: str, members: AbstractSet[int]) -> None:
        """Send the record to members.

        Those that may have to take over need the addresses of all; the others need
        theirs. If more are lost, the job cannot go on.
        """
        known = {member: self.addresses[member] for member in self._present}
        self.record = replace(self.record, addresses=known)
        everything = {key: wire.encode(self.record)}
        rest = {key: wire.encode(replace(self.record, addresses=self._next_ones))}
        for member in sorted(members & self._agents.keys()):
            message = everything if member in self._next_ones else rest
            self._send(self._agents[member], message)

    def _assigned(self) -> tuple[int, ...] | None:
        if len(self._joined) < self.wanted:
            return None
        ready, leaving = self._joined & self._present, self._lost.keys() | self._late
        return records.assigned(self.record, ready, leaving)

    def _blame(self) -> None:
        """Find out whether the node of the first worker that failed is the cause."""
        self._has_news = False
        summary = self._worker_failures.summary()
        if summary is None or summary.first.nodes[0] not in self.record.active:
            return
        spares = self._joined - set(self.record.active) - self.record.out.keys()
        before, member = self.record.out, summary.first.nodes[0]
        self.record = records.blamed(self.record, member, has_spare=bool(spares))
        for each in before.keys() ^ self.record.out.keys():
            reason = self.record.out.get(each, "")
            self._report({"excluded": each, "because": reason})
            if each in self._agents:
                self._send(self._agents[each], {"out": reason})

    def _confirm(self, member: int, message: Mapping[str, Any]) -> None:
        """Take note that a member has confirmed the round."""
        is_current = message["confirm"] == [list(self.record.term), self.record.round]
        if self._confirmed is None or self.running or not is_current:
            return
        self._confirmed.add(member)
        if member == self.record.active[0]:
            self._workers_store = message.get("store")
        self._commit()

    def _commit(self) -> None:
        """Begin the round, if all have confirmed it, and no older worker runs."""
        confirmed = self._confirmed or set()
        is_ready = confirmed.issuperset(self.record.active) and not self._may_run
        if is_ready and not (self.running or self.failure or self.finished):
            self._start_round()

    def _start_round(self) -> None:
        self._report_round()
        super()._start_round()
        self.record = replace(self.record, may_run=())
        self._confirmed = None
        self._has_news = False
        self._others.clear()
        self._lost.clear()
        self._late.clear()

    def _report_round(self) -> None:
        """Report a restart in which nodes have been lost, or replaced."""
        lost = next(iter(self._lost.values()), None)
        cause = lost or self._cause
        because = wire.encode(cause) if cause else None
        if self._replaced:
            is_news = lost is not None or self._restart_reported_in >= 0
            self._restart_reported_in = -1
            news = {"replaced": self._replaced, "round": self.round}
            self._report({**news, "because": because if is_news else None})
        elif because is not None and cause is not None and cause.kind in _LOST:
            self._report({"restart": self.round, "because": because})

    def _wait(self) -> None:
        if self.running or not self._ready.issuperset(self.record.active):
            super()._wait()
        was_strong, self._was_strong = self._was_strong, self.is_strong
        if self.running:
            return
        if self._was_strong and not was_strong:
            self._formed_for = 0  # now it can form one
        is_due = self._was_strong and waiting.is_report_due(self._formed_for)
        if self._may_run and is_due:
            nodes, left = sorted(self._may_run), max(self._may_run.values())
            self._report({"may_run": nodes, "left": left})
        self._formed_for += 1
        self._count_time()
        self._ask_again()
        limits, limit = self._limits, self._limits.spare_after
        if self._has_run:
            limit = max(limit, limits.kill + limits.health_check)
        if self._formed_for >= limit:
            self._late |= set(self.record.active) - self._joined
        self._form()
        self._give_up()

    @property
    def _ready(self) -> set[int]:
        return super()._ready - self.record.out.keys()

    def _count_time(self) -> None:
        """Count the seconds in which workers may run that nobody can end.

        Too few members cannot tell: the others may be a world, which goes on. Those
        that come from it have ended it.
        """
        if not self.is_strong:
            self._may_run = self._time_for(self._may_run)
            return
        self._may_run = {m: left - 1 for m, left in self._may_run.items() if left > 1}

    def _ask_again(self) -> None:
        """Ask members again that have not confirmed the round, and say who they are."""
        if self._confirmed is None or self._formed_for % _AGAIN:
            return
        late = set(self.record.active) - self._confirmed
        if late:
            self._share("prepare", late)
        if late and waiting.is_report_due(self._formed_for):
            self._report({"waiting": sorted(late), "seconds": self._formed_for})

    def _give_up(self) -> None:
        """End the job where too few have come for too long.

        As long as the others could be a world without those that are here, this one
        may be wanted as a spare.
        """
        if self.is_strong or self.failure is not None:
            return
        limit = self._longest_run
        if not self._has_run or len(self._away) >= self.wanted:
            limit = max(self.settings.join_timeout, limit)
        if self._formed_for >= limit:
            missing = tuple(sorted(self._away | self._gone.keys()))
            kind = Kind.SILENT if self._has_run else Kind.MISSING
            self.fail(Failure(kind, missing, code=self._formed_for))

    @property
    def _away(self) -> set[int]:
        """Members that are not here, and may be a world elsewhere."""
        return set(range(self.settings.nodes)) - self._agents.keys() - self._gone.keys()

    # --- what is sent -------------------------------------------------------------

    def _report_restart(self) -> None:
        if not self._lost:  # else it is reported with who takes their places
            super()._report_restart()

    def _last_words(self) -> dict[str, Any]:
        """Return which members were lost or out, and whether this is the end for all.

        The next job may do without them. Where this member has just taken over, others
        may be on their way.
        """
        bad = set(range(self.settings.nodes)) if self._has_run else set()
        if self._seconds < self.settings.silence_timeout:
            bad &= self._gone.keys() | self._missed | self.record.losses.keys()
        bad = bad - self._agents.keys() | self.record.out.keys()
        is_certain = self.is_strong or len(self._away) < self.wanted
        return {"out_at_end": sorted(bad), "is_certain": is_certain}
