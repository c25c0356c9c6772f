"""Real processes fail, and the watch says which was the first."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from torchrun_hpc.failures import watch as watches
from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.watch import Attempt, Watch
from torchrun_hpc.failures.worker import Worker, exit_code_of

RAISES = "raise ValueError('bad batch 17')"
FOLLOWS = "raise RuntimeError('Connection closed by peer')"
SLEEPS = "import time; time.sleep(60)"
LEFT = 2  # restarts


class Watched:
    """Workers of node 1, and what the watch has found out about them."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(watches, "_PAUSE", 60)  # the tests look themselves
        monkeypatch.setattr("torchrun_hpc.failures.relay.reason_not_to_read", str)
        self.relay = Relay()
        self.failures = []
        self.attempts = []
        self.watch = Watch(self.relay)
        self.watch.on_failure = self._add
        self.children = []

    def _add(self, failure, attempt):
        self.failures.append(failure)
        self.attempts.append(attempt)

    def start(self, *programs, after=0):
        self.children = [
            self.relay.start(
                lambda stderr, program=program: subprocess.Popen(
                    [sys.executable, "-c", program], stderr=stderr
                )
            )
            for program in programs
        ]
        workers = [
            Worker(
                rank=4 + local,
                size=8,
                node=1,
                local_rank=local,
                pid=child.pid,
                exit_code=functools.partial(exit_code_of, child.pid),
            )
            for local, child in enumerate(self.children)
        ]
        time.sleep(after)
        self.watch.begin(workers, LEFT)

    def wait_for_text(self, number, text):
        """Wait until one of them has written something."""
        end = time.monotonic() + 20
        while text not in self.relay.end_of(self.children[number].pid)[0]:
            assert time.monotonic() < end
            time.sleep(0.01)

    def wait_for_all(self):
        """Wait for the end of all, which nobody collects."""
        for child in self.children:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    def end(self):
        for child in self.children:
            child.kill()
            child.wait()
        self.watch.end()
        self.relay.close(1)


@pytest.fixture
def watched(monkeypatch):
    found = Watched(monkeypatch)
    yield found
    found.end()


def ranks(watched):
    return [failure.rank for failure in watched.failures]


def test_a_failure_is_found_once(watched):
    watched.start("pass", RAISES)
    watched.wait_for_all()
    watched.watch.check()
    watched.watch.check()
    (failure,) = watched.failures
    assert (failure.rank, failure.cause) == (5, "ValueError: bad batch 17")
    assert watched.attempts == [Attempt(1, LEFT)]


def test_it_looks_by_itself(monkeypatch):
    found = Watched(monkeypatch)
    monkeypatch.setattr(watches, "_PAUSE", 0.01)
    try:
        found.start(RAISES)
        end = time.monotonic() + 20
        while not found.failures:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        found.end()


def test_the_first_one_is_the_one_from_which_others_follow(watched):
    watched.start(FOLLOWS, "import time; time.sleep(0.3);" + RAISES, FOLLOWS)
    watched.wait_for_all()
    watched.watch.check()
    assert ranks(watched)[0] == 5
    assert sorted(ranks(watched)) == [4, 5, 6]


def test_the_first_one_is_the_one_that_said_so_first(watched):
    """Whichever took longer to end."""
    slow = f"import atexit, time; atexit.register(time.sleep, 0.5); {RAISES}"
    watched.start("import time; time.sleep(0.2); " + RAISES, slow)
    watched.wait_for_all()
    watched.watch.check()
    assert ranks(watched) == [5, 4]


def test_those_that_are_stopped_have_not_failed(watched):
    watched.start(SLEEPS, RAISES, SLEEPS)
    os.waitid(os.P_PID, watched.children[1].pid, os.WEXITED | os.WNOWAIT)
    watched.children[0].terminate()
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.watch.check()
    watched.children[2].terminate()
    watched.wait_for_all()
    watched.watch.check()
    assert ranks(watched) == [5]


HANDLES = (
    "import os, signal, sys, time; signal.signal(15, lambda *_: {end});"
    "print('ready', file=sys.stderr, flush=True); time.sleep(60)"
)


@pytest.mark.parametrize(
    "end",
    ["sys.exit(143)", "sys.exit(1)", "1 / 0", "sys.exit('step 17')", "os.abort()"],
)
def test_whatever_one_does_that_is_stopped(watched, end):
    """DataLoader, for one, raises that its worker was terminated."""
    watched.start(RAISES, HANDLES.format(end=end))
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.wait_for_text(1, b"ready")
    watched.watch.before_torch_looks()
    watched.children[1].terminate()
    watched.wait_for_all()
    watched.watch.stop(look=True)
    watched.watch.stopped()
    assert ranks(watched) == [4]


