from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrun_hpc import waiting


@pytest.fixture
def clock(monkeypatch):
    """Let time pass only while somebody sleeps; return the pauses."""
    passed: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append)
    monkeypatch.setattr(waiting, "time", clock)
    return passed


def test_a_wait_ends(clock):
    assert waiting.until(lambda: len(clock) == 3, pause=1)
    assert clock == [1, 1, 1]
    assert not waiting.until(lambda: False, 5, pause=2)
    assert clock[3:] == [2, 2, 2]  # so the limit is over
    assert waiting.until(lambda: True, 0)


def test_a_wait_with_growing_pauses(clock):
    assert not waiting.until(lambda: False, 100, pause=None)
    assert clock[0] <= 0.05
    assert clock[-1] >= 0.5


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("is_reporter", "seconds"), [(True, [10, 40, 70]), (False, [60, 90, 120])]
)
def test_when_a_wait_is_reported(is_reporter, seconds):
    reported: list[float] = []
    waits = {"limit": 125, "is_reporter": is_reporter, "pause": 0.5}
    assert not waiting.until(lambda: False, report=reported.append, **waits)
    assert reported[:3] == seconds
    due = [
        second
        for second in range(seconds[-1] + 1)
        if waiting.is_report_due(second, is_reporter=is_reporter)
    ]
    assert due == seconds


@pytest.mark.parametrize(
    ("waited", "shortest", "longest"),
    [(0, 0.025, 0.05), (5, 0.25, 0.5), (10, 0.5, 1), (900, 0.5, 1)],
)
def test_the_pause_before_the_next_attempt(waited, shortest, longest):
    pauses = [waiting.backoff(waited) for _ in range(100)]
    assert shortest <= min(pauses) < max(pauses) <= longest
