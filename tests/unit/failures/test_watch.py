"""Real processes fail, and the watch says which was the first, and why."""

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
from torchrun_hpc.failures.watch import Attempt, Watch, Worker, exit_code_of

RAISES = "raise ValueError('bad batch 17')"
FOLLOWS = "raise RuntimeError('Connection closed by peer')"
SLEEPS = "import time; time.sleep(60)"
LEFT = 2  # restarts


class Watched:
    """Workers of node 1, and what the watch has found out about them."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(watches, "_INTERVAL", 60)  # the tests look themselves
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

    def start(self, *programs, **about):
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
                **about,
            )
            for local, child in enumerate(self.children)
        ]
        self.watch.begin(workers, LEFT)

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


def test_what_is_known_of_a_failure(watched):
    watched.start("pass", RAISES)
    before = time.time()
    watched.wait_for_all()
    watched.watch.check()
    watched.watch.check()
    (failure,) = watched.failures
    assert (failure.rank, failure.size, failure.node) == (5, 8, 1)
    assert (failure.local_rank, failure.code) == (1, 1)
    assert before - 1 < failure.time < time.time()
    assert failure.cause == "ValueError: bad batch 17"
    assert failure.lines[-1] == failure.cause
    assert (failure.log, failure.unread) == ("", "")
    assert watched.attempts == [Attempt(1, LEFT)]


def test_a_traceback_of_long_ago_is_not_when_it_failed(watched):
    program = (
        "import os, sys, time, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "sys.stderr.flush(); time.sleep(1.5); os.kill(os.getpid(), 9)"
    )
    before = time.time()
    watched.start(program)
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].time - before > 1.4


def test_it_looks_by_itself(monkeypatch):
    found = Watched(monkeypatch)
    monkeypatch.setattr(watches, "_INTERVAL", 0.01)
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


# --- where it is read from ------------------------------------------------------------


def test_a_log_file(watched, tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 10**6 + b"\nKeyError: 1\n")
    watched.start("import sys; sys.exit(1)", log=str(log))
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].cause == "KeyError: 1"
    assert watched.failures[0].log == str(log)


def test_a_log_file_that_is_gone(watched, tmp_path):
    watched.start("import sys; sys.exit(1)", log=str(tmp_path / "none"))
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].cause == ""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            (
                '{"message": {"extraInfo": {"py_callstack": '
                '"Traceback (most recent call last):\\n  File\\nKeyError: 1"}}}'
            ),
            "KeyError: 1",
        ),
        ("no JSON", "ValueError: bad batch 17"),
        ("\udcff", "ValueError: bad batch 17"),
        (None, "ValueError: bad batch 17"),
    ],
)
def test_what_record_has_written_is_better(watched, tmp_path, text, cause):
    file = tmp_path / "error.json"
    if text is not None:
        file.write_bytes(os.fsencode(text))
    watched.start(RAISES, error_file=str(file))
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].cause == cause


def test_it_says_why_nothing_is_read(watched):
    watched.relay.unread = "it is a terminal"
    watched.start("import sys; sys.exit(1)")
    watched.wait_for_all()
    watched.watch.check()
    assert watched.failures[0].unread == "it is a terminal"


def test_it_does_not_wait_for_those_who_never_stop_writing(watched):
    program = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
        "'import os, time\\nfor _ in range(2000): os.write(2, bytes(10)); "
        "time.sleep(.001)']); sys.exit(3)"
    )
    watched.start(program)
    watched.wait_for_all()
    start = time.monotonic()
    watched.watch.check()
    assert time.monotonic() - start < 2
    assert watched.failures[0].code == 3


# --- exit codes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_exit_code_of_a_child(program, code):
    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert exit_code_of(child.pid) == exit_code_of(child.pid) == code
    assert child.wait() == code  # it was left to be collected
    assert exit_code_of(child.pid) is None


def test_a_child_that_still_runs():
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEPS]) as child:
        assert exit_code_of(child.pid) is None
        child.kill()


def test_a_process_that_is_no_child():
    assert exit_code_of(os.getppid()) is None


def test_those_that_end_while_all_are_stopped_are_looked_at_once_more(watched):
    watched.start(RAISES, FOLLOWS)
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
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
    end = time.monotonic() + 20
    while b"bad batch" not in watched.relay.end_of(watched.children[0].pid)[0]:
        assert time.monotonic() < end
        time.sleep(0.01)
    watched.watch.stop(look=True)
    for child in watched.children:
        child.terminate()
    watched.wait_for_all()
    watched.watch.stopped()
    (failure,) = watched.failures
    assert (failure.rank, failure.cause) == (4, "ValueError: bad batch 17")


def test_which_workers_there_are(watched):
    watched.start("pass", SLEEPS)
    os.waitid(os.P_PID, watched.children[0].pid, os.WEXITED | os.WNOWAIT)
    watched.watch.check()
    found = [(worker.rank, runs) for worker, runs in watched.watch.workers]
    assert found == [(4, False), (5, True)]
