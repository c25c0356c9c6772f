"""Failure reports: one sentence, and one screen.

A coordinator reports the failures of its job. In a world of torch's own rendezvous, no
coordinator collects them, and each node reports its own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.errors import Message, count
from torchrun_hpc.failures.failure import (
    Collection,
    Failure,
    Kind,
    WorkerPart,
    ending,
    signal_name,
)
from torchrun_hpc.names import nodes, ranges, rank_list
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torchrun_hpc.failures.failure import Summary
    from torchrun_hpc.failures.watch import Attempt
    from torchrun_hpc.planning.meeting import Meeting

    # For a hang, returns who did not come, and lines about it. Otherwise, returns the
    # failure itself.
    Explain = Callable[[Failure], tuple[Failure, Sequence[str]]]


_INDENT = "    "


def time_to_collect(failure: Failure) -> float:
    """Return the seconds to wait for failures of other workers."""
    is_doubtful = failure.is_doubtful
    return limits.COLLECT_CAUSE_TIMEOUT if is_doubtful else limits.COLLECT_TIMEOUT


@dataclass(frozen=True)
class JobFailed(Message):
    """The message that the job has failed; ``reason`` describes the failure."""

    failure: Failure
    reason: str


def failed(failure: Failure, meeting: Meeting, note: str = "") -> JobFailed:
    """Return why the job has failed, for the last line of the reporting node.

    A ``note`` replaces the cause.
    """
    reason = sentence(failure, meeting, note)
    return JobFailed("HPC125", f"the job has failed: {reason}", failure, reason)


def restarted(number: int, failure: Failure, meeting: Meeting) -> Message:
    """Return why all workers are started again."""
    text = f"restart {number} of all workers: {sentence(failure, meeting)}"
    return Message("HPC128", text)


def sentence(failure: Failure, meeting: Meeting, note: str = "") -> str:
    """Return what happened, where, and why, or a ``note`` instead of the cause."""
    ranks, code, cause = failure.nodes, failure.code, failure.text
    place = nodes(ranks, meeting.hosts) or "another node"
    who, verb = f"the agent on {place}", "is"
    lost = "it was killed, or the node is lost"
    if len(ranks) > 1:
        who, verb = f"the agents on {place}", "are"
        lost = "they were killed, or the nodes are lost"
    is_shared = meeting.nodes > 1 or meeting.hosts
    worker = f"worker {failure.rank}" + (f" on {place}" if is_shared else "")
    missing = count(len(ranks), "node")
    head = ranks[0] if ranks else meeting.coordinator
    host = meeting.endpoint if head is None else nodes([head], meeting.hosts)
    end = f"did not answer for {code} s" if code else "is gone"
    ended = ending(code) + (note or (f": {cause}" if cause else ""))
    text = {
        Kind.WORKER: failure.absent or f"{worker} {ended}",
        Kind.SIGNAL: f"{who} received {signal_name(code)}",
        Kind.AGENT: f"{who} gave up: {cause}",
        Kind.LOST: f"{who} {verb} gone without a message: {lost}",
        Kind.EXCLUDED: f"{place} {verb} excluded: {cause}",
        Kind.SILENT: f"{who} did not answer for {code} s",
        Kind.MISSING: f"{missing} did not join within {code} s (join_timeout): {place}",
        Kind.REFUSED: f"{who} does not belong to this job ({cause})",
        Kind.COORDINATOR: f"the agent on the head node, {host}, {end}",
    }[failure.kind]
    if failure.worker is not None and failure.is_doubtful:
        doubt = "its stderr was not read; " if failure.worker.unread else ""
        text = f"the first to end was {worker}, which {ended} "
        text += f"({doubt}the cause may be another rank)"
    if failure.finished:
        number = count(failure.finished, "node")
        text += f"; no restart, because {number} had already finished"
    return text


def write(summary: Summary, meeting: Meeting, hang: Iterable[str] = ()) -> None:
    """Write the report: first failure, other failures, and lines about a ``hang``."""
    first = summary.first
    worker = first.worker or WorkerPart(first.rank)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    log = f", log file {worker.log}" if worker.log else ""
    note = f" (local rank {worker.local_rank}, at {when}{log})"
    details = []
    if worker.unread:
        text = f"look for its stderr in the output: {worker.unread}"
        details.append(f"{text}. Pass --tee=3 to show it here")
    if same := summary.same_as_first:
        details.append(f"the same on {count(len(same), 'other rank')}: {ranges(same)}")
    for cause, ranks in summary.others:
        details.append(f"{rank_list(ranks)} of {worker.size}: {cause}")
    if summary.unlisted:
        others = count(summary.unlisted, "other rank")
        details.append(f"and {others} with other causes")
    lines = [_INDENT + line for line in worker.lines]
    lines += indented([*details, *hang])
    console.write(failed(first, meeting, note), "error", lines)


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines as details of a message."""
    return [console.DETAIL + line for line in lines]


# --- a world of torch's own rendezvous ------------------------------------------------


class LocalWorld:
    """One node's view of such a world. It has some attributes of `SchedulerRendezvous`.

    The node that ``is_certain`` writes the outcome. ``restarts`` counts restarts after
    failures of this node's workers.
    """

    took_part = reports = True
    hangs = is_unreported = False
    takeovers = 0
    out_at_end: tuple[int, ...] = ()

    def __init__(self, meeting: Meeting, explain: Explain) -> None:
        self._explain = explain
        self.failure: Failure | None = None
        self.restarts = 0
        self.is_certain = is_reporter(meeting.report_rank)
        self.meeting = meeting
        self._collection = Collection()
        self._attempt = 0
        self._timer: threading.Timer | None = None
        self._reported: Failure | None = None

    def worker_failed(self, failure: Failure, attempt: Attempt) -> None:
        """Record a failure; report the first one of the last attempt soon."""
        is_first = attempt.number != self._attempt
        if is_first:
            self._collection.clear()
            self._attempt = attempt.number
        self._collection.add(failure)
        if is_first and attempt.restarts_left:
            self.restarts += 1
            console.write(restarted(self.restarts, failure, self.meeting))
        elif is_first:
            wait = time_to_collect(failure)
            self._timer = threading.Timer(wait, self._report)
            self._timer.daemon = True
            self._timer.start()

    def give_up(self, failure: Failure) -> None:
        """Record why this node ends; torch knows less about a failed worker."""
        self.leave()
        self.failure = replace(failure, nodes=(self.meeting.node_rank,))
        if failure.worker is not None and self._reported is not None:
            self.failure = self._reported

    def leave(self, _: Callable[[], bool] = lambda: False) -> None:
        """Report what has not been reported yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # it may be writing
            self._report()

    def _report(self) -> None:
        summary = self._collection.summary()
        if self._reported is None and summary is not None:
            self._reported, lines = self._explain(summary.first)
            write(summary, self.meeting, lines)
