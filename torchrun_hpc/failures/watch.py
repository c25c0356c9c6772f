"""Finds out which workers of this node have failed, and why."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.failures.collection import WorkerFailure
from torchrun_hpc.failures.last_words import KEPT, LastWords, last_words, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchrun_hpc.failures.relay import Relay

# Seconds.
_INTERVAL = 0.1  # between two looks at the workers
_TEARDOWN = 5.0  # that a worker may take to end after its traceback


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
        on_failure: Gets each failure, the first one first; it is called from several
            threads, never from two at a time.
        has_failed: Whether a worker of this attempt has failed.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.on_failure: Callable[[WorkerFailure, Attempt], object] = lambda *_: None
        self._lock = threading.RLock()
        self._workers: list[Worker] = []
        self._running: list[Worker] = []
        self._attempt = Attempt(0, 0)
        self.has_failed = False
        self._known: set[object] = set()  # equal failures, of which one had its lines
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, workers: Iterable[Worker], restarts_left: int) -> None:
        """Watch these workers, and no others any more."""
        with self._lock:
            self._workers = list(workers)
            self._running = [*self._workers]
            self._attempt = Attempt(self._attempt.number + 1, restarts_left)
            self.has_failed = False
            self._known.clear()
            self._relay.forget_ended()
        if self._attempt.number == 1:
            self._thread.start()

    def stop(self, *, look: bool) -> None:
        """Take note that the workers are stopped now: that is no failure.

        Args:
            look: Whether one may have failed by now. Then others are watched to their
                end: they may have failed with it. So is one that has written a
                traceback, and may be about to end.
        """
        with self._lock:
            if look:
                self.check()
            if not (look and self.has_failed):
                since = time.time() - _TEARDOWN
                self._running = [
                    worker
                    for worker in self._running
                    if look and self._relay.failed_at(worker.pid) > since
                ]

    def stopped(self) -> None:
        """Take note that all have ended; look at those that failed last."""
        with self._lock:
            self.check()
            self._workers = self._running = []

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
            found = [self._failure(worker, code) for worker, code in codes if code]
            for failure, was_stopped in sorted(found, key=_order):
                if not (was_stopped and self.has_failed):
                    self.has_failed = True
                    self.on_failure(self._brief(failure), self._attempt)

    def _failure(self, worker: Worker, code: int) -> tuple[WorkerFailure, bool]:
        """Describe a failure, and say whether it is only that the worker was stopped.

        Torch's agent stops the others, by SIGTERM, as soon as one has failed.
        """
        unread, failed_at, words = "", 0.0, LastWords()
        with contextlib.suppress(Exception):  # whatever there is: the job has failed
            if worker.log:
                words = last_words(_end_of_file(worker.log), code)
            elif self._relay.reads(worker.pid):
                tail, failed_at = self._relay.end_of(worker.pid)
                words = last_words(tail, code)
            else:
                unread = self._relay.unread or "torch has started it itself"
            if worker.error_file and Path(worker.error_file).is_file():
                text = Path(worker.error_file).read_text("utf-8")
                words = recorded(text) or words
        failure = WorkerFailure(
            rank=worker.rank,
            size=worker.size,
            node=worker.node,
            local_rank=worker.local_rank,
            code=code,
            time=(words.is_traceback and failed_at) or time.time(),
            cause=words.cause,
            lines=words.lines,
            log=worker.log,
            unread="" if words.lines else unread,
        )
        return failure, code == -signal.SIGTERM and not words.is_traceback

    def _brief(self, failure: WorkerFailure) -> WorkerFailure:
        """Leave out the lines of a failure that is equal to one before."""
        is_known = failure.likeness in self._known
        self._known.add(failure.likeness)
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
