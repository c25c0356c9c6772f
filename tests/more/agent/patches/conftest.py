"""Fixtures of the tests of changes inside torch."""

from __future__ import annotations

import time

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.support.stock.compared import launcher, outside_of_jobs  # noqa: F401
from tests.support.stock.inside_torch import PLACES
from torchrun_hpc import limits
from torchrun_hpc.agent import patches


@pytest.fixture
def torch_again(monkeypatch):
    """Put torch back behind the test."""
    patches.restore()
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    patches.restore()


@pytest.fixture
def quick(monkeypatch):
    """Let agents look at the state more often than once a second."""
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: time.sleep(0.1))  # noqa: ARG005
    holder = dynamic_rendezvous._BackendRendezvousStateHolder
    original = holder.__init__
    monkeypatch.setattr(
        holder, "__init__", lambda self, b, s: original(self, b, s, cache_duration=0)
    )


SOON = 0.3


@pytest.fixture
def soon(monkeypatch):
    """Report a wait within the patience of a test."""
    monkeypatch.setattr(limits, "FIRST_REPORT", SOON)
    monkeypatch.setattr(limits, "NEXT_REPORT", 60.0)
