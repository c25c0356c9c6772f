"""Workers of a new attempt never meet the keys of a dead one."""

from __future__ import annotations

import pytest

from tests.support.cluster.restarts import all_meet


@pytest.mark.release
def test_restarts_with_a_late_rank_0(unpadded):
    all_meet(unpadded, "scheduler", "fork")
