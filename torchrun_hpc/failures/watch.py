"""Finds out which workers of this node have failed, and which of them first."""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.failures.failure import signal_of
from torchrun_hpc.failures.worker import describe_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.relay import Relay
    from torchrun_hpc.failures.worker import Worker

# Seconds.
_INTERVAL = 0.1  # between two looks at the workers, at most
_PAUSE = 0.005  # at least: one has ended, and its exit code is not known yet
_TEARDOWN = 5.0  # that a worker may take to end after its traceback
_NEVER = float("inf")

# Which of several failures comes first, by what is seen on this node.
_ORDER = operator.attrgetter("was_stopped", "is_consequence", "time")

_EXCEPTION = 1  # the exit code of a Python that ends with a traceback


class Attempt(NamedTuple):
    """Which workers have failed: all are started again with the next attempt.

    Attributes:
        number: How often workers have been started here.
        restarts_left: How many restarts were left then.
    """

    number: int
    restarts_left: int


class Watch:
    """Watches the workers, in a thread of its own.

    Torch's agent looks every ``--monitor-interval``, and then stops the others first,
    which takes as long as they like.

    Args:
        relay: Has what they write.

    Attributes:
        on_begin: Gets the workers of each attempt.
        on_failure: Gets each failure, the first one first; it is called from several
            threads, never from two at a time.
        has_failed: Whether a worker of this attempt has failed.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.on_begin: Callable[[Sequence[Worker]], object] = lambda _: None
        self.on_failure: Callable[[Failure, Attempt], object] = lambda *_: None
        self._lock = threading.RLock()
        self._workers: list[Worker] = []
        self._running: list[Worker] = []
        self._attempt = Attempt(0, 0)
        self.has_failed = False
        self._stopped_since = _NEVER
        self._known: set[object] = set()  # equal failures, of which one had its lines
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, workers: Iterable[Worker], restarts_left: int) -> None:
        """Watch these workers, and no others any more."""
        with self._lock:
            self._workers = self._running = list(workers)
            self._attempt = Attempt(self._attempt.number + 1, restarts_left)
            self.has_failed = False
            self._stopped_since = _NEVER
            self._known.clear()
        self.on_begin(self._workers)
        if self._attempt.number == 1:
            self._thread.start()

    def before_poll(self) -> None:
        """Take note that torch looks now: if one has failed, it stops the others."""
        with self._lock:
            self.check()
            self._stopped_since = self._relay.clock()

    def poll_was_clean(self) -> None:
        """Take note that torch has looked, and that they run on."""
        self._stopped_since = _NEVER

    def stopping(self, *, look: bool) -> None:
        """Take note that the workers are stopped now: that is no failure.

        Args:
            look: Whether one may have failed by now. Then others are watched to their
                end: they may have failed with it. So is one that has written a
                traceback, and may be about to end.
        """
        with self._lock:
            if not look:
                self._running = []
                return
            self.check()
            now, failed_at = self._relay.clock(), self._relay.failed_at
            self._stopped_since = min(self._stopped_since, now)
            if not self.has_failed:
                since = now - _TEARDOWN
                self._running = [w for w in self._running if failed_at(w.pid) > since]

    def all_stopped(self) -> None:
        """Take note that all have ended; look at those that failed last."""
        with self._lock:
            self.check()
            self._workers = self._running = []
            self._relay.forget_ended()

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    @property
    def workers(self) -> list[tuple[Worker, bool]]:
        """The workers of this attempt, and whether each still runs."""
        with self._lock:
            return [(worker, worker in self._running) for worker in self._workers]

    def check(self) -> None:
        """Look for workers that have ended with an error."""
        with self._lock:
            codes = [(worker, worker.exit_code()) for worker in self._running]
            self._running = [worker for worker, code in codes if code is None]
            failures = [self._failure(worker, code) for worker, code in codes if code]
            for failure in sorted(failures, key=_ORDER):
                # Whatever else it is that they do when they are stopped.
                is_late = failure.was_stopped or failure.time > self._stopped_since
                if not (self.has_failed and is_late):
                    self.has_failed = True
                    self.on_failure(self._brief(failure), self._attempt)

    def _failure(self, worker: Worker, code: int) -> Failure:
        """Describe a failure, without a signal that only shortened the teardown.

        The peers had failed of it, and so the agent stopped all.
        """
        failure = describe_failure(worker, code, self._relay)
        is_terminated = signal_of(code) == signal.SIGTERM
        if is_terminated and failure.time <= self._stopped_since < _NEVER:
            return replace(failure, code=_EXCEPTION)
        return failure

    def _brief(self, failure: Failure) -> Failure:
        """Leave out the lines of a failure that is equal to one before."""
        is_known = failure.signature in self._known
        self._known.add(failure.signature)
        return failure.brief if is_known else failure

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE):
            with self._lock:
                running = [worker.pid for worker in self._running]
            _wait_for_one(running)
            self.check()


def _wait_for_one(pids: Iterable[int]) -> None:
    """Wait until one of these processes ends, or some time."""
    ends = select.poll()
    with contextlib.ExitStack() as files:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or the kernel is old
                file = os.pidfd_open(pid)
                files.callback(os.close, file)
                ends.register(file, select.POLLIN)
        ends.poll(_INTERVAL * 1000)
