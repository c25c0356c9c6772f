"""Real processes are looked at, by py-spy and by programs that stand in its place."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.processes import RunningProgram, run
from tests.support.stack_samples import problem_of, worker
from torchrun_hpc.stacks import sampling
from torchrun_hpc.stacks.sampling import WorkerStack, sample

SLEEP = "import time; time.sleep(600)"
FRAMES = ("<module> sleeps.py:14", "wait sleeps.py:6")  # of conftest.SLEEPS


# --- processes ----------------------------------------------------------------------


def test_several_at_once_in_their_order(processes):
    pids = {rank: processes.sleeping() for rank in (7, 4)}
    found = sample([worker(pid, rank) for rank, pid in pids.items()], PATIENCE)
    assert found == [WorkerStack(7, 1, FRAMES), WorkerStack(4, 1, FRAMES)]


def test_a_process_that_is_forked(processes, tmp_path):
    """As of --hpc-preload: its main thread is the one that has forked."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, threading, time\n"
        "def work():\n"
        "    print(os.getpid(), flush=True); time.sleep(600)\n"
        "def fork():\n"
        "    if os.fork() == 0:\n"
        "        threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "        work()\n"
        "fork()\n"
        "time.sleep(600)\n"
    )
    parent = processes.start(sys.executable, "-S", str(script))
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    (found,) = sample([worker(int(children))], PATIENCE)
    assert found.frames == (
        "<module> forks.py:8",
        "fork forks.py:7",
        "work forks.py:3",
    )
    os.kill(int(children), signal.SIGKILL)


def test_it_runs_on(processes):
    """Also where it is looked at again and again."""
    program = (
        "import time\n"
        "for number in range(10**6):\n"
        "    print(number, flush=True)\n"
        "    time.sleep(.01)\n"
    )
    pid = processes.start(sys.executable, "-S", "-c", program)
    (child,) = processes.all
    for _ in range(10):
        (found,) = sample([worker(pid)], PATIENCE)
        assert found.problem == ""
        number = int(child.line())
    while number < 100:
        number = int(child.line())
    assert child.is_running


def test_a_program_that_is_no_python(processes):
    pid = processes.start("yes")  # writes until the pipe is full
    assert "python" in problem_of(pid)


def test_a_process_that_has_ended():
    with RunningProgram([sys.executable, "-S", "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        problem_of(child.pid)  # nobody has collected it
        child.wait()
        assert "running" in problem_of(child.pid)


def test_a_python_that_is_stopped(processes):
    """As of a debugger: it stays as it is."""
    pid = processes.sleeping()
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    problem_of(pid)
    # It runs for a moment where a tracer leaves it, until the kernel stops it again.
    until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
    os.kill(pid, signal.SIGCONT)
    assert sample([worker(pid)], PATIENCE) == [WorkerStack(5, 1, FRAMES)]


def test_a_python_that_only_begins():
    """There may be no interpreter yet, or no frame."""
    for delay in range(0, 30, 3):
        with RunningProgram([sys.executable, "-S", "-c", SLEEP]) as child:
            time.sleep(delay / 1000)
            (found,) = sample([worker(child.pid)], PATIENCE)
            assert child.is_running
        assert not (found.frames and found.problem)


STEPS = """\
import time
while True:
    print(flush=True)
    time.sleep(0.1)
    sum(range(10**5))
"""


def test_who_goes_on(processes):
    """One that steps is nearly always at the same line: it waits there in each step."""
    pids = processes.sleeping(), processes.start(sys.executable, "-S", "-c", STEPS)
    workers = [worker(pid, rank) for rank, pid in enumerate(pids)]
    before = sample(workers, PATIENCE)
    for _ in range(10):
        processes.all[1].line()
    after = sample(workers, PATIENCE)
    seconds = 1.0  # as it would be without any other program
    pairs = zip(after, before, strict=True)
    assert [now.has_progressed(then, seconds) for now, then in pairs] == [False, True]


# --- py-spy -------------------------------------------------------------------------


@pytest.fixture
def instead(monkeypatch, tmp_path):
    """Replace py-spy by a script."""

    def instead(script, mode=0o755):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(mode)
        monkeypatch.setattr(sampling, "_program", lambda: str(program))

    return instead


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_the_real_one_says_where_it_is_not_allowed(processes):
    """Another user's process: as where a system forbids it."""
    pid = processes.sleeping()
    # That of the environment may lie below a folder that only root can enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        py_spy = shutil.copy(str(sampling._program()), folder)
        as_user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        done = run([*as_user, py_spy, "dump", "--json", "--pid", str(pid)])
    assert done.code
    assert "py-spy has no permission" in sampling._forbidden(done.err)


def test_one_that_hangs_is_ended(instead, processes, tmp_path, monkeypatch):
    """And the other one has an answer."""
    real, number = sampling._program(), tmp_path / "pid"
    hangs = f"echo $$ > {number}; exec sleep {NEVER_S}"
    instead(f'case "$4" in 1) {hangs};; *) exec {real} "$@";; esac')
    looks = []

    def monotonic():
        """Let the time be over when the last one hangs, of which it is the third."""
        looks.append(1)
        if len(looks) < 3:
            return 0.0
        until(lambda: number.exists() and number.read_text().endswith("\n"))
        return float(NEVER_S)

    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=monotonic))
    pid = processes.sleeping()
    found = sample([worker(pid, 5), worker(1, 4)], PATIENCE)
    assert [stack.problem for stack in found] == ["", "py-spy did not answer"]
    assert not Path("/proc", number.read_text().strip()).exists()


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_one_that_cannot_be_started(instead, mode, tmp_path):
    """A file system without exec; a program for another kind of machine."""
    instead("", mode)
    (tmp_path / "py-spy").write_bytes(b"\x7fELF" + bytes(60))
    problem_of(1)
