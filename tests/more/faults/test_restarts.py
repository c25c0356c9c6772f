"""As the core's restarts, with torch's rendezvous, and workers started by exec."""

from __future__ import annotations

import pytest

from tests.support.cluster.restarts import all_meet


@pytest.mark.release
def test_restarts_with_a_late_rank_0(unpadded):
    all_meet(unpadded, "c10d", "exec", nodes=2)
