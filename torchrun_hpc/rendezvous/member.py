"""A member's knowledge, and the coordinator that it follows.

If the coordinator is lost, each member asks the others in the same order. The first one
that answers takes over. A member takes over itself if all before it are gone or silent.
In a split network, several may do so. A coordinator with too few members looks for
others. It steps down for one that has enough, or that comes before it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.rendezvous.record import MemberState, Record
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from torchrun_hpc.rendezvous.record import Address


@dataclass(frozen=True)
class PeerReply:
    """A member's reply: whom it `follows`, whether it coordinates, and has a quorum."""

    follows: int | None = None
    coordinates: bool = False
    has_quorum: bool = False


def reply_of(message: Mapping[str, Any]) -> PeerReply | None:
    """Read a reply; return ``None`` if it is another message."""
    with suppress(WireError):
        return PeerReply(
            *wire.decode(tuple[int | None, bool, bool], message.get("standby"))
        )
    return None


class Member:
    """A member with number `own`. `hints` are probable addresses of other members.

    It `is_ready` when its workers have ended, and it waits for a round. It `is_done`
    when they have finished. `unhealthy` is why its node is unhealthy, or empty.
    """

    def __init__(
        self,
        own: int,
        address: Address,
        record: Record,
        hints: Mapping[int, Address] | None = None,
    ) -> None:
        self._own = own
        self._address = address
        self._hints = {**(hints or {}), own: address}
        self.record = record
        self.follows: int | None = None
        self.coordinates = False
        self.is_ready = False
        self.is_done = False
        self.unhealthy = ""
        self._gone: tuple[int, int] | None = None  # the last coordinator that has ended
        self._preferred: int | None = None

    # --- with a coordinator -------------------------------------------------------

    def accepted(self, answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the messages to a coordinator that has sent this welcome."""
        self.follows = answer.get("coordinator")
        number, term = answer["age"][0], tuple(answer["age"][1])
        is_newer = self.record.age > (number, term) or self.record.term > term
        state = MemberState(
            address=self._address,
            done=self.is_done,
            term=self.record.term,
            round=self.record.round,
            gone=self._gone,
            record=self.record if is_newer else None,
        )
        yield {"present": wire.encode(state)}
        if self.unhealthy:
            yield {"unhealthy": self.unhealthy}
        elif self.is_ready:
            yield {"join": True}

    def prepared(self, message: Mapping[str, Any]) -> Record | None:
        """Return the record of a round if this member must confirm it."""
        record = wire.decode(Record, message["prepare"])
        if record.age < self.record.age:
            raise WireError("a round of a lower term")
        self.record = record
        return record if self._own in record.active else None

    def informed(self, message: Mapping[str, Any]) -> None:
        """Use what has changed since the round was prepared."""
        record = wire.decode(Record, message["record"])
        if record.age >= self.record.age:
            addresses = {**self.record.addresses, **record.addresses}
            self.record = replace(record, addresses=addresses)

    def began(self) -> None:
        """Handle that the round has begun: no older workers are left."""
        self.record = replace(self.record, leased=())

    def saw_end(self) -> None:
        """Remember that its coordinator's process has ended, and in which round.

        If that agent is started again, it may have workers of a later round.
        """
        if self.follows is not None:
            self._gone = self.follows, self.record.round

    # --- without ------------------------------------------------------------------

    @property
    def addresses(self) -> Mapping[int, Address]:
        """The members' addresses, in their order."""
        known = {**self._hints, **self.record.addresses}
        return {member: known[member] for member in sorted(known)}

    def candidates(self) -> Generator[tuple[int, Address], PeerReply | None, None]:
        """Yield members to ask who coordinates; receive their replies, or ``None``.

        It yields this member if it must take over. After the last one, the caller asks
        all again a little later.

        A coordinator asks itself first: others may follow it. A living member knows the
        coordinator, or will be it, unless it is excluded.
        """
        self.follows = None
        known = self.addresses
        first = self._own if self.coordinates else self._preferred
        self._preferred = None
        out = {self._own} & self.record.excluded.keys()
        left = deque([first, *(each for each in known if each not in out)])
        asked: set[int] = set()
        while left:
            member = left.popleft()
            if member is None or member in asked or member not in known:
                continue
            asked.add(member)
            reply = yield member, known[member]
            if reply is None or member == self._own:
                continue
            if reply.follows is not None or member not in self.record.excluded:
                left = deque([reply.follows])

    def should_step_down(self, answers: Mapping[int, PeerReply]) -> bool:
        """Return whether to follow another member, given replies without a quorum."""
        if self.follows not in {None, self._own}:
            return True
        for member, answer in sorted(answers.items()):
            if answer.coordinates and (answer.has_quorum or member < self._own):
                self._preferred = member
                return True
        return False
