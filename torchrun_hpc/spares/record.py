"""What all members of a job know of it, and who takes whose place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from collections.abc import Collection

LOSSES = 2  # of a member, after which it is out

_LONGEST = 253  # characters of a host's name (RFC 1035)


def _looked_for(address: tuple[str, int]) -> tuple[str, int]:
    """Return an address that `socket.getaddrinfo` can look for.

    Raises:
        ValueError: It is none, or has no port.
    """
    host, port = address
    if not (0 < len(host) <= _LONGEST and " " not in host and 0 < port < 2**16):
        raise ValueError("not an address")
    host.encode("idna")  # or UnicodeError, which is a ValueError
    return address


Address = Annotated[tuple[str, int], _looked_for]


@dataclass(frozen=True)
class Record:
    """What all members know of a job: it outlives each of them.

    Attributes:
        term: Number of takeovers, and the member that coordinates since the last one.
        round: The round that was formed last; -1 before the first one.
        active: The member that has each node rank.
        addresses: Where members can be asked.
        losses: How often members were lost.
        out: Why members are out.
        suspect: The active member of which a worker was the first to fail, in the
            round that ended last; -1 if it is none.
        moved: The members that are out because of that, by their node rank.
        excused: Node ranks whose workers failed on another node, too: the script's
            fault.
        may_run: The members that may still have had workers of an earlier round, when
            this one was formed; none once it has begun.
    """

    term: tuple[int, int]
    round: int
    active: tuple[int, ...]
    addresses: Mapping[int, Address] = field(default_factory=dict)
    losses: Mapping[int, int] = field(default_factory=dict)
    out: Mapping[int, str] = field(default_factory=dict)
    suspect: int = -1
    moved: Mapping[int, int] = field(default_factory=dict)
    excused: tuple[int, ...] = ()
    may_run: tuple[int, ...] = ()

    @property
    def age(self) -> tuple[int, tuple[int, int]]:
        """What is greater in the newer one of two records."""
        return self.round, self.term


@dataclass(frozen=True)
class MemberState:
    """What a member tells a coordinator that has accepted it.

    Attributes:
        address: Where it can be asked.
        done: Whether its workers have finished.
        term: Of the record that it knows.
        round: The same.
        gone: The last coordinator that has ended, and in which round.
        record: All that it knows, if that is more than the coordinator's.
    """

    address: Address
    done: bool
    term: tuple[int, int]
    round: int
    gone: tuple[int, int] | None
    record: Record | None


def first_record(nodes: int, spares: int, coordinator: int) -> Record:
    """Return the record of a job that has not begun: the last members are spares."""
    return Record((0, coordinator), -1, tuple(range(nodes - spares)))


def assigned(
    record: Record, ready: Collection[int], leaving: Collection[int]
) -> tuple[int, ...] | None:
    """Return the active members of the next round; ``None`` if some are missing.

    Each keeps its node rank, but for those that leave: a spare has theirs.

    Args:
        record: The record of the round before.
        ready: Members that can take part.
        leaving: Active members that are not waited for.
    """
    fit = [member for member in sorted(ready) if member not in record.out]
    before, fit_ones = set(record.active), set(fit)
    spares = [member for member in fit if member not in before]
    active = []
    for member in record.active:
        if member in fit_ones:
            active.append(member)
        elif spares and (member in leaving or member in record.out):
            active.append(spares.pop(0))
        else:
            return None
    return tuple(active)


def lost(record: Record, member: int) -> Record:
    """Take note that a member was lost; it may come back, but not forever."""
    losses = {**record.losses, member: record.losses.get(member, 0) + 1}
    return replace(record, losses=losses, suspect=-1)


def put_out(record: Record, member: int, reason: str) -> Record:
    """Put a member out: it gets no node rank any more."""
    return replace(record, out={**record.out, member: reason})


def blamed(record: Record, member: int, *, has_spare: bool) -> Record:
    """Take note that a worker of an active member was the first to fail in a round.

    If that was so in the round before, too, the node may be the cause, and is out. If
    the same then happens on the node that took its place, it was the script: nobody is
    blamed for this node rank any more, and the first one comes back.

    Args:
        record: The record of that round.
        member: The member.
        has_spare: Whether a spare could take its place.
    """
    rank = record.active.index(member)
    if rank in record.moved:
        moved = {**record.moved}
        first = moved.pop(rank)
        out = {each: why for each, why in record.out.items() if each != first}
        excused = (*record.excused, rank)
        return replace(record, suspect=-1, moved=moved, out=out, excused=excused)
    if rank in record.excused:
        return replace(record, suspect=-1)
    if record.suspect != member or not has_spare:
        return replace(record, suspect=member)
    reason = "its workers were the first to fail in two rounds running"
    record = put_out(record, member, reason)
    return replace(record, suspect=-1, moved={**record.moved, rank: member})
