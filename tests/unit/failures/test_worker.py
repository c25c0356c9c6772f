"""How a worker has failed: its exit code, and its last words from where they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from torchrun_hpc.failures.relay import Relay
from torchrun_hpc.failures.worker import Worker, exit_code_of, failure_of

RAISES = "raise ValueError('bad batch 17')"
CAUSE = "ValueError: bad batch 17"


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setattr("torchrun_hpc.failures.relay.reason_not_to_read", str)
    made = Relay()
    yield made
    made.close(1)


def worker(pid=0, **about):
    return Worker(5, 8, 1, 1, pid, exit_code=lambda: None, **about)


def run(relay, program=RAISES):
    """Run a worker to its end."""
    argv = [sys.executable, "-S", "-c", program]
    child = relay.start(lambda stderr: subprocess.Popen(argv, stderr=stderr))
    child.wait()
    return child.pid


# --- where its last words are read from -----------------------------------------------


def test_what_is_known_of_a_failure(relay):
    before = time.time()
    failure = failure_of(worker(run(relay)), 1, relay)
    assert (failure.rank, failure.size, failure.node) == (5, 8, 1)
    assert (failure.local_rank, failure.code) == (1, 1)
    assert before <= failure.time <= time.time()
    assert failure.cause == CAUSE
    assert failure.lines[-1] == CAUSE
    assert (failure.log, failure.unread) == ("", "")


def test_a_traceback_of_long_ago_is_not_when_it_failed(relay):
    program = (
        "import os, sys, time, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "sys.stderr.flush(); time.sleep(1.5); os.kill(os.getpid(), 9)"
    )
    before = time.time()
    failure = failure_of(worker(run(relay, program)), -9, relay)
    assert failure.time - before > 1.4


def test_a_log_file(relay, tmp_path):
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 10**6 + b"\nKeyError: 1\n")
    failure = failure_of(worker(log=str(log)), 1, relay)
    assert (failure.cause, failure.log) == ("KeyError: 1", str(log))


def test_a_log_file_that_is_gone(relay, tmp_path):
    assert failure_of(worker(log=str(tmp_path / "none")), 1, relay).cause == ""


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
        ("no JSON", CAUSE),
        ("\udcff", CAUSE),
        (None, CAUSE),
    ],
)
def test_what_record_has_written_is_better(relay, tmp_path, text, cause):
    file = tmp_path / "error.json"
    if text is not None:
        file.write_bytes(os.fsencode(text))
    failed = worker(run(relay), error_file=str(file))
    assert failure_of(failed, 1, relay).cause == cause


def test_it_says_why_nothing_is_read(relay):
    relay.unread = "it is a terminal"
    assert failure_of(worker(), 3, relay).unread == "it is a terminal"


def test_one_that_nobody_reads(relay):
    assert failure_of(worker(), 3, relay).unread == "it does not go through the agent"


def test_it_does_not_wait_for_those_who_never_stop_writing(relay):
    program = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
        "'import os, time\\nfor _ in range(2000): os.write(2, bytes(10)); "
        "time.sleep(.001)']); sys.exit(3)"
    )
    failed = worker(run(relay, program))
    start = time.monotonic()
    failure_of(failed, 3, relay)
    assert time.monotonic() - start < 2


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
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(argv) as child:
        assert exit_code_of(child.pid) is None
        child.kill()


def test_a_process_that_is_no_child():
    assert exit_code_of(os.getppid()) is None
