"""The record of what all nodes know of a job, and pure functions that change it.

Without spares, all nodes are active. A spare replaces a lost, late or excluded node.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - later, the process may have too many open files
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from torchrun_hpc.wire import Places  # noqa: TC001 - for wire.decode

LOSSES = 2  # after so many, a node is excluded

_LONGEST = 253  # characters of a host's name (RFC 1035)


def _valid_address(address: tuple[str, int]) -> tuple[str, int]:
    """Return an address that `socket.getaddrinfo` takes, or raise `ValueError`."""
    host, port = address
    if not (0 < len(host) <= _LONGEST and " " not in host and 0 < port < 2**16):
        raise ValueError("not an address")
    host.encode("idna")  # or UnicodeError, which is a ValueError
    return address


Address = Annotated[tuple[str, int], _valid_address]
Term: TypeAlias = tuple[int, int]
Age: TypeAlias = tuple[int, Term]


@dataclass(frozen=True)
class Record:
    """What all members know of a job. It outlives each of them.

    Attributes:
        term: Number of takeovers, and the coordinator since the last one.
        round: The last round that was formed; -1 before the first one.
        active: The member of each node rank.
        addresses: Where members can be asked.
        losses: How often each member was lost.
        excluded: Excluded members, and why.
        suspect: The active member whose worker failed first in the last round, or -1.
        moved_from: Members excluded because of that, by their node rank.
        script_faults: Node ranks whose workers also failed on another node.
        leased: Members that may still have had workers of an earlier round when this
            one was formed; empty once it has begun.
    """

    term: Term
    round: int
    active: Places
    addresses: Mapping[int, Address] = field(default_factory=dict)
    losses: Mapping[int, int] = field(default_factory=dict)
    excluded: Mapping[int, str] = field(default_factory=dict)
    suspect: int = -1
    moved_from: Mapping[int, int] = field(default_factory=dict)
    script_faults: tuple[int, ...] = ()
    leased: tuple[int, ...] = ()

    @property
    def age(self) -> Age:
        """The greater one of two ages belongs to the newer record."""
        return self.round, self.term

    def is_newer(self, age: Age) -> bool:
        """Return whether a coordinator needs this record, if its own has this age.

        A record of a higher term counts even if its round is lower.
        """
        return self.age > age or self.term > age[1]


def first_record(nodes: int, spares: int, coordinator: int) -> Record:
    """Return the record of a job that has not begun. The last members are spares."""
    return Record((0, coordinator), -1, tuple(range(nodes - spares)))


def assigned(
    record: Record, ready: Collection[int], leaving: Collection[int]
) -> tuple[int, ...] | None:
    """Return the active members of the next round; ``None`` if some are missing.

    Each member keeps its node rank. Nobody waits for the `leaving` ones: spares replace
    them.
    """
    fit = set(ready) - record.excluded.keys()
    spares = sorted(fit.difference(record.active))
    active = []
    for member in record.active:
        if member in fit:
            active.append(member)
        elif spares and (member in leaving or member in record.excluded):
            active.append(spares.pop(0))
        else:
            return None
    return tuple(active)


def lost(record: Record, member: int) -> Record:
    """Record a lost member. It may come back, but not forever."""
    losses = {**record.losses, member: record.losses.get(member, 0) + 1}
    return replace(record, losses=losses, suspect=-1)


def excluded(record: Record, member: int, reason: str) -> Record:
    """Exclude a member: it gets no node rank any more."""
    return replace(record, excluded={**record.excluded, member: reason})


def blamed(record: Record, member: int, *, has_spare: bool) -> Record:
    """Record that a worker of an active member was the first to fail in a round.

    After two consecutive rounds with the same member, its node may be the cause, and is
    excluded. If a worker also fails on the node that replaces it, the script is the
    cause. Then the excluded node becomes a spare, and this node rank is never blamed
    again.
    """
    rank, suspect = record.active.index(member), record.suspect
    record = replace(record, suspect=-1)
    if rank in record.moved_from:
        moved_from = {**record.moved_from}
        first = moved_from.pop(rank)
        others = {each: why for each, why in record.excluded.items() if each != first}
        faults = *record.script_faults, rank
        return replace(
            record, moved_from=moved_from, excluded=others, script_faults=faults
        )
    if rank in record.script_faults:
        return record
    if suspect != member or not has_spare:
        return replace(record, suspect=member)
    reason = "its workers were the first to fail in two consecutive rounds"
    record = excluded(record, member, reason)
    return replace(record, moved_from={**record.moved_from, rank: member})
