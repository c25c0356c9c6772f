"""The other members of a job with spares. Any of them may coordinate it."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError
from torchrun_hpc.rendezvous.loop import within
from torchrun_hpc.rendezvous.messages import Seeks, TakesOver
from torchrun_hpc.rendezvous.protocol import Standby
from torchrun_hpc.rendezvous.search import Channel, accepted

if TYPE_CHECKING:
    from torchrun_hpc.rendezvous.member import Member
    from torchrun_hpc.rendezvous.record import Address
    from torchrun_hpc.rendezvous.search import Answered, Search
    from torchrun_hpc.rendezvous.server import CoordinatorServer

_AT_ONCE = 32  # members: if more are absent, most are still joining
_ALL_EVERY = 25  # turns, to also ask members that never joined


class Peers:
    """Finds the coordinator among the other members, or lets this member coordinate.

    The limits are in seconds: `timeout` for a search among the members, `late_timeout`
    if the search at the expected address has failed before.
    """

    def __init__(
        self,
        server: CoordinatorServer,
        member: Member,
        search: Search,
        timeout: float,
        late_timeout: float,
    ) -> None:
        self._server = server
        self._member = member
        self._search = search
        self._timeout, self._late_timeout = timeout, late_timeout

    async def watch(self) -> None:
        """While too few members are connected, look for a coordinator with enough."""
        turn = 0
        while self._member.coordinates:
            await asyncio.sleep(limits.PEERS_PAUSE)
            turn += 1
            coordinator = self._server.coordinator
            absent = coordinator.absent(ask_all=turn % _ALL_EVERY == 0)
            if absent is not None:
                await self._look_for_another(absent)

    async def _look_for_another(self, absent: dict[int, Address]) -> None:
        if len(absent) > _AT_ONCE:
            absent = dict(random.sample([*absent.items()], _AT_ONCE))
        asked = (self._ask(address, asks=True) for address in absent.values())
        replies = zip(absent, await asyncio.gather(*asked), strict=True)
        standby = {n: reply for n, reply in replies if isinstance(reply, Standby)}
        member, server = self._member, self._server
        if member.should_step_down(standby) and server.coordinator.step_down():
            server.flush()
            member.coordinates = False

    async def find(self) -> Answered:
        """Find the coordinator at its expected address, or with another member."""
        try:
            return await self._search.find()
        except CoordinatorNotFoundError:
            with suppress(CoordinatorNotFoundError):
                if self._late_timeout > 0:
                    return await self._ask_all(self._late_timeout)
            raise

    async def find_again(self, *, has_ended: bool) -> Answered:
        """Find the next coordinator, or become it: the old one is lost."""
        if has_ended:
            self._member.saw_end()
        return await self._ask_all(self._timeout)

    async def _ask_all(self, timeout: float) -> Answered:
        clock = asyncio.get_running_loop().time
        start, reported = clock(), 0
        while (answered := await self._ask_each()) is None:
            waited = clock() - start
            if waited > timeout:
                raise CoordinatorNotFoundError("no node coordinates the job")
            while reported + 1 < waited:
                reported += 1
                self._search.tell(Seeks(reported, int(timeout) - reported))
            await asyncio.sleep(limits.PEERS_PAUSE)
        return answered

    async def _ask_each(self) -> Answered | None:
        member, reply = self._member, None
        candidates = member.candidates()
        with suppress(StopIteration):
            while True:
                candidate, address = candidates.send(reply)
                if candidate == member.number and not member.coordinates:
                    self._search.tell(TakesOver(member.record.term[1]))
                    self._server.coordinator.coordinate(member.record)
                    self._server.flush()
                    member.coordinates = True
                answer = await self._ask(address)
                if isinstance(answer, tuple):
                    return answer
                reply = answer
        return None

    async def _ask(
        self, address: Address, *, asks: bool = False
    ) -> Answered | Standby | None:
        request = replace(self._search.request, asks=asks)
        channel = Channel(request, self._search.key.secret)
        try:
            answer = await within(limits.PEER_TIMEOUT, channel.open(*address))
        except (OSError, ValueError, OverflowError, asyncio.TimeoutError):
            return None
        except asyncio.CancelledError:  # it may just have been opened
            channel.abort()
            raise
        if (welcome := accepted(answer)) is not None:
            return channel, welcome
        channel.close()
        return answer if isinstance(answer, Standby) else None
