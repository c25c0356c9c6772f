"""Finds out which workers of this node have failed, and why."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.failures.collection import WorkerFailure
from torchrun_hpc.failures.last_words import KEPT, last_words, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchrun_hpc.failures.relay import Relay

# Seconds.
_INTERVAL = 0.1  # between two looks at the workers
_REST_TIMEOUT = 0.3  # for what a worker wrote last to arrive


@dataclass(frozen=True)
class Worker:
    """A worker of this node.

    Attributes:
        rank: Its global rank.
        size: Number of all workers.
        node: Rank of its node.
        local_rank: Its rank there.
        pid: Its process number.
        exit_code: Returns its exit code, ``None`` while it runs.
        log: The file that its stderr goes to; empty without.
        error_file: The file in which ``@record`` describes an exception.
    """

    rank: int
    size: int
    node: int
    local_rank: int
    pid: int
    exit_code: Callable[[], int | None]
    log: str = ""
    error_file: str = ""


class Watch:
    """Watches the workers, in a thread of its own.

    Torch's agent looks every ``--monitor-interval``, and then stops the others first,
    which takes as long as they like.

    Args:
        relay: Has what they write.
        on_failure: Gets each failure, the first one first, and how many restarts were
            left when the workers started; it is called from several threads, never
            from two at a time.
    """

    def __init__(
        self, relay: Relay, on_failure: Callable[[WorkerFailure, int], object]
    ) -> None:
        self._relay = relay
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._running: list[Worker] = []
        self._restarts_left = 0
        self._has_failed = False
        self._kinds: set[tuple[int, str]] = set()  # of which the lines are known
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, workers: Iterable[Worker], restarts_left: int) -> None:
        """Watch these workers, and no others any more."""
        with self._lock:
            self._running = list(workers)
            self._restarts_left = restarts_left
            self._has_failed = False
            self._kinds.clear()
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def stop(self, *, look: bool) -> None:
        """Take note that the workers are stopped now: that is no failure.

        Args:
            look: Whether one may have failed by now. Then others are watched to their
                end: they may have failed with it.
        """
        with self._lock:
            if look:
                self.check()
            if not self._has_failed:
                self._running = []

    def stopped(self) -> None:
        """Take note that all have ended; look at those that failed last."""
        with self._lock:
            self.check()
            self._running = []

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()

    @property
    def running(self) -> list[Worker]:
        """The workers that run."""
        with self._lock:
            return [*self._running]

    @property
    def has_reported(self) -> bool:
        """Whether a worker has failed, since the last ones were started."""
        return self._has_failed

    def check(self) -> None:
        """Look for workers that have ended with an error."""
        with self._lock:
            codes = [(worker, worker.exit_code()) for worker in self._running]
            self._running = [worker for worker, code in codes if code is None]
            limit = time.monotonic() + _REST_TIMEOUT
            found = [self._failure(w, code, limit) for w, code in codes if code]
            for failure, was_stopped in sorted(found, key=_order):
                if not (was_stopped and self._has_failed):
                    self._has_failed = True
                    self._on_failure(self._brief(failure), self._restarts_left)

    def _failure(
        self, worker: Worker, code: int, limit: float
    ) -> tuple[WorkerFailure, bool]:
        """Describe a failure, and say whether it is only that the worker was stopped.

        Torch's agent stops the others, by SIGTERM, as soon as one has failed.
        """
        log, unread, failed_at = worker.log, "", 0.0
        if log:
            tail = _end_of_file(log)
        elif self._relay.reads(worker.pid):
            tail, failed_at = self._relay.end_of(worker.pid, limit - time.monotonic())
        else:
            tail, unread = b"", self._relay.unread or "torch has started it itself"
        words = last_words(tail, code)
        with contextlib.suppress(OSError, ValueError):
            words = recorded(Path(worker.error_file).read_text("utf-8")) or words
        failure = WorkerFailure(
            rank=worker.rank,
            size=worker.size,
            node=worker.node,
            local_rank=worker.local_rank,
            code=code,
            time=(words.is_traceback and failed_at) or time.time(),
            cause=words.cause,
            lines=words.lines,
            log=log,
            unread="" if words.lines else unread,
        )
        return failure, code == -signal.SIGTERM and not words.is_traceback

    def _brief(self, failure: WorkerFailure) -> WorkerFailure:
        """Leave out the lines of a failure that is equal to one before."""
        is_known = failure.kind in self._kinds
        self._kinds.add(failure.kind)
        return replace(failure, lines=()) if is_known else failure

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.check()


def _order(found: tuple[WorkerFailure, bool]) -> tuple[bool, bool, float]:
    """Say which of several failures comes first, by what is seen on this node."""
    failure, was_stopped = found
    return was_stopped, failure.follows, failure.time


def _end_of_file(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - KEPT, 0))
            return file.read()
    except OSError:
        return b""


def exit_code_of(pid: int) -> int | None:
    """Return the exit code of a child process, without collecting it.

    It is ``None`` while the child runs, and when it has been collected.
    """
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid == pid:
            killed = ended.si_code != os.CLD_EXITED
            return -ended.si_status if killed else ended.si_status
    return None
