"""The processes that run collective operations, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch
from loopback import LIMIT, wait_until
from torch_workers import ENVIRON, settings_of

from torchrun_hpc.doctor import workers
from torchrun_hpc.doctor.results import Collective, Torch
from torchrun_hpc.doctor.workers import Workers
from torchrun_hpc.reporting.description import check_form

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

TORCH = {"version": "9.9", "import_s": 1.5, "problem": "", "libraries": {}, "gpus": 0}
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


@pytest.fixture
def program(monkeypatch):
    """Take another program in the place of a worker."""

    def take(text):
        monkeypatch.setattr(workers, "_PROGRAM", ("-ISc", BEGIN + text))

    return take


def pids_of(started):
    return [worker._process.pid for worker in started._workers]


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_three_workers():
    rows = []
    with Workers(3, ENVIRON) as started:
        found = started.torch(60)
        outcome = started.run(settings_of(1, 3, max_bytes=100), 60, rows.append)
        pids = pids_of(started)
    check_form(found, Torch)
    assert found["version"] == torch.__version__
    assert outcome == ("gloo", "")
    sizes = {"all_gather": [12, 24, 96], "reduce_scatter": [12, 24, 96]}
    expected = [
        (name, size) for name in OPERATIONS for size in sizes.get(name, [8, 32, 100])
    ]
    assert [(row["operation"], row["size"]) for row in rows] == expected
    for row in rows:
        check_form(row, Collective)
        assert row["scope"] == ""
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["size"] / row["time_s"])
    assert rows[0]["busbw"] == pytest.approx(rows[0]["algbw"] * 4 / 3)
    assert not any(map(is_running, pids))


def test_a_worker_that_is_killed_between_others():
    """They fail, too, and have more to say of it."""
    with Workers(2, ENVIRON) as started:
        pids = pids_of(started)

        def kill(_):
            with suppress(ProcessLookupError):
                os.kill(pids[1], signal.SIGKILL)

        settings = settings_of(1, 2, max_bytes=2**24)
        backend, problem = started.run(settings, 60, kill)
    assert backend == ""
    assert problem.startswith("worker 1 was killed by SIGKILL (9)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("write(torch | {'gpus': '4'})", "has written what is no result: {"),
        ("write({})", "has written what is no result: {}"),
        ("write(5)", "has written what is no result: 5"),
        ("print('Hello\\x1b[0m')", "has written what is no result: Hello [0m"),
        ("print('[' * 10**5)", "has written what is no result: [["),
        ("1 / 0", "ended with exit code 1: ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (11)"),
        ("os.close(1); time.sleep(60)", "was killed by SIGKILL"),
    ],
)
def test_a_process_that_finds_no_torch(program, text, problem):
    program(text)
    with Workers(1, ENVIRON) as started:
        found = started.torch(LIMIT)
    check_form(found, Torch)
    assert found["problem"].startswith(f"the process that imports it {problem}")
    assert not found["version"]


def test_a_torch_that_cannot_be_imported(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("import that_is_not_there")
    with Workers(1, {**ENVIRON, "PYTHONPATH": str(tmp_path)}) as started:
        found = started.torch(LIMIT)
        outcome = started.run(settings_of(1, 1), LIMIT, print)
    text = "ModuleNotFoundError: No module named 'that_is_not_there'"
    assert found["problem"] == text
    assert outcome == ("", f"worker 0 ended with exit code 1: {text}")


def test_a_failure_from_before_the_settings(program):
    """The other one is not waited for."""
    program("sys.exit(3)")
    with Workers(1, ENVIRON) as started:
        started.torch(LIMIT)
        program("time.sleep(60)")
        started._workers.append(workers._Worker(1, ENVIRON))
        start = time.monotonic()
        outcome = started.run(settings_of(1, 2), 60, print)
    assert outcome == ("", "worker 0 ended with exit code 3")
    assert time.monotonic() - start < LIMIT


def test_torch_in_time(program):
    program("time.sleep(.2)\n" + READ + DONE)
    with Workers(2, ENVIRON) as started:
        early = started.torch(0.01)
        assert early["problem"] == "it is not imported within 0.01 s"
        assert started.torch(LIMIT) == TORCH
        assert started.torch(0) == TORCH
        assert started.run(settings_of(1, 2), LIMIT, print) == ("gloo", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (READ + "sys.exit(rank)", "worker 0 ended with exit code 0"),
        (READ + "rank and sys.exit(3)\n" + DONE, "worker 1 ended with exit code 3"),
        (
            READ + "time.sleep(.1 * rank)\n"
            "raise RuntimeError('no GPU' if rank else 'Connection closed by peer')",
            "worker 1 ended with exit code 1: RuntimeError: no GPU",
        ),
        (READ + "write({'done': 5})", "worker 0 has written what is no result: {"),
        (READ + "write(row | {'size': 0.5})", "worker 0 has written what is no r"),
        (READ + "write('done')", 'worker 0 has written what is no result: "done"'),
        (READ + "write(row)\ntime.sleep(60)", "no end within 1 s, after all_gather"),
        (
            READ + "rank and write(row)\nos.kill(os.getpid(), signal.SIGSTOP)",
            "no end within 1 s, after all_gather of 32 KiB",
        ),
        (READ + "time.sleep(60)", "no end within 1 s"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "no end within 1 s: torch is not imported by worker 0, 1",
        ),
    ],
)
def test_why_there_is_no_end(program, text, problem):
    program(text)
    start = time.monotonic()
    with Workers(2, ENVIRON) as started:
        pids = pids_of(started)
        backend, found = started.run(settings_of(1, 2), 1, lambda _: None)
    assert not any(map(is_running, pids))
    assert backend == ""
    assert found.startswith(problem)
    assert time.monotonic() - start < LIMIT


def test_results_come_as_they_are_written(program):
    """Also where a line comes in two pieces; what comes behind the end is ignored."""
    text = (
        "line = json.dumps(row)\n"
        "print(line[:9], end='', flush=True); time.sleep(.1); print(line[9:])\n"
        "write(row)\n"
    )
    program(READ + text + DONE + "raise SystemExit(rank)")
    rows = []
    with Workers(2, ENVIRON) as started:
        assert started.run(settings_of(1, 2), LIMIT, rows.append) == ("gloo", "")
    assert rows == [ROW] * 4


def test_each_gets_its_settings(program, tmp_path):
    program(READ + "open(settings['host'], 'w').write(str(rank))\n" + DONE)
    settings = settings_of(1, 3)
    for own in settings:
        own["host"] = str(tmp_path / str(own["rank"]))
    with Workers(3, ENVIRON) as started:
        assert started.run(settings, LIMIT, print) == ("gloo", "")
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_they_have_the_environment_that_is_given(program):
    program('torch["version"] = os.environ["OF_WORKERS"]\n' + READ)
    with Workers(1, {"OF_WORKERS": "yes"}) as started:
        assert started.torch(LIMIT)["version"] == "yes"


def test_a_program_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    problem = "/nowhere/python cannot be started: No such file or directory"
    with Workers(2, ENVIRON) as started:
        assert started.torch(LIMIT)["problem"] == problem
        assert started.run(settings_of(1, 2), LIMIT, print) == ("", problem)


def test_no_more_processes(program, monkeypatch):
    program("time.sleep(60)")
    popen, running = subprocess.Popen, []

    def fail_second(*args, **options):
        if running:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        running.append(popen(*args, **options))
        return running[0]

    monkeypatch.setattr(subprocess, "Popen", fail_second)
    with Workers(2, ENVIRON) as started:
        problem = started.torch(LIMIT)["problem"]
    assert problem.endswith(" cannot be started: Resource temporarily unavailable")
    assert running[0].returncode == -signal.SIGKILL


PARENT = """\
import os, signal, sys
from torchrun_hpc.doctor.workers import Workers
workers = Workers(2, os.environ)
print(*(worker._process.pid for worker in workers._workers))
sys.stdout.flush()
signal.pause()
"""


def test_they_end_with_the_process_that_has_started_them():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=-1) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(is_running, pids))
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (8, "8 B"),
        (1000, "1000 B"),
        (2048, "2 KiB"),
        (32760, "31.99 KiB"),
        (2**27, "128 MiB"),
        (2**31, "2 GiB"),
        (2**43, "8192 GiB"),
    ],
)
def test_amounts(size, text):
    assert workers._amount(size) == text


def test_settings_are_small_enough_for_a_pipe():
    """That nobody reads: Linux has room for 4096 bytes at least."""
    (settings,) = settings_of(1, 1, host="h" * 255, address="a" * 255)
    assert len(json.dumps(settings)) < 4096
