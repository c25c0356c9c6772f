"""Real processes fail, and the watch finds them by itself."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from tests.support.patience import NEVER_S, PATIENCE, until
from torchrun_hpc import limits
from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Watch
from torchrun_hpc.failures.worker import Worker, exit_code_of


def popen(argv, stderr):
    return subprocess.Popen(argv, stderr=stderr)


@pytest.fixture
def watched(monkeypatch):
    """Watch programs; what has failed is in a list, in the order in which it came."""
    monkeypatch.setattr("torchrun_hpc.failures.relay.reason_not_to_read", str)
    relay = Relay()
    children, failures = [], []
    watch = Watch(relay, on_failure=lambda failure, _: failures.append(failure))

    def start(*programs, unread=""):
        relay.unread = unread
        for program in programs:
            run = partial(popen, [sys.executable, "-S", "-c", program])
            children.append(relay.start(run, is_shown=bool(unread)))
        workers = [
            Worker(rank, 8, 1, rank, child.pid, partial(exit_code_of, child.pid))
            for rank, child in enumerate(children)
        ]
        watch.begin(workers, 0)
        return children, failures

    yield start
    for child in children:
        child.kill()
        child.wait()
    watch.end()
    relay.close(PATIENCE)


def test_it_looks_by_itself(watched):
    _, failures = watched("pass", "raise ValueError('bad batch 17')")
    until(lambda: failures)
    assert [failure.text for failure in failures] == ["ValueError: bad batch 17"]


def test_the_order_of_those_of_which_nothing_is_read(watched, monkeypatch):
    """On a terminal: the end of each is seen at once."""
    monkeypatch.setattr(limits, "WATCH_INTERVAL", NEVER_S)
    sleeps = f"import time; time.sleep({NEVER_S})"
    children, failures = watched(sleeps, sleeps, sleeps, unread="it is a terminal")
    for number, child in enumerate(reversed(children), 1):
        child.kill()
        until(lambda: len(failures) == number)  # noqa: B023 - called at once
    assert [failure.rank for failure in failures] == [2, 1, 0]
