"""As the core's restarts, with torch's rendezvous, and workers started by exec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from restarts import all_meet

if TYPE_CHECKING:
    from testbed import Cluster


@pytest.mark.release
def test_restarts_with_a_late_rank_0(unpadded: Cluster) -> None:
    all_meet(unpadded, "c10d", "exec")
