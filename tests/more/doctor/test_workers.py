"""The processes that run collective operations, and what becomes of them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from loopback import HERE
from torch_workers import ENVIRON, settings_of
from waiting import NEVER_S, PATIENCE, until

from torchrun_hpc import wire
from torchrun_hpc.doctor import workers
from torchrun_hpc.doctor.results import Collective, Torch, no_torch
from torchrun_hpc.doctor.workers import Workers

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

TORCH = no_torch("") | {"version": "9.9", "import_s": 1.5}
ROW = {"operation": "all_gather", "scope": "", "size": 32768, "count": 8192}
ROW |= {"time_s": 0.5, "algbw": 65536.0, "busbw": 65536.0, "wrong": 0}

BEGIN = f"""\
import json, os, signal, sys, time

def write(message):
    print(json.dumps(message), flush=True)

torch = {TORCH!r}
row = {ROW!r}
"""
READ = 'write(torch)\nsettings = json.loads(input())\nrank = settings["rank"]\n'
DONE = 'write({"done": "gloo"})\n'
ENDS, KILLED = "rank and sys.exit(3)\n", "rank and os.kill(os.getpid(), 9)\n"
SLEEPS = f"time.sleep({NEVER_S})"


@pytest.fixture
def program(monkeypatch):
    """Take another program in the place of a worker."""

    def take(text):
        monkeypatch.setattr(workers, "_PROGRAM", ("-ISc", BEGIN + text))

    return take


def pids_of(started):
    return [worker.process.pid for worker in started._workers]


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_two_workers():
    rows = []
    with Workers(2, ENVIRON) as started:
        found = started.torch(PATIENCE)
        outcome = started.run(settings_of(1, 2, max_bytes=100), PATIENCE, rows.append)
        pids = pids_of(started)
    wire.decode(Torch, found)
    assert found["version"] == torch.__version__
    assert found["import_s"] > 0.1
    assert outcome == ("gloo", "")
    sizes = {"all_gather": [8, 32, 96], "reduce_scatter": [8, 32, 96]}
    expected = [
        (name, size) for name in OPERATIONS for size in sizes.get(name, [8, 32, 100])
    ]
    assert [(row["operation"], row["size"]) for row in rows] == expected
    for row in rows:
        wire.decode(Collective, row)
        assert row["scope"] == ""
        assert row["wrong"] == 0
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("1 / 0", "ended with exit code 1: ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (11)"),
        (f"os.close(1); {SLEEPS}", "was killed by SIGKILL"),
    ],
)
def test_a_process_that_finds_no_torch(program, text, problem):
    program(text)
    with Workers(1, ENVIRON) as started:
        found = started.torch(PATIENCE)
    wire.decode(Torch, found)
    assert found["problem"].startswith(f"the process that imports it {problem}")
    assert not found["version"]


def test_torch_in_time(program, tmp_path):
    may_go_on = tmp_path / "may go on"
    waits = f"while not os.path.exists({str(may_go_on)!r}): time.sleep(.01)\n"
    program(waits + READ + DONE)
    with Workers(2, ENVIRON) as started:
        early = started.torch(0.01)
        assert early["problem"] == "it is not imported within 0.01 s"
        may_go_on.touch()
        assert started.torch(PATIENCE) == TORCH
        assert started.torch(0) == TORCH
        assert started.run(settings_of(1, 2), PATIENCE, print) == ("gloo", "")


@pytest.mark.parametrize(
    ("text", "limit", "problem"),
    [
        (READ + "time.sleep(rank)", PATIENCE, "worker 0 ended with exit code 0"),
        (READ + ENDS + DONE, PATIENCE, "worker 1 ended with exit code 3"),
        # It has ended without the settings.
        ("sys.exit(3)", PATIENCE, "worker [01] ended with exit code 3"),
        (READ + KILLED + SLEEPS, PATIENCE, r"worker 1 was killed by SIGKILL \(9\)"),
        (
            READ + "rank and write(row)\nos.kill(os.getpid(), signal.SIGSTOP)",
            2,
            "no end within 2 s, after all_gather of 32768 B",
        ),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 0.5, "no end within 0.5 s"),
    ],
)
def test_why_there_is_no_end(program, monkeypatch, text, limit, problem):
    program(text)
    rows = []
    if "row" in text:  # the time is over when that has come
        clock = SimpleNamespace(monotonic=lambda: 10.0 * len(rows))
        monkeypatch.setattr(workers, "time", clock)
    with Workers(2, ENVIRON) as started:
        pids = pids_of(started)
        backend, found = started.run(settings_of(1, 2), limit, rows.append)
    assert not any(map(is_running, pids))
    assert backend == ""
    assert re.match(problem, found)


def test_who_waits_in_vain_is_stopped(program):
    """It has failed elsewhere."""
    program(READ + SLEEPS)
    asked = iter([False, True])
    with Workers(1, ENVIRON) as started:
        outcome = started.run(
            settings_of(1, 1), PATIENCE, lambda _: None, lambda: next(asked)
        )
    assert outcome == ("", "")
    assert next(asked, None) is None


def test_the_port_of_the_store_is_kept_free(program):
    program(READ + DONE)
    with Workers(1, ENVIRON, HERE) as started:
        where = HERE, started.port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(where)
        started.run(settings_of(1, 1), PATIENCE, print)
        with socket.socket() as store:
            store.bind(where)


def test_results_come_as_they_are_written(program):
    """Also where a line comes in two pieces, and other programs write some, too.

    What comes behind the end is ignored.
    """
    text = (
        "line = json.dumps(row)\n"
        "print(line[:9], end='', flush=True); time.sleep(.1); print(line[9:])\n"
        "write(row)\n"
    )
    other = "print('from a site hook'); print([1]); print('null')\n"
    program(other + READ + text + DONE + "raise SystemExit(rank)")
    rows = []
    with Workers(2, ENVIRON) as started:
        assert started.run(settings_of(1, 2), PATIENCE, rows.append) == ("gloo", "")
    assert rows == [ROW] * 4


def test_they_have_the_environment_that_is_given(program):
    program('torch["version"] = os.environ["OF_WORKERS"]\n' + READ)
    with Workers(1, {"OF_WORKERS": "yes"}) as started:
        assert started.torch(PATIENCE)["version"] == "yes"


def test_a_program_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    problem = "/nowhere/python cannot be started: No such file or directory"
    with Workers(2, ENVIRON) as started:
        assert started.torch(PATIENCE)["problem"] == problem


def test_no_more_processes(program, monkeypatch):
    program(SLEEPS)
    popen, running = subprocess.Popen, []

    def fail_second(*args, **options):
        if running:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        running.append(popen(*args, **options))
        return running[0]

    monkeypatch.setattr(subprocess, "Popen", fail_second)
    with Workers(2, ENVIRON) as started:
        problem = started.torch(PATIENCE)["problem"]
    assert problem.endswith(" cannot be started: Resource temporarily unavailable")
    assert running[0].returncode == -signal.SIGKILL


PARENT = """\
import os, signal, sys
from torchrun_hpc.doctor.workers import Workers
workers = Workers(2, os.environ)
print(*(worker.process.pid for worker in workers._workers))
sys.stdout.flush()
signal.pause()
"""


def test_they_end_with_the_process_that_has_started_them():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=-1) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(is_running, pids))
        parent.kill()
    until(lambda: not any(map(is_running, pids)))


def test_settings_are_small_enough_for_a_pipe():
    """That nobody reads: Linux has room for 4096 bytes at least."""
    (settings,) = settings_of(1, 1, host="h" * 255, address="a" * 255)
    assert len(json.dumps(settings)) < 4096
