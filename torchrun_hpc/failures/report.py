"""What a person reads about workers that have failed: on one screen, on one node."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, count
from torchrun_hpc.failures.collection import Collection, ending
from torchrun_hpc.names import nodes, ranges
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrun_hpc.failures.collection import Summary, WorkerFailure
    from torchrun_hpc.failures.watch import Attempt
    from torchrun_hpc.planning.meeting import Meeting

# Seconds for other failures of workers to arrive: they may be the cause, or the same.
COLLECT_TIMEOUT = 1.0

_INDENT = "    "
_OWN = console.PREFIX + _INDENT


def failed(cause: str) -> Message:
    """Say why the job has failed: node 0's last line."""
    return Message("HPC125", f"the job has failed: {cause}")


def restarted(number: int, cause: str) -> Message:
    """Say why all workers are started again."""
    return Message("HPC128", f"restart {number} of all workers: {cause}")


def worker_failed(  # noqa: D417 - the others are those of `WorkerFailure`
    meeting: Meeting, *, rank: int, node: int, code: int, cause: str = ""
) -> str:
    """Say how a worker failed.

    Args:
        meeting: Where the nodes meet.
    """
    text = f"worker {rank}"
    if meeting.nodes > 1 or meeting.hosts:
        text += f" on {nodes([node], meeting.hosts) if node >= 0 else 'another node'}"
    return f"{text} {ending(code)}" + (f": {cause}" if cause else "")


def cause_of(failure: WorkerFailure, meeting: Meeting) -> str:
    """Say how a worker failed, and why, in one line."""
    return worker_failed(
        meeting,
        rank=failure.rank,
        node=failure.node,
        code=failure.code,
        cause=failure.cause,
    )


def write(summary: Summary, meeting: Meeting) -> None:
    """Write the report: the first failure, and how many others there are.

    Args:
        summary: What there is to report.
        meeting: Where the nodes meet.
    """
    first = summary.first
    how = worker_failed(meeting, rank=first.rank, node=first.node, code=first.code)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    log = f", log file {first.log}" if first.log else ""
    message = failed(f"{how} (local rank {first.local_rank}, at {when}{log})")
    console.write(message, "error", [*_details(summary)])


def _details(summary: Summary) -> Iterator[str]:
    first = summary.first
    for line in first.lines:
        yield _INDENT + line
    if first.unread:
        yield f"{_OWN}its stderr is in the output: {first.unread}"
    if alike := summary.alike:
        others = count(len(alike), "other rank")
        yield f"{_OWN}the same on {others}: {ranges(alike)}"
    for cause, ranks in summary.others:
        word = "rank" if len(ranks) == 1 else "ranks"
        yield f"{_OWN}{word} {ranges(ranks)} of {first.size}: {cause}"
    if summary.unlisted:
        yield f"{_OWN}and {count(summary.unlisted, 'other rank')} for other reasons"


class LocalReport:
    """Reports the failures of one node, where it has no coordinator that collects them.

    Args:
        meeting: Where the nodes meet.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._collection = Collection()
        self._attempt = 0
        self._restarts = 0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._reported: Summary | None = None

    def add(self, failure: WorkerFailure, attempt: Attempt) -> None:
        """Take note of a failure; the first one of the last attempt is reported soon.

        Args:
            failure: How a worker failed.
            attempt: Which workers have failed.
        """
        is_first = attempt.number != self._attempt
        if is_first:
            self._collection.clear()
            self._attempt = attempt.number
        self._collection.add(failure)
        if is_first and attempt.restarts_left:
            self._restarts += 1
            console.write(restarted(self._restarts, cause_of(failure, self._meeting)))
        elif is_first:
            self._timer = threading.Timer(COLLECT_TIMEOUT, self._write)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> Message | None:
        """Report what is not reported yet; return the last line, if there is one."""
        if self._timer is None:
            return None
        self._timer.cancel()
        summary = self._write()
        return failed(cause_of(summary.first, self._meeting)) if summary else None

    def _write(self) -> Summary | None:
        with self._lock:
            if self._reported is None:
                self._reported = self._collection.summary()
                if self._reported is not None:
                    write(self._reported, self._meeting)
            return self._reported
