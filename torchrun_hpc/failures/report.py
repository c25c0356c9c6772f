"""Failure reports: one sentence, and one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchrun_hpc import limits
from torchrun_hpc.errors import Message, count
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart, ending, signal_name
from torchrun_hpc.names import nodes, ranges, rank_list
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torchrun_hpc.failures.failure import Summary
    from torchrun_hpc.planning.meeting import Meeting

    # For a hang, returns who did not come, and lines about it. Otherwise, returns the
    # failure itself.
    Explain = Callable[[Failure], tuple[Failure, Sequence[str]]]

_INDENT = "    "


def time_to_collect(failure: Failure) -> float:
    """Return the seconds to wait for failures of other workers."""
    is_doubtful = failure.is_doubtful
    return limits.COLLECT_CAUSE_TIMEOUT if is_doubtful else limits.COLLECT_TIMEOUT


def failed(failure: Failure, meeting: Meeting, note: str = "") -> Message:
    """Return why the job has failed: the last line of the reporting node.

    A ``note`` replaces the cause.
    """
    text = f"the job has failed: {sentence(failure, meeting, note)}"
    return Message("HPC125", text)


def restarted(number: int, failure: Failure, meeting: Meeting) -> Message:
    """Return why all workers are started again."""
    text = f"restart {number} of all workers: {sentence(failure, meeting)}"
    return Message("HPC128", text)


def sentence(failure: Failure, meeting: Meeting, note: str = "") -> str:
    """Return what happened, where, and why, or a ``note`` instead of the cause."""
    ranks, code, cause = failure.nodes, failure.code, failure.text
    where, is_many = nodes(ranks, meeting.hosts) or "another node", len(ranks) > 1
    who = f"the agents on {where}" if is_many else f"the agent on {where}"
    verb, lost = "is", "it was killed, or the node is lost"
    if is_many:
        verb, lost = "are", "they were killed, or the nodes are lost"
    is_shared = meeting.nodes > 1 or meeting.hosts
    worker = f"worker {failure.rank}" + (f" on {where}" if is_shared else "")
    missing = count(len(ranks), "node")
    head = [*ranks, meeting.coordinator][0]
    host = meeting.endpoint if head is None else nodes([head], meeting.hosts)
    end = f"did not answer for {code} s" if code else "is gone"
    ended = ending(code) + (note or (f": {cause}" if cause else ""))
    text = {
        Kind.WORKER: failure.absent or f"{worker} {ended}",
        Kind.SIGNAL: f"{who} received {signal_name(code)}",
        Kind.AGENT: f"{who} gave up: {cause}",
        Kind.LOST: f"{who} {verb} gone without a message: {lost}",
        Kind.EXCLUDED: f"{where} {verb} excluded: {cause}",
        Kind.SILENT: f"{who} did not answer for {code} s",
        Kind.MISSING: f"{missing} did not join within {code} s (join_timeout): {where}",
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
    """Write the report: the first failure, the others, and lines about a hang."""
    first = summary.first
    worker = first.worker or WorkerPart(first.rank)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    log = f", log file {worker.log}" if worker.log else ""
    note = f" (local rank {worker.local_rank}, at {when}{log})"
    message = failed(first, meeting, note)
    console.write(message, "error", [*_details(summary, worker, hang)])


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines as details of a message."""
    return [console.DETAIL + line for line in lines]


def _details(
    summary: Summary, worker: WorkerPart, hang: Iterable[str]
) -> Iterator[str]:
    for line in worker.lines:
        yield _INDENT + line
    if worker.unread:
        where = f"look for its stderr in the output: {worker.unread}"
        yield f"{console.DETAIL}{where}. Pass --tee=3 to show it here"
    if same := summary.same_as_first:
        others = count(len(same), "other rank")
        yield f"{console.DETAIL}the same on {others}: {ranges(same)}"
    for cause, ranks in summary.others:
        yield f"{console.DETAIL}{rank_list(ranks)} of {worker.size}: {cause}"
    if summary.unlisted:
        others = count(summary.unlisted, "other rank")
        yield f"{console.DETAIL}and {others} with other causes"
    yield from indented(hang)