def test_what_fails_after_torch_has_looked(watched):
    watched.start("import time; time.sleep(1);" + RAISES, SLEEPS)
    watched.watch.before_torch_looks()
    watched.watch.none_was_stopped()
    watched.children[1].kill()
    watched.wait_for_all()
    watched.watch.check()
    assert sorted(ranks(watched)) == [4, 5]


def test_the_order_of_those_of_which_nothing_is_read(monkeypatch):
    """On a terminal, a few milliseconds apart."""
    found = Watched(monkeypatch)
    monkeypatch.setattr(watches, "_PAUSE", 0.001)
    monkeypatch.setattr(watches, "_INTERVAL", 60)
    found.relay.unread = "it is a terminal"
    try:
        found.start(SLEEPS, SLEEPS, SLEEPS)
        for child in reversed(found.children):
            time.sleep(0.05)
            child.kill()
        end = time.monotonic() + 20
        while len(found.failures) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert ranks(found) == [6, 5, 4]
    finally:
        found.end()


def test_one_that_is_terminated_by_others_has_failed(watched):
    watched.start(SLEEPS, SLEEPS)
    watched.children[1].terminate()
    os.waitid(os.P_PID, watched.children[1].pid, os.WEXITED | os.WNOWAIT)
    watched.watch.check()
    assert [(f.rank, f.code) for f in watched.failures] == [(5, -signal.SIGTERM)]


def test_the_end_of_workers_in_a_restart_is_no_failure(watched):
    watched.start(SLEEPS, RAISES.replace("raise", "import time; time.sleep(1); raise"))
    watched.watch.stop(look=True)
    watched.children[0].terminate()
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures == []


def test_a_last_look(watched):
    watched.start(RAISES, FOLLOWS)
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.wait_for_text(1, b"by peer\n")
    watched.watch.stop(look=True)
    watched.wait_for_all()
    watched.watch.check()  # what has failed with it, is looked at
    assert ranks(watched) == [4, 5]


def test_no_last_look(watched):
    """A signal ends all of them."""
    watched.start(RAISES)
    watched.wait_for_all()
    watched.watch.stop(look=False)
    watched.watch.check()
    assert watched.failures == []


def test_one_that_fails_before_all_are_started(watched):
    watched.start(RAISES, after=1)
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].cause == "ValueError: bad batch 17"


def test_the_next_workers(watched):
    watched.start(RAISES)
    watched.wait_for_all()
    watched.watch.check()
    watched.children[0].wait()
    watched.start("import sys; sys.exit(3)")
    watched.wait_for_all()
    watched.watch.check()
    assert [failure.code for failure in watched.failures] == [1, 3]
    assert watched.failures[1].cause == ""


def test_those_that_end_while_all_are_stopped_are_looked_at_once_more(watched):
    watched.start(RAISES, FOLLOWS)
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.wait_for_text(1, b"by peer\n")
    watched.watch.stop(look=True)
    watched.wait_for_all()
    watched.watch.stopped()
    assert sorted(ranks(watched)) == [4, 5]
    watched.watch.check()
    assert len(watched.failures) == 2


def test_equal_failures_of_a_node_have_their_lines_once(watched):
    watched.start(RAISES, RAISES, "raise KeyError(1)")
    watched.wait_for_all()
    watched.watch.check()
    assert sorted(bool(failure.lines) for failure in watched.failures) == [0, 1, 1]


SLOW_TO_END = (
    "import atexit, sys, time\n"
    "atexit.register(time.sleep, 60)\n"
    "raise ValueError('bad batch 17')"
)


def test_one_that_is_about_to_end_is_not_forgotten(watched):
    """Its peers may have failed of it, and ended, before."""
    watched.start(SLOW_TO_END, SLEEPS)
    watched.wait_for_text(0, b"bad batch 17\n")
    watched.watch.stop(look=True)
    for child in watched.children:
        child.terminate()
    watched.wait_for_all()
    watched.watch.stopped()
    (failure,) = watched.failures
    assert (failure.rank, failure.cause) == (4, "ValueError: bad batch 17")
    assert failure.code == 1  # whatever shortened its end


def test_one_that_was_terminated_by_others_after_its_traceback(watched):
    """Whoever sent the signal: it is not the agent."""
    watched.start(SLOW_TO_END, SLEEPS)
    watched.wait_for_text(0, b"bad batch 17\n")
    watched.children[0].terminate()
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.watch.check()
    assert [failure.code for failure in watched.failures] == [-signal.SIGTERM]


def test_which_workers_there_are(watched):
    watched.start("pass", SLEEPS)
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.watch.check()
    found = [(worker.rank, runs) for worker, runs in watched.watch.workers]
    assert found == [(4, False), (5, True)]
