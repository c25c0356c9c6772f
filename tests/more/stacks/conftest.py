"""Processes to look at, and other users."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest

from tests.support import stack_samples as inspected
from tests.support.patience import PATIENCE
from tests.support.processes import RunningProgram

own_names, serve = inspected.own_names, inspected.serve

# It is at line 6 of a function that was called in line 14.
SLEEPS = """\
import threading, time


def wait():
    print("ready", flush=True)
    time.sleep(900)


def other():
    time.sleep(900)


threading.Thread(target=other, daemon=True).start()
wait()
"""


class StartedPrograms(contextlib.ExitStack):
    """Programs that end with the test.

    Attributes:
        all: In the order of their starts.
    """

    def __init__(self, folder):
        super().__init__()
        self._script = folder / "sleeps.py"
        self._script.write_text(SLEEPS)
        self.all = []

    def start(self, *argv):
        """Start a program; return its process number once it has written a line."""
        program = self.enter_context(RunningProgram(argv))
        self.all.append(program)
        program.line()
        return program.pid

    def sleeping(self):
        """Start a Python that sleeps in a function, and another thread in another."""
        return self.start(sys.executable, "-S", self._script)


@pytest.fixture
def processes(tmp_path):
    with StartedPrograms(tmp_path) as started:
        yield started


# --- another user ---------------------------------------------------------------------


@pytest.fixture
def pretender(own_names, beside_nobody):
    """Let a process of another user have a name of this one's, and answer."""
    prefix = f"\0{own_names}/{os.getuid()}/19.0/"

    def pretend(ready, wait):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{prefix}1")
            listening.listen()
            listening.settimeout(PATIENCE)
            ready()
            with contextlib.suppress(OSError):
                listening.accept()[0].sendall(b'{"workers": []}')
            wait()

    with beside_nobody(pretend):
        yield
