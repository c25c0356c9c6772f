"""The watch: finds out which workers of this node failed, and which was first."""

from __future__ import annotations

import contextlib
import operator
import os
import select
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc import limits
from torchrun_hpc.failures.failure import signal_of
from torchrun_hpc.failures.worker import describe_failure, failed_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.relay import Relay
    from torchrun_hpc.failures.worker import Worker

_NEVER = float("inf")

# Order of several failures on this node.
_ORDER = operator.attrgetter("is_doubtful", "time")

_EXCEPTION = 1  # Python's exit code after a traceback


class Attempt(NamedTuple):
    """Which attempt failed, from 1, and how many restarts were left then."""

    number: int
    restarts_left: int


class Watch:
    """Watches the workers, in its own thread.

    Torch's agent looks only every ``--monitor-interval``. When it finds a failure, it
    first stops the other workers.

    ``on_begin`` gets the workers of each attempt, ``on_failure`` each failure: the
    first one first, one call at a time. ``on_hang`` is called before the workers are
    stopped because of a hang. ``hangs`` returns whether another node has reported one.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        on_begin: Callable[[Sequence[Worker]], object] = lambda _: None,
        on_failure: Callable[[Failure, Attempt], object] = lambda *_: None,
        on_hang: Callable[[], object] = lambda: None,
        hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._relay = relay
        self._on_begin = on_begin
        self._on_failure = on_failure
        self._on_hang = on_hang
        self._hangs = hangs
        self._lock = threading.RLock()
        self._workers: list[Worker] = []
        self._running: list[Worker] = []
        self.attempt = Attempt(0, 0)
        self.failures: dict[int, Failure] = {}  # of this attempt, by rank
        self._has_looked = False
        self._stopped_since = _NEVER
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, workers: Iterable[Worker], restarts_left: int) -> None:
        """Watch these workers, and no others."""
        with self._lock:
            self._workers = self._running = list(workers)
            self.attempt = Attempt(self.attempt.number + 1, restarts_left)
            self.failures = {}
            self._has_looked = False
            self._stopped_since = _NEVER
        self._on_begin(self._workers)
        if self.attempt.number == 1:
            self._thread.start()

    def before_poll(self) -> None:
        """Note that torch polls now; if a worker has failed, it stops the others."""
        with self._lock:
            self.check()
            self._stopped_since = self._relay.clock()

    def poll_was_clean(self) -> None:
        """Note that torch has polled, and that the workers continue."""
        self._stopped_since = _NEVER

    @property
    def is_hang(self) -> bool:
        """Whether this attempt has ended because a collective failed."""
        failures = self.failures.values()
        is_other = any(not (f.is_hang or f.is_doubtful) for f in failures)
        return self._hangs() or (any(f.is_hang for f in failures) and not is_other)

    def before_stop(self) -> None:
        """After a hang, let the workers be sampled once, before they are stopped."""
        self.check()
        if self.is_hang and not self._has_looked:
            self._has_looked = True
            self._stopped_since = _NEVER  # meanwhile, they fail by themselves
            self._on_hang()
            self.check()
            self._stopped_since = self._relay.clock()

    def stopping(self, *, look: bool) -> None:
        """Note that the workers are being stopped, which is no failure.

        Without ``look``, watch none of them any longer. Otherwise, if a worker has
        failed, watch all to their end: others may fail with it. If none has failed,
        watch only those that have written or told a traceback.
        """
        if not look:
            with self._lock:
                self._running = []
                self._has_looked = True
            return
        self.before_stop()
        with self._lock:
            self.check()
            now, relay = self._relay.clock(), self._relay
            self._stopped_since = min(self._stopped_since, now)
            if not self.failures:
                then = now - limits.TEARDOWN_TIMEOUT
                self._running = [w for w in self._running if failed_at(w, relay) > then]

    def all_stopped(self) -> None:
        """Note that all workers have ended; look at the last failures."""
        with self._lock:
            self.check()
            self._workers = self._running = []
            self._relay.forget_ended()

    def end(self) -> None:
        """Stop watching."""
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
                # Workers that are being stopped may fail in any way.
                is_late = failure.was_stopped or failure.time > self._stopped_since
                if not (self.failures and is_late):
                    sent = [each.signature for each in self.failures.values()]
                    self.failures[failure.rank] = failure
                    is_new = failure.signature not in sent
                    self._on_failure(failure if is_new else failure.brief, self.attempt)

    def _failure(self, worker: Worker, code: int) -> Failure:
        """Describe a failure; ignore a SIGTERM that only shortened the teardown."""
        failure = describe_failure(worker, code, self._relay)
        is_terminated = signal_of(code) == signal.SIGTERM
        if is_terminated and failure.time <= self._stopped_since < _NEVER:
            return replace(failure, code=_EXCEPTION)
        return failure

    def _run(self) -> None:
        while not self._ended.wait(limits.WATCH_PAUSE):
            with self._lock:
                running = [worker.pid for worker in self._running]
            _wait_for_one(running)
            self.check()


def _wait_for_one(pids: Iterable[int]) -> None:
    ends = select.poll()
    with contextlib.ExitStack() as files:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or the kernel is old
                file = os.pidfd_open(pid)
                files.callback(os.close, file)
                ends.register(file, select.POLLIN)
        ends.poll(limits.WATCH_INTERVAL * 1000)
