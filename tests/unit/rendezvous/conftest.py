"""A job over loopback, and peers that may send anything to its coordinator."""

from __future__ import annotations

import pytest
from loopback import (
    Job,
    Raw,
)

from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import server as servers


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """Let seconds be shorter."""
    monkeypatch.setattr(servers, "_TICK", 0.02)
    monkeypatch.setattr(clients, "_TICK", 0.02)


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
