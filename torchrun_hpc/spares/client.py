"""A member's connection to the coordinator, whichever member that is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.rendezvous.client import Client, RoundOverError
from torchrun_hpc.rendezvous.protocol import VERSION, Failure, Kind, ProtocolError
from torchrun_hpc.rendezvous.search import Channel, CoordinatorNotFoundError
from torchrun_hpc.spares import election, record
from torchrun_hpc.spares.election import Answer, Election

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import CoordinatorAddress
    from torchrun_hpc.rendezvous.server import CoordinatorServer
    from torchrun_hpc.spares.record import Address, Record
    from torchrun_hpc.spares.standby import Standby

# Seconds.
_TICK = 1.0
_ANSWER_TIMEOUT = 3.0  # of a member that is asked
_PAUSE = 0.2  # before all are asked again
_GAP = 2.0  # without a tick: this process was suspended

_GONE = Answer(is_gone=True)


class NotNeededError(Exception):
    """The job has ended well, and this member has no workers."""


class Listening(NamedTuple):
    """What a member answers, and where.

    Attributes:
        server: Its server.
        address: Where that listens.
        standby: What it answers.
    """

    server: CoordinatorServer
    address: Address
    standby: Standby


class MemberClient(Client):
    """A member's connection to the coordinator.

    Args:
        request: Who this member is.
        address: Where the first coordinator is.
        on_event: See `Client`; also called with ``suspended``: the seconds for which
            this process did not run, and after which its workers may not go on.
        listening: What this member answers, and where.

    Attributes:
        record: What this member knows of the job; ``None`` before the first round.
        reports: Whether the coordinator wants this member to report the end.
        out_at_end: Members that were lost, or out, when the job ended.
        is_unfit: Why this node takes part no more; empty if it does.
    """

    def __init__(
        self,
        request: JoinRequest,
        address: CoordinatorAddress,
        on_event: Callable[[Mapping[str, Any]], None],
        listening: Listening,
    ) -> None:
        super().__init__(request, address, on_event)
        self.record: Record | None = None
        self.reports = False
        self.out_at_end: tuple[int, ...] = ()
        self._server, self._own_address, self._standby = listening
        self._search_timeout = address.timeout
        self._election = Election(request.rank)
        self._prepared: Record | None = None  # and not confirmed yet
        self.is_unfit = ""
        self._is_ready = False
        self._is_done = False
        self._last_tick = 0.0

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
            self._go = self._prepared = None
            self.is_over = False
            self._is_ready = self._has_joined = True
        self._own_failure = None
        if not self.is_unfit:
            self.send({"join": self.next_round})
        own = self.request.rank
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
                known = self.record
                if self._go is not None and known is not None:
                    self._round = self._go["go"]
                    return self._go, known.active.index(own), len(known.active)
                with self._changed:
                    known, self._prepared = self._prepared, None
                if known is not None and own in known.active:
                    is_first = known.active[0] == own
                    store = {"store": open_store()} if is_first else {}
                    self.send({"confirm": [known.term, known.round], **store})
        finally:
            self._is_ready = False

    def be_unfit(self, reason: str) -> None:
        """Take part no more: this node is not well."""
        self.is_unfit = reason
        self.send({"unfit": reason})

    @property
    def is_alone(self) -> bool:
        """Whether there is no coordinator any more, that knows how the job ended."""
        return self._channel is None or self._channel.closed.is_set()

    def finish(self) -> None:
        """Wait until all nodes have finished.

        Raises:
            JobFailedError: They have not.
        """
        self._is_done = True
        super().finish()

    # --- in the thread ------------------------------------------------------------

    async def _communicate(self) -> None:
        channel, answer = await self._search.run()
        around = asyncio.create_task(self._look_around())
        try:
            while True:
                await self._follow(channel, answer)
                if self.finished or self.failure is not None or self._is_leaving:
                    return
                self._change(is_over=True, _prepared=None)
                self._standby.follows = None
                if self.record is None:
                    super()._lose(Failure(Kind.COORDINATOR))
                    return
                channel, answer = await self._find(self.record)
        finally:
            around.cancel()

    def _accepted(self, answer: Mapping[str, Any]) -> None:
        """Say where this member is, and what it knows."""
        self._last_tick = time.monotonic()
        self._standby.follows = answer.get("coordinator")
        present: dict[str, Any] = {"address": self._own_address, "term": [0, 0]}
        if self.record is not None:
            present["term"] = self.record.term
            number, term = answer.get("age", (-1, (0, 0)))
            if self.record.age > (number, tuple(term)):
                present["record"] = record.packed(self.record)
        self._send({"present": {**present, "done": self._is_done}})
        if self.is_unfit:
            self._send({"unfit": self.is_unfit})
        elif self._is_ready:
            self._send({"join": self.next_round})

    def _lose(self, _failure: Failure) -> None:
        """Do nothing: another member will coordinate."""

    def _disconnect(self) -> None:
        if self._channel is not None and self._channel.closed.is_set():
            self._is_leaving = True
            self._task.cancel()
        else:
            super()._disconnect()

    def _tick(self) -> None:
        """Count one more second without the coordinator.

        What was read right behind a gap may be as old as that.
        """
        now = time.monotonic()
        gap = now - self._last_tick - _TICK
        self._last_tick = now
        channel = self._channel
        if gap > _GAP and channel is not None:
            channel.has_received = False
            self._silent_for += int(gap)
            if self._silent_for >= self._silence_timeout:
                self._on_event({"suspended": int(gap)})
        super()._tick()

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "prepare" in message:
            known = record.unpacked(message["prepare"])
            if self.record is None or known.age > self.record.age:
                self._change(record=known, _prepared=known)
            return
        if "record" in message:
            known = record.unpacked(message["record"])
            if self.record is None or known.age >= self.record.age:
                self._change(record=known)
            return
        if "out" in message:
            self._on_event({"out": message["out"]})
            return
        if "finished" in message or "failed" in message:
            self.reports = self._standby.coordinator is not None
            self.out_at_end = tuple(message.get("out_at_end", ()))
        super()._handle(message)

    # --- the other members --------------------------------------------------------

    async def _find(self, known: Record) -> tuple[Channel, Mapping[str, Any]]:
        """Find the coordinator, or become it.

        Raises:
            CoordinatorNotFoundError: There was none in time.
        """
        start = time.monotonic()
        members = known.addresses.keys() - known.out.keys()
        self._election.begin(members)
        while True:
            member = self._election.whom()
            if member is None:
                waited = time.monotonic() - start
                if waited > self._search_timeout:
                    raise CoordinatorNotFoundError("no member coordinates the job")
                await asyncio.sleep(_PAUSE)
                self._election.begin(members)
                continue
            if member == self.request.rank:
                if self._standby.coordinator is None:
                    self._on_event({"takes_over": known.term[1]})
                await self._call(self._standby.coordinate, known)
            found = await self._ask(known.addresses[member])
            if isinstance(found, tuple):
                return found
            self._election.heard(member, found)

    async def _look_around(self) -> None:
        """Where this member coordinates, find out about those that are not here."""
        while True:
            await asyncio.sleep(_PAUSE)
            if self._standby.coordinator is None:
                continue
            absent, is_strong = await self._call(self._standby.absent)
            asked = (self._ask(address, asks=True) for address in absent.values())
            found = await asyncio.gather(*asked)
            answers = {
                member: answer
                for member, answer in zip(absent, found, strict=True)
                if isinstance(answer, Answer)
            }
            for member, answer in answers.items():
                if answer.is_gone:
                    await self._call(self._standby.found_gone, member)
            if not is_strong and self._election.gives_way(answers):
                await self._call(self._standby.give_way)

    async def _ask(
        self, address: Address, *, asks: bool = False
    ) -> tuple[Channel, Mapping[str, Any]] | Answer | None:
        """Ask a member to be accepted, or only who coordinates.

        Returns:
            The connection, and what a coordinator answers; what another member
            answers; ``None`` if there is no answer in time.
        """
        channel = Channel()
        first_line = {"protocol": VERSION, **asdict(self.request), "asks": asks}
        try:
            answer = await asyncio.wait_for(
                _answer(channel, address, first_line), _ANSWER_TIMEOUT
            )
        except ConnectionRefusedError:
            return _GONE
        except (OSError, asyncio.TimeoutError):
            channel.abort()
            return None
        is_job = answer.get("job") == self.request.job
        if (answer.get("welcome") == VERSION and is_job) or "failed" in answer:
            return channel, answer
        channel.close()
        try:
            return election.answer_of(answer)
        except ProtocolError:
            return None

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
