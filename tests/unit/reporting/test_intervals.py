from __future__ import annotations

import itertools

import pytest

from torchrun_hpc.reporting import intervals


@pytest.mark.parametrize(
    ("is_reporter", "seconds"), [(True, [10, 40, 70]), (False, [60, 90, 120])]
)
def test_when_a_wait_is_reported(is_reporter, seconds):
    times = intervals.report_times(is_reporter=is_reporter)
    assert list(itertools.islice(times, 3)) == seconds
    due = [
        second
        for second in range(seconds[-1] + 1)
        if intervals.is_report_due(second, is_reporter=is_reporter)
    ]
    assert due == seconds


@pytest.mark.parametrize(
    ("waited", "shortest", "longest"),
    [(0, 0.025, 0.05), (5, 0.25, 0.5), (10, 0.5, 1), (900, 0.5, 1)],
)
def test_the_pause_before_the_next_attempt(waited, shortest, longest):
    pauses = [intervals.backoff(waited) for _ in range(100)]
    assert shortest <= min(pauses) < max(pauses) <= longest
