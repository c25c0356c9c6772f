"""A rank does not come to a collective, and is named."""

from __future__ import annotations

import hangs
import pytest


@pytest.mark.release
def test_a_rank_that_sleeps(juelich):
    hangs.run(juelich, ["sleep"])
