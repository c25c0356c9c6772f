"""A job over loopback, and peers that may send anything to its coordinator."""

from __future__ import annotations

import pytest

from tests.support.loopback import LoopbackJob, Raw


@pytest.fixture
def job():
    made = LoopbackJob()
    yield made
    made.close()


@pytest.fixture
def raw(job):
    """Connect peers that may send anything to the coordinator."""
    made = []

    def connect():
        made.append(Raw(job.port))
        return made[-1]

    yield connect
    for each in made:
        each.close()
