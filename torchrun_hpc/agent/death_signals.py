"""Death signals: each ends the launch, whatever the main thread does when it arrives.

A handler that only raises an exception can lose the signal: Python ignores exceptions
in at-fork hooks, in ``__del__`` and in log handlers. Between the starts of two workers,
it also loses the first one. So a signal waits until such a step has ended, and an
exception without effect is raised again.
"""

from __future__ import annotations

import _thread  # noqa: PLC2701 - a handler may have interrupted the module `threading`
import contextlib
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from torchrun_hpc import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

FOREVER = math.inf


class DeathSignals:
    """The death signals of a launch, each held for at most ``limit`` seconds.

    Their handlers run in the main thread. A fork holds its own signals: until it has
    become another program, or for `limits.SIGNAL_TIMEOUT` seconds.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self._limit = limit
        self._first = 0  # the number of the first one
        self._arrived = 0.0  # time.monotonic()
        self._is_over = False
        self.is_repeated = False  # since the launch ends
        self._sending = threading.Lock()

    def handler(self, act: Handler) -> Handler:
        """Return a handler that calls ``act`` when no step holds the first signal."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._is_over:
                self.is_repeated = True
                return
            if not self._first:
                self._first, self._arrived = number, time.monotonic()
                # There may be no more threads, or Python ends (3.12).
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._send_again, ())
            if time.monotonic() - self._arrived >= self._limit:
                act(self._first, frame)

        return handle

    @contextlib.contextmanager
    def held(self, limit: float) -> Iterator[None]:
        """Hold signals for at most ``limit`` seconds; afterwards the first one acts."""
        before, self._limit = self._limit, limit
        try:
            yield
        finally:
            self._limit = before
        if self._first and not self._is_over:
            signal.raise_signal(self._first)

    def end(self) -> None:
        """Ignore signals from now on: the launch already ends."""
        self._is_over = True  # first: a handler may interrupt the wait
        with self._sending:
            pass

    def _send_again(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._is_over:
            time.sleep(limits.SIGNAL_TIMEOUT)
            with self._sending:
                if not self._is_over:
                    signal.pthread_kill(main, self._first)  # also ends a system call


def die(number: int, _frame: FrameType | None) -> None:
    """End this process as the signal does without a handler."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def interrupt_kills() -> Iterator[None]:
    """Let Ctrl-C end this process at once, unless the program handles it otherwise.

    Before the start, a `KeyboardInterrupt` would only print a traceback. C++ code that
    runs during an import of torch can ignore it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
