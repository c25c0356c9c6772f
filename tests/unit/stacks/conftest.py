"""Sockets that no launch on this machine has, and workers that are no processes."""

from __future__ import annotations

import contextlib

import pytest

from tests.support import stack_samples as inspected
from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Watch

own_names, serve = inspected.own_names, inspected.serve


@pytest.fixture
def watched():
    """Let an agent have some workers."""
    relay = Relay()
    with contextlib.ExitStack() as ending:
        ending.callback(relay.close, 1)

        def watch(workers, **called):
            made = Watch(relay, **called)
            ending.callback(made.end)
            made.begin(workers, 0)
            return made

        yield watch
