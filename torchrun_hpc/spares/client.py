"""A member's connection to the coordinator, whichever member that is."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.client import Client, RoundOverError
from torchrun_hpc.rendezvous.protocol import VERSION
from torchrun_hpc.rendezvous.search import Channel, CoordinatorNotFoundError
from torchrun_hpc.rendezvous.server import now
from torchrun_hpc.reporting.reporter import reports_wait_for
from torchrun_hpc.spares.coordinator import SUSPENDED
from torchrun_hpc.spares.member import Answer, answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import CoordinatorAddress
    from torchrun_hpc.rendezvous.server import CoordinatorServer
    from torchrun_hpc.spares.record import Address, Record
    from torchrun_hpc.spares.standby import Standby

# Seconds.
_ANSWER_TIMEOUT = 3.0  # of a member that is asked
_PAUSE = 0.2  # before all are asked again
_AT_ONCE = 32  # members: those that are on their way need not be asked
_ALL_EVERY = 25  # times, also those of which nothing was heard yet are asked


class NotNeededError(Exception):
    """The job has ended well, and this member has no workers."""


class MemberClient(Client):
    """A member's connection to the coordinator.

    Args:
        request: Who this member is.
        address: Where the first coordinator is.
        on_event: See `Client`; also called with ``suspended``: the seconds for which
            this process did not run, and after which its workers may not go on.
        server: The server of this member.
        standby: What it answers.

    Attributes:
        member: What this member knows.
        reports: Whether the coordinator wants this member to report the end.
        is_certain: Whether the job has ended for all members.
        out_at_end: Members that were lost, or out, when it ended.
    """

    def __init__(
        self,
        request: JoinRequest,
        address: CoordinatorAddress,
        on_event: Callable[[Mapping[str, Any]], None],
        server: CoordinatorServer,
        standby: Standby,
    ) -> None:
        # Then it is looked for with other members.
        self._search_timeout = min(address.timeout, standby.limits.spare_after)
        self._timeout = address.timeout
        address = replace(address, timeout=self._search_timeout)
        self.member = standby.member
        super().__init__(request, address, self._report_to(on_event))
        self.reports = self.is_certain = False
        self.out_at_end: tuple[int, ...] = ()
        self._server, self._standby = server, standby
        self._first_line = {"protocol": VERSION, **wire.encode(request)}
        self._prepared: Record | None = None  # and not confirmed yet
        self._confirmation: dict[str, Any] = {}  # of the latest round
        # When it sent the last answer that the coordinator has received.
        self._lease = math.inf
        self._watching: asyncio.Task[None] | None = None

    def _report_to(
        self, on_event: Callable[[Mapping[str, Any]], None]
    ) -> Callable[[Mapping[str, Any]], None]:
        """Let one member report that the coordinator is silent, and which it is."""

        def report(event: Mapping[str, Any]) -> None:
            coordinator = self.member.follows
            if "coordinator_silent" not in event:
                on_event(event)
            elif reports_wait_for(self.request.rank, coordinator):
                on_event({**event, "of": coordinator})

        return report

    # --- for the main thread ------------------------------------------------------

    def take_part(
        self, open_store: Callable[[], tuple[str, int]]
    ) -> tuple[Mapping[str, Any], int, int]:
        """Wait for a round in which this member is active.

        Args:
            open_store: Opens the workers' store, and returns its address and port; it
                is called where this member has node rank 0.

        Returns:
            The coordinator's ``go``, the node rank, and the number of active members.

        Raises:
            RoundOverError: The round is over before it has begun here.
            NotNeededError: The job has ended well without this member.
            JobFailedError: It has failed.
        """
        with self._changed:
            self._go = None  # but not what is prepared: it is of a later round
            self.is_over = False
            self.member.is_ready = self._has_joined = True
        self._own_failure = None
        if not self.member.unfit:
            self.send({"join": self.next_round})
        try:
            while True:
                self._until(
                    lambda: bool(
                        self._go or self._prepared or self.is_over or self.finished
                    )
                )
                if self.finished:
                    raise NotNeededError
                if self.is_over:
                    raise RoundOverError
                if self._go is not None:
                    return self._began(self._go)
                self._confirm(open_store)
        finally:
            self.member.is_ready = False

    def be_unfit(self, reason: str) -> None:
        """Take part no more: this node is not well."""
        self.member.unfit = reason
        self.send({"unfit": reason})

    def finish(self) -> None:
        """Wait until all nodes have finished.

        Raises:
            JobFailedError: They have not.
        """
        self.member.is_done = True
        super().finish()

    def stacks(self, timeout: float) -> dict[int, Any]:
        """Ask all agents for the stacks of their workers; return the answers by node.

        Nodes without workers have none, and those that are lost are not missed.
        """
        others = set(range(self.request.nodes)) - self._workers_nodes
        return {node: [] for node in others} | super().stacks(timeout)

    @property
    def _workers_nodes(self) -> set[int]:
        return set(self.member.record.active)

    def _began(self, go: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, int]:
        record = self.member.record
        self._round = go["go"]
        return go, record.active.index(self.request.rank), len(record.active)

    def _confirm(self, open_store: Callable[[], tuple[str, int]]) -> None:
        """Confirm the round that was prepared."""
        with self._changed:
            record, self._prepared = self._prepared, None
        if record is None:
            return
        confirm = [record.term, record.round]
        if self._confirmation.get("confirm") != confirm:  # else it was asked again
            is_first = record.active[0] == self.request.rank
            store = {"store": open_store()} if is_first else {}
            self._confirmation = {"confirm": confirm, **store}
        self.send(self._confirmation)

    # --- in the thread ------------------------------------------------------------

    async def _communicate(self) -> None:
        if await self._call(lambda: self._standby.coordinator is not None):
            self._coordinate()
        try:
            channel, answer = await self._find_first()
            while True:
                await self._follow(channel, answer)
                self._check_lease()
                if channel.at_end:
                    self.member.saw_end()
                if self.finished or self.failure is not None or self._is_leaving:
                    return
                self._change(is_over=True, _prepared=None)
                channel, answer = await self._find_next()
        finally:
            if self._watching is not None:
                self._watching.cancel()

    async def _find_next(self) -> tuple[Channel, Mapping[str, Any]]:
        """Find the coordinator again, or end if there is none any more."""
        try:
            return await self._find(self._timeout)
        except CoordinatorNotFoundError:
            before = self.member.record.term[1]
            super()._lose(Failure(Kind.COORDINATOR, (before,)))
            raise asyncio.CancelledError from None

    async def _find_first(self) -> tuple[Channel, Mapping[str, Any]]:
        """Find the coordinator where it should be, or else with another member.

        Raises:
            CoordinatorNotFoundError: It is nowhere.
            RefusedError: It refuses this member.
        """
        try:
            return await self._search.run()
        except CoordinatorNotFoundError as error:
            left = self._timeout - self._search_timeout
            if left <= 0:
                raise
            try:
                return await self._find(left)
            except CoordinatorNotFoundError:
                raise error from None

    def _accepted(self, answer: Mapping[str, Any]) -> None:
        """Say where this member is, and what it knows."""
        self._lease = now()
        if "welcome" in answer:
            for message in self.member.accepted(answer):
                self._send(message)

    def _lose(self, _failure: Failure) -> None:
        """Do nothing: another member will coordinate."""

    def _disconnect(self) -> None:
        if self._channel is not None and self._channel.closed.is_set():
            self._is_leaving = True
            self._task.cancel()
        else:
            super()._disconnect()

    def _tick(self) -> None:
        super()._tick()
        self._check_lease()

    def _check_lease(self) -> bool:
        """Give the coordinator up if the lease has ended; return whether it has.

        If this is found out late, this process was suspended: workers must end at once.
        """
        late = now() - self._lease - self._silence_timeout
        if late < 0 or self._channel is None:
            return False
        self._lease, self._channel.on_message = math.inf, None
        self._channel.abort()
        if late > SUSPENDED:
            self._on_event({"suspended": int(late) + self._silence_timeout})
        return True

    def _handle(self, message: Mapping[str, Any]) -> None:
        if self._check_lease():
            return
        if "heartbeat" in message:
            self._lease = max(self._lease, min(message["heartbeat"], now()))
            self._send({"heartbeat": now()})
            return
        if "prepare" in message:
            prepared = self.member.prepared(message)
            self._change(_prepared=prepared)
            return
        if "record" in message:
            self.member.informed(message)
            return
        if "out" in message:
            self._on_event({"out": message["out"]})
            return
        if "go" in message:
            self.member.began()
        elif "over" in message:
            self._change(_prepared=None)
        elif "finished" in message or "failed" in message:
            self.reports = self.member.coordinates
            self.is_certain = bool(message.get("is_certain"))
            self.out_at_end = tuple(message.get("out_at_end", ()))
        super()._handle(message)

    # --- the other members --------------------------------------------------------

    async def _find(self, timeout: float) -> tuple[Channel, Mapping[str, Any]]:
        """Find the coordinator, or become it.

        Raises:
            CoordinatorNotFoundError: There was none in time.
        """
        start, reported = self._loop.time(), 0
        own = self.member
        own.begin()
        while True:
            member = own.whom()
            if member is None:
                waited = self._loop.time() - start
                if waited > timeout:
                    raise CoordinatorNotFoundError("no node coordinates the job")
                while reported + 1 < waited:
                    reported += 1
                    self._on_event({"seeks": reported, "left": int(timeout) - reported})
                await asyncio.sleep(_PAUSE)
                own.begin()
                continue
            if member == self.request.rank:
                await self._take_over()
            found = await self._ask(own.where(member))
            if isinstance(found, tuple):
                return found
            own.heard(member, found)

    async def _take_over(self) -> None:
        if not self.member.coordinates:
            record = self.member.record
            self._on_event({"takes_over": record.term[1]})
            await self._call(self._standby.coordinate, record)
            self._coordinate()

    def _coordinate(self) -> None:
        self.member.coordinates = True
        self._watching = asyncio.create_task(self._watch_others())

    async def _watch_others(self) -> None:
        """While too few members are here, look for a coordinator that has enough."""
        turn = 0
        try:
            while self.member.coordinates:
                await asyncio.sleep(_PAUSE)
                turn += 1
                absent = await self._call(self._standby.absent, turn % _ALL_EVERY == 0)
                if absent is not None:
                    await self._look_for_another(absent)
        except Exception as error:  # noqa: BLE001 - nobody waits for this task
            self._on_fault(self._loop, {"exception": error})

    async def _look_for_another(self, absent: dict[int, Address]) -> None:
        """Ask members that are not here who coordinates, and give way to one."""
        if len(absent) > _AT_ONCE:
            absent = dict(random.sample([*absent.items()], _AT_ONCE))
        asked = (self._ask(address, asks=True) for address in absent.values())
        found = await asyncio.gather(*asked)
        answers = {
            member: answer
            for member, answer in zip(absent, found, strict=True)
            if isinstance(answer, Answer)
        }
        if self.member.gives_way(answers):
            await self._call(self._standby.give_way)
            self.member.coordinates = False

    async def _ask(
        self, address: Address, *, asks: bool = False
    ) -> tuple[Channel, Mapping[str, Any]] | Answer | None:
        """Ask a member to be accepted, or only who coordinates.

        Returns:
            The connection, and what a coordinator answers; what another member
            answers; ``None`` if there is no answer in time.
        """
        channel = Channel()
        first_line = {**self._first_line, "asks": asks}
        try:
            answer = await asyncio.wait_for(
                _answer(channel, address, first_line), _ANSWER_TIMEOUT
            )
        except (OSError, ValueError, OverflowError, asyncio.TimeoutError):
            channel.abort()
            return None
        is_job = answer.get("job") == self.request.job
        if (answer.get("welcome") == VERSION and is_job) or "failed" in answer:
            return channel, answer
        channel.close()
        return answer_of(answer)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something in the thread of the server."""
        return await asyncio.wrap_future(self._server.call(function, *args))


async def _answer(
    channel: Channel, address: Address, first_line: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Connect, and return the answer to the first line."""
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: channel, *address)
    channel.send(first_line)
    return await channel.first()
