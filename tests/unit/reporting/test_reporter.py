from __future__ import annotations

import pytest

from torchrun_hpc.reporting.console import is_reporter, reports_wait_for


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
