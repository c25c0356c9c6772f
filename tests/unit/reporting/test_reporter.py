from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.reporting.reporter import (
    is_reporter,
    reports_failure,
    reports_wait_for,
    told_to_report,
)


@pytest.mark.parametrize(
    ("absent", "reporter"), [((), 0), ((2,), 0), ((0,), 1), ((0, 1, 3), 2)]
)
def test_the_first_that_can_see_it_reports(absent, reporter):
    ranks = [rank for rank in range(5) if is_reporter(rank, absent)]
    assert ranks == [reporter]


@pytest.mark.parametrize(
    ("node", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
def test_a_node_does_not_report_that_it_waits_for_itself(node, reporters):
    assert [rank for rank in range(4) if reports_wait_for(rank, node)] == reporters


@pytest.mark.parametrize(
    ("unaware", "reporter"),
    [((), 0), ((1,), 0), ((2, 9), 0), ((0,), 1), ((0, 1), 2), ((-1, 0, 1, 2), 0)],
)
def test_a_failure_is_reported_by_the_first_node_that_has_noticed_it(unaware, reporter):
    assert [rank for rank in range(3) if reports_failure(rank, 3, unaware)] == [
        reporter
    ]


@given(st.sets(st.integers(-1, 5)))
def test_one_node_reports_any_failure(unaware):
    assert [reports_failure(rank, 3, unaware) for rank in range(3)].count(True) == 1


def test_with_spares_the_coordinator_itself_reports():
    assert told_to_report(2, has_spares=False) == 0
    assert told_to_report(2, has_spares=True) == 2
