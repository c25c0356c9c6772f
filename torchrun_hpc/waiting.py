"""Waits in steps, their reports, and pauses between attempts. All times are seconds."""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING

from torchrun_hpc import limits

if TYPE_CHECKING:
    from collections.abc import Callable


def until(
    condition: Callable[[], object],
    limit: float = math.inf,
    report: Callable[[float], None] | None = None,
    *,
    is_reporter: bool = True,
    pause: float | None = limits.WAIT_PAUSE,
) -> bool:
    """Wait in steps, so that signals are handled; return whether the condition held.

    Args:
        condition: Returns whether the wait is over.
        limit: Seconds after which the wait ends.
        report: Takes the seconds so far, and reports the wait.
        is_reporter: Whether this node reports for all.
        pause: Seconds between two checks: 0 if the condition itself waits, ``None`` for
            `backoff`.
    """
    start = time.monotonic()
    times = itertools.count(_first_report(is_reporter=is_reporter), limits.NEXT_REPORT)
    due = next(times)
    while not condition():
        waited = time.monotonic() - start
        if waited > limit:
            return False
        if report is not None and waited > due:
            report(due)
            due = next(times)
        time.sleep(backoff(waited) if pause is None else pause)
    return True


def is_report_due(waited: int, *, is_reporter: bool = True) -> bool:
    """Return whether a report is due after this many seconds."""
    since_first = waited - _first_report(is_reporter=is_reporter)
    return since_first >= 0 and since_first % limits.NEXT_REPORT == 0


def _first_report(*, is_reporter: bool) -> float:
    return limits.FIRST_REPORT if is_reporter else limits.FIRST_REPORT_OF_OTHERS


def backoff(waited: float) -> float:
    """Return the pause before the next attempt to connect.

    ``waited`` is the wait so far. The pause is short at first, when all nodes start
    together. It is random, to spread the nodes.
    """
    import random  # noqa: PLC0415 - with many modules, and often not needed

    pause = min(max(waited / 10, limits.SHORTEST_BACKOFF), limits.LONGEST_BACKOFF)
    return pause * random.uniform(0.5, 1)  # noqa: S311 - no secret
