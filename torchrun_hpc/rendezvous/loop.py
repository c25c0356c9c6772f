"""The thread that takes part in a job; the ends of connections; signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import limits, wire
from torchrun_hpc.rendezvous.messages import CoordinatorAnswers, CoordinatorSilent
from torchrun_hpc.rendezvous.protocol import JOIN_REQUEST_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

_T = TypeVar("_T")


def now() -> float:
    """Return seconds, which also pass while the process or machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def within(seconds: float, doing: Coroutine[Any, Any, _T]) -> _T:
    """Return what a coroutine returns, or cancel it and raise `asyncio.TimeoutError`.

    `asyncio.wait_for` can lose a cancellation before Python 3.12.
    """
    task = asyncio.create_task(doing)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.add_done_callback(_forget)
        task.cancel()


def _forget(task: asyncio.Task[Any]) -> None:
    """Retrieve a late exception, for which nobody waits."""
    if not task.cancelled():
        task.exception()


class Loop:
    """An event loop in its own thread.

    Calls that may block run in another thread, "aside": a full pipe must not keep the
    coordinator from answering. The loop's exception handler gets their faults.
    """

    def __init__(self) -> None:
        self.events: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._aside = threading.Thread(
            target=self._run_aside, name="aside", daemon=True
        )

    def start(self) -> None:
        """Start both threads. Raise `OSError` if no file can be opened."""
        self.events = asyncio.new_event_loop()
        self._thread.start()
        self._aside.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop's thread, from any other thread."""
        with contextlib.suppress(RuntimeError):  # it has just ended
            if self._thread.is_alive():
                self.events.call_soon_threadsafe(function, *args)

    def call_aside(self, function: Callable[[], object]) -> None:
        """Call a function that may block, in the order of the calls."""
        self._calls.put(function)

    @staticmethod
    def call_apart(function: Callable[[], object]) -> None:
        """Call a function in a thread of its own, because it may take long or hang."""
        threading.Thread(target=function, daemon=True).start()

    def close(self) -> None:
        """End both threads: once the calls aside have returned, or after a second."""
        if not self._thread.is_alive():
            return
        self.call(self.events.stop)
        self._thread.join(limits.LOOP_END_TIMEOUT)
        self._calls.put(None)
        for _ in range(2):
            self._aside.join(limits.LOOP_END_TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self.events)
        try:
            self.events.run_forever()
        finally:
            self.events.run_until_complete(self._end_tasks())
            self.events.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closes aborted connections

    def _run_aside(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                function()
            except Exception as error:  # noqa: BLE001, PERF203 - each has its own
                fault = {"message": "what was called aside", "exception": error}
                self.call(self.events.call_exception_handler, fault)


# --- the ends of connections ------------------------------------------------------


class End(asyncio.Protocol):
    """One end of a connection.

    Lines are short until the other end has proved itself. An unexpected end of file
    comes only from the kernel, when it ends a process.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self.lines = wire.Lines(JOIN_REQUEST_LIMIT)
        self.at_end = False
        self.has_received = False
        self._is_aborted = False

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def eof_received(self) -> None:
        """Remember the end of file."""
        self.at_end = True

    def connection_lost(self, error: Exception | None) -> None:
        """After a fault, let the socket send a reset when asyncio closes it."""
        if error is not None or self._is_aborted:
            with contextlib.suppress(OSError):  # the connection has ended already
                self.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )

    def abort(self) -> None:
        """Reset the connection now, which shows that this process lives."""
        if self.transport is not None:
            self._is_aborted = True
            self.transport.abort()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        with contextlib.suppress(OSError):
            self.transport.close()


# --- signs of life ----------------------------------------------------------------


class Silence:
    """Counts the seconds without a message, but not while this process is suspended."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seconds = 0

    def begin(self) -> None:
        """Start again from 0."""
        self._seconds = 0

    @property
    def ended_after(self) -> int:
        """The limit in seconds if it has ended the connection; otherwise 0."""
        return self.limit if self._seconds >= self.limit else 0

    def tick(self, end: End) -> Iterator[CoordinatorSilent | CoordinatorAnswers]:
        """Count one more second; yield the news. Abort at the limit."""
        self._seconds += 1
        if end.has_received:
            if self._seconds > limits.SILENCE_REPORT:
                yield CoordinatorAnswers(self._seconds)
            end.has_received = False
            self._seconds = 0
        if self._seconds == limits.SILENCE_REPORT:
            yield CoordinatorSilent(self._seconds, self.limit - self._seconds)
        if self._seconds >= self.limit:
            end.abort()


class Lease:
    """The time for which workers may run while their agent hears no coordinator.

    `length` is in seconds.
    """

    def __init__(self, length: float) -> None:
        self.length = length
        self._since = math.inf
        self._checked = -math.inf

    def begin(self) -> None:
        """Begin now, because a coordinator has just accepted this member."""
        self._since = now()

    def renew(self, sent: float) -> None:
        """Count from the time at which this member sent a received answer."""
        self._since = max(self._since, min(sent, now()))

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return now() - self._since >= self.length

    def overslept(self) -> int:
        """Return the seconds without a coordinator if this process was suspended, or 0.

        This is called at each tick, so a late call shows a suspension. A suspension
        that ends before the lease does not count.
        """
        before, self._checked = self._checked, now()
        due = max(self._since + self.length, before + limits.TICK)
        is_late = self._checked - due > limits.SUSPENSION
        return int(self._checked - self._since) if is_late else 0
