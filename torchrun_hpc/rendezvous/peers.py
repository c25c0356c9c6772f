"""The other members of a job with spares. Any of them may coordinate it."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError
from torchrun_hpc.rendezvous.liveness import Lease
from torchrun_hpc.rendezvous.member import PeerReply, reply_of
from torchrun_hpc.rendezvous.phases import Phase
from torchrun_hpc.rendezvous.protocol import SUSPENDED
from torchrun_hpc.rendezvous.search import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.record import Address, Record
    from torchrun_hpc.rendezvous.search import Answered, Search
    from torchrun_hpc.rendezvous.server import CoordinatorServer

# Seconds.
_ANSWER_TIMEOUT = 3.0  # of an asked member
_PAUSE = 0.2  # before all are asked again
_AT_ONCE = 32  # members: those that are joining do not have to be asked
_ALL_EVERY = 25  # turns, members that never joined are also asked


class Peers:
    """Finds the coordinator among the other members, or lets this member coordinate."""

    def __init__(
        self,
        server: CoordinatorServer,
        member: Member,
        search: Search,
        timeout: float,
        end_workers: Callable[[], None],
    ) -> None:
        coordinator = server.coordinator
        self.member = member
        member.coordinates = coordinator.rounds.phase is not Phase.STANDBY
        self._lease = Lease(coordinator.settings.silence_timeout)
        self._own_rank = coordinator.settings.coordinator
        self._search, self._timeout = search, timeout
        self._coordinator, self._flush = coordinator, server.flush
        self._end_workers = end_workers
        self._confirmation: dict[str, Any] = {}  # of the latest round

    # --- with a coordinator -------------------------------------------------------

    def accepted(self, answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin a lease; yield the messages to a coordinator that has accepted this."""
        self._lease.begin()
        if "welcome" in answer:
            yield from self.member.accepted(answer)

    def confirmation(
        self, record: Record, open_store: Callable[[], tuple[str, int]]
    ) -> dict[str, Any]:
        """Return the confirmation of a round; for `open_store` see `Client`."""
        confirm = [record.term, record.round]
        if self._confirmation.get("confirm") != confirm:  # otherwise it was asked again
            is_first = record.active[0] == self._own_rank
            store = {"store": open_store()} if is_first else {}
            self._confirmation = {"confirm": confirm, **store}
        return self._confirmation

    def end_lease(self, channel: Channel) -> int | None:
        """Leave the coordinator if the lease is over; return ``None`` during the lease.

        If that is noticed late, this process was suspended for as many seconds as
        returned: workers must end at once. Otherwise return 0.
        """
        late = self._lease.end()
        if late is None:
            return None
        channel.on_message = None
        channel.abort()
        if late <= SUSPENDED:
            return 0
        self._end_workers_now()
        return int(late) + self._lease.length

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle the coordinator's messages to its members."""
        if "heartbeat" in message:
            self._lease.renew(message["heartbeat"])
        elif "record" in message:
            self.member.informed(message)
        elif "go" in message:
            self.member.began()
        elif "suspended" in message:  # the coordinator is here, and was suspended
            self._end_workers_now()

    def _end_workers_now(self) -> None:
        """End them in a thread: a disk may hang, and others wait for an answer."""
        threading.Thread(target=self._end_workers, daemon=True).start()

    async def watch(self) -> None:
        """While too few members are here, look for a coordinator with enough."""
        turn = 0
        while self.member.coordinates:
            await asyncio.sleep(_PAUSE)
            turn += 1
            absent = self._coordinator.absent(ask_all=turn % _ALL_EVERY == 0)
            if absent is not None:
                await self._look_for_another(absent)

    async def _look_for_another(self, absent: dict[int, Address]) -> None:
        if len(absent) > _AT_ONCE:
            absent = dict(random.sample([*absent.items()], _AT_ONCE))
        asked = (self._ask(address, asks=True) for address in absent.values())
        found = await asyncio.gather(*asked)
        answers = {
            member: answer
            for member, answer in zip(absent, found, strict=True)
            if isinstance(answer, PeerReply)
        }
        if self.member.should_step_down(answers) and self._coordinator.step_down():
            self._flush()
            self.member.coordinates = False

    # --- without ------------------------------------------------------------------

    async def find(self) -> Answered:
        """Find the coordinator at its expected address, or with another member."""
        try:
            return await self._search.find()
        except CoordinatorNotFoundError:
            left = self._timeout - self._coordinator.settings.spare_after
            with suppress(CoordinatorNotFoundError):
                if left > 0:
                    return await self._ask_all(left)
            raise

    async def find_again(self, *, has_ended: bool) -> Answered:
        """Find the next coordinator, or become it: the old one is lost."""
        if has_ended:
            self.member.saw_end()
        return await self._ask_all(self._timeout)

    async def _ask_all(self, timeout: float) -> Answered:
        clock = asyncio.get_running_loop().time
        start, reported = clock(), 0
        while (found := await self._ask_each()) is None:
            waited = clock() - start
            if waited > timeout:
                raise CoordinatorNotFoundError("no node coordinates the job")
            while reported + 1 < waited:
                reported += 1
                self._search.tell({"seeks": reported, "left": int(timeout) - reported})
            await asyncio.sleep(_PAUSE)
        return found

    async def _ask_each(self) -> Answered | None:
        own, reply = self.member, None
        candidates = own.candidates()
        with suppress(StopIteration):
            while True:
                member, address = candidates.send(reply)
                if member == self._own_rank and not own.coordinates:
                    self._search.tell({"takes_over": own.record.term[1]})
                    self._coordinator.coordinate(own.record)
                    self._flush()
                    own.coordinates = True
                found = await self._ask(address)
                if isinstance(found, tuple):
                    return found
                reply = found
        return None

    async def _ask(
        self, address: Address, *, asks: bool = False
    ) -> Answered | PeerReply | None:
        request = {**self._search.first_line, "asks": asks}
        channel = Channel(request, self._search.key.secret)
        opening = channel.open(*address)
        try:
            answer = await asyncio.wait_for(opening, _ANSWER_TIMEOUT)
        except (OSError, ValueError, OverflowError, asyncio.TimeoutError):
            return None
        if self._search.is_coordinators(answer):
            return channel, answer
        channel.close()
        return reply_of(answer)
