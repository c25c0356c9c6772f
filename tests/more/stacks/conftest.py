"""Processes to look at, and other users."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from tests.support import stack_samples as inspected
from tests.support.patience import PATIENCE

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


class Processes:
    """Processes that end with the test."""

    def __init__(self, folder):
        self._folder = folder
        self._started = []

    def start(self, *argv):
        """Start a program; return its process number once it has written a line."""
        started = subprocess.Popen(argv, stdout=subprocess.PIPE)
        self._started.append(started)
        assert started.stdout.readline()
        return started.pid

    def sleeping(self):
        """Start a Python that sleeps in a function, and another thread in another."""
        script = self._folder / "sleeps.py"
        script.write_text(SLEEPS)
        return self.start(sys.executable, "-S", str(script))

    def end(self):
        for each in self._started:
            each.kill()
        for each in self._started:
            each.stdout.close()
            each.wait()


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    made.end()


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
