"""When a wait is reported, and how often a client tries to connect. In seconds."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A wait is reported for the first time, and then again and again.
FIRST_REPORT = 10
NEXT_REPORT = 30
FIRST_REPORT_OF_OTHERS = 60  # by a node that does not report for all

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


def _first_report(*, is_reporter: bool) -> float:
    return FIRST_REPORT if is_reporter else FIRST_REPORT_OF_OTHERS


def report_times(*, is_reporter: bool = True) -> Iterator[float]:
    """Yield after how many seconds a wait is reported."""
    return itertools.count(_first_report(is_reporter=is_reporter), NEXT_REPORT)


def is_report_due(waited: int, *, is_reporter: bool = True) -> bool:
    """Say whether a wait is reported in this second of it."""
    since_first = waited - _first_report(is_reporter=is_reporter)
    return since_first >= 0 and since_first % NEXT_REPORT == 0


def backoff(waited: float) -> float:
    """Return how long to pause before the next attempt to connect.

    Short at first, when all nodes start together, and spread among the nodes.
    """
    pause = min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE)
    return pause * random.uniform(0.5, 1)  # noqa: S311 - no secret
