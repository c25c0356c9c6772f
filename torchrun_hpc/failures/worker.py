"""A worker of this node, and how it failed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc import files, wire
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart, signal_of
from torchrun_hpc.failures.last_words import KEPT, LastWords, last_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.failures.relay import Relay

_LARGEST = 2**24  # bytes of a file from `@record`: a traceback may be long


@dataclass(frozen=True)
class Worker:
    """A worker of this node."""

    rank: int
    size: int
    node: int
    local_rank: int
    pid: int
    exit_code: Callable[[], int | None]  # returns its exit code, ``None`` while it runs
    log: str = ""  # the file for its stderr; empty without one
    error_file: str = ""  # the file in which ``@record`` describes an exception
    nodes: int = 1  # number of nodes with workers
    started: float = field(default_factory=time.time)  # seconds since 1970
    # Asks a fork a question, and returns its answer within so many seconds.
    told: Callable[[bytes, float], bytes] = lambda *_: b""


def describe_failure(worker: Worker, code: int, relay: Relay) -> Failure:
    """Describe how a worker failed, with its last words, wherever it has left them."""
    tail, written_at, told_at, words = b"", 0.0, 0.0, LastWords()
    # The failure counts, even if the output cannot be read.
    with contextlib.suppress(Exception):
        if worker.log:
            tail, written_at = _end_of_file(worker.log)
        elif relay.reads(worker.pid):
            tail, written_at = relay.end_of(worker.pid)
        else:
            tail, told_at = _told(worker)
        words = last_words(tail, code)
    with contextlib.suppress(Exception):
        words = _recorded(worker.error_file)
        told_at = os.lstat(worker.error_file).st_mtime
    # An exception does not explain a later crash, for example in C++.
    is_explained = words.is_traceback and signal_of(code) in {0, signal.SIGTERM}
    is_read = worker.log or relay.reads(worker.pid) or is_explained
    unread = "" if is_read else relay.unread or "it does not pass through the agent"
    rank, size, local_rank = worker.rank, worker.size, worker.local_rank
    return Failure(
        Kind.WORKER,
        nodes=(worker.node,),
        code=code,
        text=words.cause,
        time=told_at or (words.is_traceback and written_at) or relay.clock(),
        worker=WorkerPart(rank, size, local_rank, words.lines, worker.log, unread),
    )


def failed_at(worker: Worker, relay: Relay) -> float:
    """Return when a worker, perhaps a running one, wrote why it fails; 0 if not."""
    return relay.failed_at(worker.pid) or _told(worker)[1]


def _told(worker: Worker) -> tuple[bytes, float]:
    """Return a fork's traceback, and when it told it; other workers tell nothing."""
    with contextlib.suppress(Exception):
        told = wire.from_json(worker.told(b"", 0))
        return told["error"].encode(errors="backslashreplace"), float(told["time"])
    return b"", 0.0


def _end_of_file(path: str) -> tuple[bytes, float]:
    with open(path, "rb", opener=files.opened) as file:
        return end_of(file.fileno()), os.fstat(file.fileno()).st_mtime


def _recorded(path: str) -> LastWords:
    """Return what ``@record`` (torch's ``ErrorHandler``) has written to a file."""
    message = wire.from_json(files.read(path, _LARGEST, os.O_NOFOLLOW))["message"]
    return last_words(message["extraInfo"]["py_callstack"].encode(), 1)


def end_of(number: int) -> bytes:
    """Return the end of an open file, at most `KEPT` bytes."""
    return os.pread(number, KEPT, max(os.fstat(number).st_size - KEPT, 0))


def exit_code_of(pid: int) -> int | None:
    """Return a child's exit code without collecting it; ``None`` while it runs."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid == pid:
            killed = ended.si_code != os.CLD_EXITED
            return -ended.si_status if killed else ended.si_status
    return None
