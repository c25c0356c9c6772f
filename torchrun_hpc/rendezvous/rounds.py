"""The rounds of a job: when one begins, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from torchrun_hpc import limits, waiting
from torchrun_hpc.failures.failure import Collection, Failure, Kind
from torchrun_hpc.rendezvous import record as records
from torchrun_hpc.rendezvous.key_value_store import KeyValueStore
from torchrun_hpc.rendezvous.messages import (
    Excluded,
    Finishing,
    Leased,
    Replaced,
    Restart,
    Waiting,
)
from torchrun_hpc.rendezvous.protocol import Go, Over
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torchrun_hpc.rendezvous.protocol import (
        Confirm,
        Ended,
        Present,
        Settings,
    )
    from torchrun_hpc.rendezvous.record import Record, Term
    from torchrun_hpc.rendezvous.roster import Members, Roster


class Phase(Enum):
    """The event that a coordinator waits for."""

    STANDBY = "standby"  # this node may have to take over
    SEEK = "seek"  # too few nodes have joined; it looks for another coordinator
    GATHER = "gather"  # enough nodes have joined, but not all are ready
    CONFIRM = "confirm"  # the round is formed; its nodes confirm it
    RUN = "run"  # workers run
    FINISHED = "finished"  # all active nodes have finished
    FAILED = "failed"  # the job has failed


# The phases that may follow each phase.
NEXT = {
    Phase.STANDBY: (Phase.SEEK,),
    Phase.SEEK: (Phase.GATHER, Phase.CONFIRM, Phase.FAILED, Phase.STANDBY),
    Phase.GATHER: (Phase.SEEK, Phase.CONFIRM, Phase.FAILED, Phase.STANDBY),
    Phase.CONFIRM: (Phase.GATHER, Phase.RUN, Phase.FAILED),
    Phase.RUN: (Phase.GATHER, Phase.FINISHED, Phase.FAILED),
    Phase.FINISHED: (),
    Phase.FAILED: (),
}

BETWEEN_ROUNDS = (Phase.SEEK, Phase.GATHER, Phase.CONFIRM)
_ENDS = (Phase.FINISHED, Phase.FAILED)


# Failures that can happen before all nodes have connected.
WHILE_STARTING = (Kind.AGENT, Kind.LOST, Kind.REFUSED)


class Rounds:
    """The rounds of a job.

    `round` is the number of the current or next round. The last round that `began` is
    -1 before the first one. `store` and `failures` belong to it.
    """

    def __init__(self, settings: Settings, members: Members, roster: Roster) -> None:
        record = roster.record
        self.phase = Phase.STANDBY
        self.failure: Failure | None = None
        self.round = record.round + 1
        self.began = record.round
        self.store = KeyValueStore()
        self.failures = Collection()
        self.roster = roster
        self._settings = settings
        self._members = members
        self._newest = record.round  # the latest round prepared anywhere
        self._term = record.term  # the highest one that any node has confirmed
        self._confirmed: set[int] = set()
        self._done: set[int] = set()
        self._replaced: list[tuple[int, int, int]] = []  # node rank, old and new node
        self._cause: Failure | None = None  # of the latest restart
        self._is_suspect = False  # whether a failed worker's node may be the cause
        self._is_told = True  # whether the user knows the cause
        self._waited = 0  # seconds since the first node was ready or done
        # Seconds since the last round ended, or since enough nodes are connected.
        self._gathered_for = 0
        self._go: Go
        self._failed_in: Phase | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.phase in _ENDS

    @property
    def has_quorum(self) -> bool:
        """Whether no other coordinator can have enough nodes for a round."""
        phase = self._failed_in or self.phase
        return phase not in BETWEEN_ROUNDS or self.roster.is_complete

    @property
    def _own_term(self) -> tuple[int, int]:
        """The highest term if it is this coordinator's, otherwise the next one."""
        takeovers, before = self._term
        coordinator = self._settings.coordinator
        return takeovers if before == coordinator else takeovers + 1, coordinator

    def _enter(self, phase: Phase) -> None:
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"{self.phase.value} -> {phase.value}")
        if self.phase in (Phase.RUN, Phase.SEEK):
            self._gathered_for = 0
        self.phase = phase

    # --- what changes who takes part ----------------------------------------------

    def take_over(self) -> None:
        """Continue from the record of a lost coordinator."""
        record, roster = self.roster.record, self.roster
        before = record.term[1]
        self._enter(Phase.SEEK)
        if self.began >= 0:
            roster.lease({*record.active, *record.leased})
            self._cause = Failure(Kind.LOST, (before,))
            self._is_told = False
            self.lose(before, self._cause)
        elif before != self._settings.coordinator:
            roster.late.add(before)  # all have looked for it

    def _adopt(self, term: Term, record: Record | None) -> None:
        """Use a newer record, of a round that has begun, or might have.

        `term` is the highest one that a node has confirmed. Another coordinator of a
        higher term may still begin an earlier round.
        """
        self._term, present = max(self._term, term), self.roster.record
        if record is None or not record.active or not record.is_newer(present.age):
            return
        self._newest = max(self._newest, record.round)
        # If this one runs a round, that one never began: it lacked a quorum.
        if self.phase in BETWEEN_ROUNDS:
            self.began = max(self.began, record.round)
            self.roster.adopt(record)
            self._unconfirm()

    def came(self, node: int, state: Present) -> None:
        """Use the knowledge of a node that has just been accepted."""
        self._adopt(state.term, state.record)
        gone = self.roster.came(node, state)
        if gone is not None and gone[1] >= self.roster.record.round:
            self.ended(*gone)
        record = self.roster.record
        if record.round > state.round:
            self._members.send(node, record)
        if node in record.active and self.began >= 0:
            self.roster.lost.pop(node, None)
            self._members.joined(node)  # its loss counts
        if state.done and (self.phase is Phase.RUN or node not in record.active):
            self.exclude(node, "its workers finished without the others")
        elif state.done and state.round == record.round:
            lost = self.roster.loss or Failure(Kind.AGENT, (node,))
            self.fail(replace(lost, finished=1))
        elif not state.done and record.losses.get(node, 0) >= records.LOSSES:
            self.exclude(node, f"it was lost {records.LOSSES} times")
        elif not state.done and node in record.excluded:
            self._members.send(node, Excluded(node, record.excluded[node]))

    def unhealthy(self, node: int, reason: str) -> None:
        """Exclude an unhealthy node, whose workers have ended."""
        self.roster.leases.pop(node, None)
        self.exclude(node, reason)

    def removed(self, node: int, connection: Hashable) -> None:
        """Handle that a node is no longer connected."""
        self.store.forget(connection)
        self.roster.removed(node)
        if node in self.roster.active:
            self._unconfirm()

    def lose(self, node: int, failure: Failure) -> None:
        """Continue without a node; without spares, wait until it is started again."""
        roster, is_running = self.roster, self.phase is Phase.RUN
        if node not in roster.active or self.has_ended:
            return
        if self._settings.has_spares:
            roster.lose(node, failure)
        if is_running:
            self.end(failure)
        elif (
            not self._settings.has_spares and self.round >= self._settings.max_restarts
        ):
            self.fail(failure)  # nobody replaces it
        self._is_suspect = False  # later failures are consequences
        if failure.kind is Kind.SILENT and node in roster.leases:
            roster.leases[node] = self._settings.kill + 1  # this second also counts
        self._unconfirm()
        self._form_or_fail()

    def ended(self, node: int, number: int) -> None:
        """Handle that a node's agent has ended; `number` is its last round."""
        self.roster.ended(node, number, has_begun=self.began >= 0)
        if self.phase is not Phase.RUN:  # the active nodes may finish without it
            self._form_or_fail()

    def exclude(self, node: int, reason: str) -> None:
        """Exclude a node from the job."""
        if node not in self.roster.record.excluded:
            self.roster.exclude(node, reason)
            if node in self.roster.active:
                self._unconfirm()
            self._form_or_fail()

    def _unconfirm(self) -> None:
        if self.phase is Phase.CONFIRM:
            self._enter(Phase.GATHER)

    def _form_or_fail(self) -> None:
        if len(self.roster.left) < self.roster.wanted:
            self.fail(self.roster.why(self._cause))
        self._form()

    # --- a round ------------------------------------------------------------------

    def join(self, node: int) -> None:
        """Handle that a node is ready for a round."""
        if self.phase is Phase.RUN and node in self.roster.active:
            text = "it asked for another restart"
            self.end(Failure(Kind.AGENT, (node,), text=text))
        if self.has_ended:
            return
        self._members.joined(node)
        self.roster.ready.add(node)
        self.roster.leases.pop(node, None)
        self._form()

    def _form(self) -> None:
        roster, settings = self.roster, self._settings
        if self.phase not in (Phase.SEEK, Phase.GATHER):
            self._begin_if_confirmed()
            return
        if self._is_suspect and roster.assigned() is not None:
            self._judge()
        active = roster.assigned()
        if active is None:
            return
        pairs = zip(roster.active, active, strict=True)
        places = [(rank, old, new) for rank, (old, new) in enumerate(pairs)]
        self._replaced = [each for each in places if each[1] != each[2]]
        self._term = self._own_term
        # Another coordinator may have prepared a later round that never began.
        self.round = (self._newest if settings.has_spares else self.began) + 1
        if self.round > settings.max_restarts:
            self.fail(roster.why(self._cause))
            return
        self._newest = self.round
        self._enter(Phase.CONFIRM)
        self._confirmed.clear()
        self._waited = 0
        roster.prepare(active, self._term, self.round)

    def _judge(self) -> None:
        self._is_suspect, summary = False, self.failures.summary()
        node = summary.first.nodes[0] if summary is not None else -1
        if node in self.roster.active:
            self.roster.blame(node)

    def confirm(self, node: int, confirm: Confirm) -> None:
        """Handle that a node has confirmed a round, and perhaps opened the store."""
        is_this = (confirm.round, confirm.term) == self.roster.record.age
        if self.phase is not Phase.CONFIRM or not is_this:
            return
        if node == self.roster.active[0]:
            if confirm.store is None:
                raise WireError("no store for the workers")
            self._go = Go(self.round, confirm.store)
        self._confirmed.add(node)
        self._begin_if_confirmed()

    def _begin_if_confirmed(self) -> None:
        """Begin the round once it is confirmed, and no older worker runs."""
        is_confirmed = self._confirmed.issuperset(self.roster.to_confirm)
        if self.phase is Phase.CONFIRM and is_confirmed and not self.roster.leases:
            self._begin()

    def _begin(self) -> None:
        roster = self.roster
        self._report_restart()
        if self.began < 0:
            self._members.report_differences()
        self._enter(Phase.RUN)
        self.began = self.round
        self.store = KeyValueStore()
        self.failures.clear()
        self._done.clear()
        for node in roster.active:
            self._members.send(node, self._go)
        roster.began()

    def end(self, failure: Failure) -> None:
        """Let all nodes join the next round, or end the job if no restart is left."""
        is_last = self._done or self.round >= self._settings.max_restarts
        if self.has_ended or is_last:
            self.fail(replace(failure, finished=len(self._done)))
            return
        self._cause = failure
        self._is_suspect = failure.kind is Kind.WORKER
        # Without spares, a loss is reported already.
        self._is_told = failure.kind is Kind.LOST and not self._settings.has_spares
        self._enter(Phase.GATHER)
        self._waited = 0
        self.roster.ready.clear()
        self._members.send_all(Over(self.round, failure.is_hang))
        self.round += 1
        self.roster.lease(self.roster.active)

    def died(
        self, node: int, failure: Failure, number: int, *, may_restart: bool
    ) -> None:
        """Handle a failed worker of a round, even if the round has just ended.

        Its failure may have been the first one.
        """
        if number != self.began:
            return
        failure = replace(failure, nodes=(node,))
        self.failures.add(failure)
        if self.phase is Phase.RUN and may_restart:
            self.end(failure.brief)

    def done(self, node: int, number: int) -> None:
        """Handle that a node's workers have finished a round."""
        if self.phase in BETWEEN_ROUNDS:
            # The node has finished without hearing of the restart: it cannot take part.
            if self._cause is not None and number == self.round - 1:
                self.fail(replace(self._cause, finished=1))
        elif self.phase is Phase.RUN and number == self.round:
            self._done.add(node)
            self._waited = 0
            if self._done.issuperset(self.roster.active):
                self._enter(Phase.FINISHED)
                self._members.send_all(self.ending)

    def is_done(self, node: int) -> bool:
        """Return whether a node's agent may end, because its workers are done."""
        return self.has_ended or node in self._done

    def fail(self, failure: Failure) -> None:
        """End the job, and inform all agents. Only the first failure counts."""
        if self.has_ended or self.phase is Phase.STANDBY:
            return
        self._failed_in, self.failure = self.phase, failure
        self._enter(Phase.FAILED)
        if failure.kind in WHILE_STARTING:
            self._members.accounted_for.update(failure.nodes)
        ending = self.ending
        for rank in self._members.agents:
            self._members.inform(rank, ending)

    @property
    def ending(self) -> Ended:
        """The message to agents about the job's end."""
        ending = self.roster.ending(
            self.failure and self.failure.brief,
            has_begun=self.began >= 0,
            has_quorum=self.has_quorum,
        )
        return replace(ending, takeovers=self._own_term[0])

    # --- time ---------------------------------------------------------------------

    def wait(self) -> None:
        """Count a second: report who is missing, and end when the time is up."""
        roster = self.roster
        if self.phase is Phase.SEEK and roster.is_complete:
            self._enter(Phase.GATHER)
        elif self.phase is Phase.GATHER and not roster.is_complete:
            self._enter(Phase.SEEK)
        if self.phase in BETWEEN_ROUNDS:
            self._gathered_for += 1
            is_loss = roster.lost or (self._cause and self._cause.kind is Kind.LOST)
            if self._gathered_for == limits.RESTART_REPORT and not is_loss:
                self._report_restart()
        self._wait_for_nodes()
        if self.phase in BETWEEN_ROUNDS:
            self._wait_to_form()
        if self.phase is Phase.RUN:
            roster.share_news()

    def _wait_for_nodes(self) -> None:
        record, timeout = self.roster.record, self._settings.join_timeout
        is_running, is_formed = self.phase is Phase.RUN, self.phase is Phase.CONFIRM
        ready = self._done if is_running else self.roster.ready
        away = {*record.active} - ready | record.excluded.keys()
        if is_formed:
            away = self.roster.to_confirm - self._confirmed
        missing = [node for node in record.active if node in away]
        # If none is ready, all train; or it is a dry run, which has no round.
        if not ready or not missing:
            return
        self._waited += 1
        if waiting.is_report_due(self._waited):
            late, unproved = tuple(missing), tuple(self._members.unproved)
            news = Waiting(late, self._waited, unproved)
            self._members.report(Finishing(late, self._waited) if is_running else news)
        # With spares, leases may last longer.
        is_late = self._waited >= timeout and not is_running
        if is_late and not (is_formed and self._settings.has_spares):
            self.fail(Failure(Kind.MISSING, tuple(missing), code=timeout))

    def _wait_to_form(self) -> None:
        """Form the round, without late nodes if that is safe."""
        roster, settings = self.roster, self._settings
        active, has_quorum = {*roster.active}, self.phase is not Phase.SEEK
        roster.count(has_quorum=has_quorum)
        if roster.leases and has_quorum and self._gathered_for == limits.FIRST_REPORT:
            left = max(roster.leases.values())
            self._members.report(Leased(tuple(sorted(roster.leases)), left))
        late = roster.to_confirm - self._confirmed
        is_due = self._gathered_for % limits.CONFIRM_INTERVAL == 0
        if late and self.phase is Phase.CONFIRM and is_due:
            roster.prepare_again(late)
        limit = settings.spare_after
        if self.began >= 0:
            limit = max(limit, settings.kill + settings.health_check)
        if self._gathered_for >= limit:
            roster.late |= active - roster.ready
        self._form()
        if self.phase is Phase.SEEK:
            self._fail_without_quorum()

    def _fail_without_quorum(self) -> None:
        """End the job if too few nodes have been connected for too long.

        If the other nodes could be a world, wait longer: it may need this node as a
        spare.
        """
        away, limit = self.roster.away, self.roster.longest_run
        if self.began < 0 or len(away) >= self.roster.wanted:
            limit = max(self._settings.join_timeout, limit)
        if self._gathered_for >= limit:
            missing = tuple(sorted(away | self.roster.gone.keys()))
            kind = Kind.SILENT if self.began >= 0 else Kind.MISSING
            self.fail(Failure(kind, missing, code=self._gathered_for))

    # --- reports ------------------------------------------------------------------

    def _report_restart(self) -> None:
        cause = None if self._is_told else self._cause
        cause = self.roster.loss or cause
        summary = self.failures.summary()
        if summary is not None and cause is not None and cause.kind is Kind.WORKER:
            cause = summary.first  # not the one that arrived first
        if self._replaced:
            places = tuple(self._replaced)
            self._members.report(Replaced(places, self.round, cause))
        elif cause is not None:
            self._members.report(Restart(self.round, cause))
        self._is_told, self._replaced = True, []
