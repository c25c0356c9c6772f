"""A job over loopback, and peers that may send anything to its coordinator."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from tests.support.loopback import LoopbackJob, Raw


@pytest.fixture
def job():
    with closing(LoopbackJob()) as job:
        yield job


@pytest.fixture
def raw(job):
    """Connect peers that may send anything to the coordinator."""
    with ExitStack() as peers:
        yield lambda: peers.enter_context(closing(Raw(job.port)))
