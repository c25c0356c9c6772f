"""Workers that are no processes: a test writes to their stderr, and ends them."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.support.patience import PATIENCE
from torchrun_hpc.failures.relay import Relay


class Child:
    """What starts with an open file for its stderr.

    Attributes:
        pid: A number that no process has.
        code: Its exit code; None while it runs.
    """

    _numbers = itertools.count(2**30)  # more than the kernel gives: proc(5), pid_max

    def __init__(self, stderr):
        self.pid = next(self._numbers)
        self.code = None
        self._stderr = stderr and os.dup(stderr.fileno())

    def write(self, text):
        os.write(self._stderr, text.encode())

    def end(self, code, text=""):
        """End as a process does that has written this."""
        if text:
            self.write(text + "\n")
        if self.code is None:
            self.code = code
            if self._stderr is not None:
                os.close(self._stderr)


class Children:
    """The children of a relay, and a clock.

    Attributes:
        arrived: What is passed on.
        now: What the clock shows.
        relay: Reads what they write.
    """

    def __init__(self):
        self.arrived = bytearray()
        self.now = 1000.0
        self.relay = Relay(lambda: self.now)
        self.started = []

    def start(self, **options):
        child = self.relay.start(Child, **options)
        self.started.append(child)
        return child

    def end_of(self, child):
        """Return what one has written, all of which is read now."""
        return self.relay.end_of(child.pid)[0].decode("latin-1")

    def end(self):
        for child in self.started:
            child.end(0)
        self.relay.close(PATIENCE)


@pytest.fixture
def unread(children):
    """Let nothing be read."""
    children.relay.unread = "it is a terminal"
    return children


@pytest.fixture
def children(monkeypatch):
    monkeypatch.setattr("torchrun_hpc.failures.relay.reason_not_to_read", str)
    made = Children()
    monkeypatch.setattr("torchrun_hpc.reporting.streams.copy", made.arrived.extend)
    yield made
    made.end()
