"""Sockets that no launch on this machine has, and workers that are no processes."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest

from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Watch
from torchrun_hpc.stacks import service

_NUMBERS = itertools.count()


@pytest.fixture
def watched():
    """Let an agent have some workers."""
    relay = Relay()
    with contextlib.ExitStack() as ending:
        ending.callback(relay.close, 1)

        def watch(workers):
            made = Watch(relay)
            ending.callback(made.end)
            made.begin(workers, 0)
            return made

        yield watch


@pytest.fixture
def own_names(monkeypatch):
    """Keep away from other launches that run on this machine meanwhile."""
    prefix = f"torchrun_hpc.test{os.getpid()}.{next(_NUMBERS)}"
    monkeypatch.setattr(service, "_PREFIX", prefix)
    return prefix
