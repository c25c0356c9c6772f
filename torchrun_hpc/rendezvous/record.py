"""The record: what all nodes know of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

_LONGEST = 253  # characters of a host's name (RFC 1035)


def _looked_for(address: tuple[str, int]) -> tuple[str, int]:
    """Return an address for `socket.getaddrinfo`, or raise `ValueError`."""
    host, port = address
    if not (0 < len(host) <= _LONGEST and " " not in host and 0 < port < 2**16):
        raise ValueError("not an address")
    host.encode("idna")  # or UnicodeError, which is a ValueError
    return address


Address = Annotated[tuple[str, int], _looked_for]


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

    term: tuple[int, int]
    round: int
    active: tuple[int, ...]
    addresses: Mapping[int, Address] = field(default_factory=dict)
    losses: Mapping[int, int] = field(default_factory=dict)
    excluded: Mapping[int, str] = field(default_factory=dict)
    suspect: int = -1
    moved_from: Mapping[int, int] = field(default_factory=dict)
    script_faults: tuple[int, ...] = ()
    leased: tuple[int, ...] = ()

    @property
    def age(self) -> tuple[int, tuple[int, int]]:
        """The greater one of two ages belongs to the newer record."""
        return self.round, self.term


@dataclass(frozen=True)
class MemberState:
    """A member's message to a coordinator that has accepted it.

    `gone` is the last coordinator that has ended, and in which round. The member sends
    its record if it is newer than the coordinator's.
    """

    address: Address
    done: bool
    term: tuple[int, int]
    round: int
    gone: tuple[int, int] | None
    record: Record | None
