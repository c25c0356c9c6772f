"""The failures of a world that torch's own rendezvous serves.

No coordinator collects them. Each node reports its own workers' failures.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Collection
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.report import Explain
    from torchrun_hpc.failures.watch import Attempt
    from torchrun_hpc.planning.meeting import Meeting


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
            console.write(report.restarted(self.restarts, failure, self.meeting))
        elif is_first:
            wait = report.time_to_collect(failure)
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
            report.write(summary, self.meeting, lines)
