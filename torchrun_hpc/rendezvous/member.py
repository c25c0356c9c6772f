"""A member's knowledge, and the coordinator that it follows.

If the coordinator is lost, each member asks the others in the same order. The first one
that answers takes over. A member takes over itself if all before it are gone or silent.
In a split network, several may do so. A coordinator with too few members looks for
other coordinators. It steps down for one that has enough, or a lower number.

Without spares, nobody can take over, and no member listens for the others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.rendezvous.protocol import Confirm, Join, Present, Unhealthy
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from torchrun_hpc.rendezvous.protocol import FromAgent, Standby, Store, Welcome
    from torchrun_hpc.rendezvous.record import Address, Record


class Member:
    """A member with its `number`, and what it knows.

    It `is_ready` when its workers have ended, and it waits for a round. It `is_done`
    when they have finished. `unhealthy` is why its node is unhealthy, or empty.
    """

    def __init__(self, number: int, record: Record) -> None:
        self.number = number
        self.record = record
        self.follows: int | None = None
        self.coordinates = False
        self.is_ready = False
        self.is_done = False
        self.unhealthy = ""
        self._address: Address | None = None
        self._hints: Mapping[int, Address] = {}
        self._gone: tuple[int, int] | None = None  # the last coordinator that has ended
        self._preferred: int | None = None
        self._confirm: Confirm | None = None  # of the latest round

    def listens(self, address: Address, hints: Mapping[int, Address]) -> None:
        """Take note of this member's address, and of the others' likely ones."""
        self._address, self._hints = address, {**hints, self.number: address}

    # --- with a coordinator -------------------------------------------------------

    def accepted(self, welcome: Welcome) -> Iterator[FromAgent]:
        """Yield the messages to a coordinator that has accepted this member."""
        self.follows, record = welcome.coordinator, self.record
        if self._address is not None:
            yield Present(
                address=self._address,
                done=self.is_done,
                term=record.term,
                round=record.round,
                gone=self._gone,
                record=record if record.is_newer(welcome.age) else None,
            )
        if self.unhealthy:
            yield Unhealthy(self.unhealthy)
        elif self.is_ready:
            yield Join()

    def prepared(self, record: Record) -> Record | None:
        """Use the record of a round; return it if this member must confirm it."""
        if record.age < self.record.age:
            raise WireError("a round of a lower term")
        self.record = record
        return record if self.number in record.active else None

    def confirmation(self, record: Record, open_store: Callable[[], Store]) -> Confirm:
        """Return the confirmation of a round. Node rank 0 opens the workers' store."""
        confirm = Confirm(record.term, record.round)
        if self._confirm is None or replace(self._confirm, store=None) != confirm:
            store = open_store() if record.active[0] == self.number else None
            self._confirm = replace(confirm, store=store)
        return self._confirm  # perhaps for the second time

    def informed(self, record: Record) -> None:
        """Use a record with what has changed since the round was prepared."""
        if record.age >= self.record.age:
            addresses = {**self.record.addresses, **record.addresses}
            self.record = replace(record, addresses=addresses)

    def began(self) -> None:
        """Handle that the round has begun: no older workers are left."""
        if self.number not in self.record.active:
            raise WireError("a round without this member")
        self.record = replace(self.record, leased=())

    def saw_end(self) -> None:
        """Remember in which round its coordinator's process has ended.

        If that agent is started again, it may have workers of a later round.
        """
        if self.follows is not None:
            self._gone = self.follows, self.record.round

    # --- without a coordinator ----------------------------------------------------

    @property
    def addresses(self) -> Mapping[int, Address]:
        """The members' addresses, in the order of their numbers."""
        return dict(sorted({**self._hints, **self.record.addresses}.items()))

    def candidates(self) -> Generator[tuple[int, Address], Standby | None, None]:
        """Yield members to ask who coordinates; receive their replies, or ``None``.

        It yields this member if it must take over. After the last one, the caller asks
        all again a little later.

        A coordinator asks itself first: others may follow it. A living member knows the
        coordinator, or will be it, unless it is excluded.
        """
        self.follows = None
        addresses = self.addresses
        first = self.number if self.coordinates else self._preferred
        self._preferred = None
        others = [member for member in addresses if member != self.number]
        is_excluded = self.number in self.record.excluded
        left = deque([first, *(others if is_excluded else addresses)])
        asked: set[int] = set()
        while left:
            member = left.popleft()
            if member is None or member in asked or member not in addresses:
                continue
            asked.add(member)
            reply = yield member, addresses[member]
            if reply is None or member == self.number:
                continue
            if reply.follows is not None or member not in self.record.excluded:
                left = deque([reply.follows])

    def should_step_down(self, answers: Mapping[int, Standby]) -> bool:
        """Return whether a coordinator without a quorum should follow another member.

        `answers` are replies by member.
        """
        if self.follows not in {None, self.number}:
            return True
        for member, answer in sorted(answers.items()):
            if answer.coordinates and (answer.has_quorum or member < self.number):
                self._preferred = member
                return True
        return False
