"""What all nodes of a job know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

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
