"""Signals at random moments; benchmarks/signals.py sends many more."""

from __future__ import annotations

import pytest

from tests.support.cluster.moments import moments, strike, wrong


@pytest.mark.parametrize(("nodes", "count"), [(1, 26), (3, 14)])
def test_signals_at_random_moments(request, nodes, count):
    cluster = request.getfixturevalue("unpadded") if nodes > 1 else None
    for moment in moments(seed=count, count=count, nodes=(nodes,)):
        end = strike(moment, cluster)
        assert not wrong(moment, end), (moment, end)
