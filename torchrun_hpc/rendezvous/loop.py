"""The thread in which a process takes part, with its client and its server."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Seconds for the thread's end; twice as many for calls aside. Signals wait for it.
_END_TIMEOUT = 0.5


def now() -> float:
    """Return seconds, which also pass while the process or machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Loop:
    """An event loop in its own thread.

    Calls that may block run aside, in another thread: a full pipe must not keep the
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

    def close(self) -> None:
        """End once the calls aside have returned, or block for too long."""
        if not self._thread.is_alive():
            return
        self.call(self.events.stop)
        self._thread.join(_END_TIMEOUT)
        self._calls.put(None)
        for _ in range(2):
            self._aside.join(_END_TIMEOUT)

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
