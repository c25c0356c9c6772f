"""The coordinator's roster of nodes: who takes part, is lost, or is excluded.

With spares, the workers of an unreachable node may continue, and another coordinator
may lead them. So a round waits until their time is up: until their leases end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import policy
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from torchrun_hpc.rendezvous.members import Members
    from torchrun_hpc.rendezvous.protocol import Settings
    from torchrun_hpc.rendezvous.record import Address, MemberState, Record

_REASON = 200  # characters of a reason to exclude a node


class Roster:
    """The roster of all nodes.

    Attributes:
        ready: Nodes that wait for the next round, because their workers have ended.
        present: Connected nodes that have sent their address.
        addresses: Where the nodes can be asked that have joined so far.
        gone: Nodes whose agent has ended, and their last round.
        lost: Active nodes lost since the last round, and how.
        late: Active nodes that are not waited for.
        leases: Seconds for which nodes may have workers, at most.
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
        self._next_ones: dict[int, Address] = {}  # all know that they may take over

    # --- who can take part --------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The number of active nodes in a round."""
        return len(self.record.active)

    @property
    def is_complete(self) -> bool:
        """Whether so many nodes are here that too few are left elsewhere."""
        return len(self.present - self.record.excluded.keys()) >= self.wanted

    @property
    def left(self) -> set[int]:
        """Nodes that may be active again."""
        out = self.gone.keys() | self.record.excluded.keys()
        return set(range(self._settings.nodes)) - out

    @property
    def away(self) -> set[int]:
        """Nodes that are not here, and may be a world elsewhere."""
        here = self.gone.keys() | self._members.agents.keys()
        return set(range(self._settings.nodes)) - here

    def assigned(self) -> tuple[int, ...] | None:
        """Return the active nodes of the next round; ``None`` if some are missing."""
        if len(self.ready) < self.wanted:
            return None
        leaving = self.lost.keys() | self.late
        return policy.assigned(self.record, self.ready & self.present, leaving)

    def exclude(self, node: int, reason: str) -> None:
        """Exclude a node from the job."""
        self.ready.discard(node)
        reason = printable(reason, _REASON)
        self._replace(policy.excluded(self.record, node, reason))

    def blame(self, node: int) -> None:
        """Record that a worker of an active node was the first to fail."""
        spares = self.ready - set(self.record.active) - self.record.excluded.keys()
        self._replace(policy.blamed(self.record, node, has_spare=bool(spares)))

    def _replace(self, record: Record) -> None:
        changed = record.excluded.keys() ^ self.record.excluded.keys()
        self.record = record
        for node in changed:
            reason = record.excluded.get(node, "")
            self._members.report({"excluded": node, "because": reason})
            self._members.send(node, {"out": reason})

    def lose(self, node: int, failure: Failure) -> None:
        """Record the loss of an active node."""
        self.record = policy.lost(self.record, node)
        self.lost[node] = failure

    def why(self, cause: Failure | None) -> Failure:
        """Return why the job cannot continue, given the latest restart's cause."""
        if self.gone:
            return Failure(Kind.LOST, tuple(sorted(self.gone)))
        if out := self.record.excluded:
            nodes = tuple(sorted(out))
            return Failure(Kind.EXCLUDED, nodes, text=out[nodes[-1]])
        lost = next(iter(self.lost.values()), None)
        return lost or cause or Failure(Kind.AGENT, text="no restart is left")

    def closing(self, *, has_begun: bool, has_quorum: bool) -> dict[str, Any]:
        """Return which nodes were lost or excluded, and whether this ends it for all.

        If this node has just taken over, others may be on their way.
        """
        settings, members = self._settings, self._members
        bad = set(range(settings.nodes)) if has_begun else set()
        if members.seconds < settings.silence_timeout:
            bad &= self.gone.keys() | members.seen | self.record.losses.keys()
        bad = bad - members.agents.keys() | self.record.excluded.keys()
        is_certain = has_quorum or len(self.away) < self.wanted
        return {"out_at_end": sorted(bad), "is_certain": is_certain}

    # --- leases -------------------------------------------------------------------

    @property
    def longest_run(self) -> int:
        """Seconds for which workers may run that nobody can end: a node's lease.

        Their agent ends them if it has not heard of the coordinator for so long.
        """
        return self._settings.silence_timeout + self._settings.kill

    def lease(self, nodes: Iterable[int]) -> None:
        """Count for how long these nodes, and no others, may have workers."""
        self.leases = self._longest(nodes)

    def _longest(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the seconds after which nodes can no longer have workers."""
        limit = self.longest_run
        here = {self._settings.coordinator, *self._members.agents}
        elsewhere = self.coordinators - here - self.gone.keys()
        # Until they miss the nodes here, they may renew the leases of others.
        renews = elsewhere or self.record.leased
        late = self._settings.silence_timeout if renews else 0
        return {n: limit if {n} == elsewhere else limit + late for n in nodes}

    def ended(self, node: int, number: int) -> None:
        """Record that a node's agent has ended, which was in a round."""
        self.gone[node] = number
        self.leases.pop(node, None)
        shorter = self._longest(self.leases)
        self.leases = {n: min(s, shorter[n]) for n, s in self.leases.items()}

    def count(self, *, has_quorum: bool) -> None:
        """Count a second of the leases, if there is a quorum.

        Otherwise the others may be a world, which continues. Nodes that come from it
        have ended it.
        """
        if has_quorum:
            self.leases = {n: left - 1 for n, left in self.leases.items() if left > 1}
        else:
            self.lease(self.leases)

    # --- what nodes say, and are told ---------------------------------------------

    def came(self, node: int, state: MemberState) -> tuple[int, int] | None:
        """Record where a node can be asked.

        Return an absent node whose agent it saw end, and the round of that.
        """
        self.addresses[node] = state.address
        self.present.add(node)
        self.gone.pop(node, None)
        gone, _ = state.gone or (-1, -1)
        agents = self._members.agents
        is_away = gone in range(self._settings.nodes) and gone not in agents
        return state.gone if is_away else None

    def adopt(self, known: Record) -> None:
        """Use another coordinator's record of a round that may have begun."""
        self.coordinators.add(known.term[1])
        if known.age > self.record.age:
            self.addresses = {**known.addresses, **self.addresses}
            self.record = known
        running = {*self.leases, *known.active, *known.leased} - self.ready
        self.gone = {n: r for n, r in self.gone.items() if r >= known.round}
        self.lease(running - self.gone.keys())

    def has_news(self) -> bool:
        """Return whether the nodes that may take over differ from what all know."""
        return self._first_addresses() != self._next_ones

    def share_with_all(self, key: str) -> None:
        """Send the record to all, so that they know which nodes may take over."""
        self._next_ones = self._first_addresses()
        self.share(key, self._members.agents.keys())

    def share(self, key: str, nodes: AbstractSet[int]) -> None:
        """Send the record to nodes.

        Nodes that may take over need all addresses. The others need only theirs: if
        more are lost, the job cannot continue.
        """
        known = {node: self.addresses[node] for node in self.present}
        self.record = replace(self.record, addresses=known)
        everything = {key: wire.encode(self.record)}
        rest = {key: wire.encode(replace(self.record, addresses=self._next_ones))}
        for node in sorted(nodes & self._members.agents.keys()):
            self._members.send(node, everything if node in self._next_ones else rest)

    def _first_addresses(self) -> dict[int, Address]:
        fit = sorted(self.present - self.record.excluded.keys())
        first = fit[: self._settings.spares + 1]
        return {node: self.addresses[node] for node in first}
