"""Two thousand schedules of a job with spares; see `schedules`."""

from __future__ import annotations

import pytest
from schedules import play

FIRST, LAST, PART = 1000, 3000, 100  # the unit tests play those from 0 to 99


@pytest.mark.parametrize("first", range(FIRST, LAST, PART))
def test_a_job_is_one_world_or_ends_whatever_happens(first):
    for seed in range(first, first + PART):
        play(seed)
