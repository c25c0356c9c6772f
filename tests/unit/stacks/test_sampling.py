"""Real processes are looked at, by py-spy and by programs that stand in its place."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import wait_until
from programs import ROOT

from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.stacks import sampling
from torchrun_hpc.stacks.sampling import WorkerStack, received, sample

LIMIT = 20.0  # seconds, of a busy machine

SLEEP = "import time; time.sleep(600)"
FRAMES = ("<module> sleeps.py:14", "wait sleeps.py:6")  # of conftest.SLEEPS


def worker(pid, rank=5):
    return Worker(rank, 8, 1, rank % 2, pid, lambda: None)


def problem_of(pid, timeout=LIMIT):
    """Look at a process of which there is no stack, and return why."""
    (found,) = sample([worker(pid)], timeout)
    assert found == WorkerStack(5, 1, problem=found.problem)
    assert found.problem.isprintable()
    assert 0 < len(found.problem) <= 250
    return found.problem


# --- processes ----------------------------------------------------------------------


def test_the_frames_of_the_main_thread(processes):
    pid = processes.sleeping()
    assert sample([worker(pid)], LIMIT) == [WorkerStack(5, 1, FRAMES)]


def test_several_at_once_in_their_order(processes):
    pids = {rank: processes.sleeping() for rank in (7, 4)}
    found = sample([worker(pid, rank) for rank, pid in pids.items()], LIMIT)
    assert found == [WorkerStack(7, 1, FRAMES), WorkerStack(4, 1, FRAMES)]


def test_no_worker():
    assert sample([], LIMIT) == []


def test_a_process_that_is_forked(processes, tmp_path):
    """As of --hpc-preload: its main thread is the one that has forked."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, threading, time\n"
        "def work():\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "def fork():\n"
        "    if os.fork() == 0:\n"
        "        threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "        work()\n"
        "fork()\n"
        "time.sleep(600)\n"
    )
    parent = processes.start(sys.executable, "-S", str(script))
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    (found,) = sample([worker(int(children))], LIMIT)
    assert found.frames == (
        "<module> forks.py:9",
        "fork forks.py:8",
        "work forks.py:4",
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
    (child,) = processes._started
    for _ in range(10):
        (found,) = sample([worker(pid)], LIMIT)
        assert found.problem == ""
        seen = int(child.stdout.readline())
    while seen < 100:
        seen = int(child.stdout.readline())
    assert child.poll() is None


def test_a_program_that_is_no_python(processes):
    pid = processes.start("yes")  # writes until the pipe is full
    assert "python" in problem_of(pid)


def test_a_process_that_has_ended():
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
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
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
    os.kill(pid, signal.SIGCONT)
    assert sample([worker(pid)], LIMIT) == [WorkerStack(5, 1, FRAMES)]


def test_a_python_that_only_begins():
    """There may be no interpreter yet, or no frame."""
    for delay in range(30):
        with subprocess.Popen([sys.executable, "-S", "-c", SLEEP]) as child:
            time.sleep(delay / 1000)
            (found,) = sample([worker(child.pid)], LIMIT)
            assert child.poll() is None
            child.kill()
        assert not (found.frames and found.problem)


# --- py-spy -------------------------------------------------------------------------


def test_the_py_spy_of_this_environment_comes_first(tmp_path, monkeypatch):
    for name in ("own", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("#!/bin/sh\n")
        (tmp_path / name / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert sampling._program() == str(tmp_path / "own" / "py-spy")
    (tmp_path / "own" / "py-spy").unlink()
    assert sampling._program() == str(tmp_path / "path" / "py-spy")
    (tmp_path / "path" / "py-spy").unlink()
    assert sampling._program() is None


def test_without_py_spy_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sampling, "_program", lambda: None)
    text = (
        f"py-spy is not installed: {sys.executable} -m pip install "
        "'torchrun_hpc[stacks]'"
    )
    assert sample([worker(1, 4), worker(1, 5)], LIMIT) == [
        WorkerStack(4, 1, problem=text),
        WorkerStack(5, 1, problem=text),
    ]
    assert "\nstacks = [" in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def instead(monkeypatch, tmp_path):
    """Let a script stand in the place of py-spy."""

    def instead(script, mode=0o755):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(mode)
        monkeypatch.setattr(sampling, "_program", lambda: str(program))

    return instead


def test_how_it_is_called(instead, tmp_path):
    instead(f'echo "$@" > {tmp_path}/words')
    sample([worker(4711)], LIMIT)
    assert (tmp_path / "words").read_text() == "dump --json --pid 4711\n"


# What py-spy writes where it is not allowed to look.
DENIED = {
    "the process": (
        "Permission Denied: Try running again with elevated permissions by going "
        "'sudo env \"PATH=$PATH\" !!'"
    ),
    "a file": "Error: Permission denied (os error 13)",
    "ptrace": "Error: EPERM: Operation not permitted",
    "what lies behind it": "Error: Failed to open\nCaused by: EACCES",
}


@pytest.mark.parametrize("name", DENIED)
@pytest.mark.parametrize("scope", ["0\n", "1\n", "2\n", "3\n", None])
def test_it_says_which_setting_forbids_it(name, scope, instead, tmp_path, monkeypatch):
    (tmp_path / "denied").write_text(DENIED[name])
    instead(f"cat {tmp_path}/denied >&2; exit 1")
    setting = tmp_path / "ptrace_scope"
    if scope is not None:
        setting.write_text(scope)
    monkeypatch.setattr(sampling, "_PTRACE_SCOPE", setting)
    if scope in ("2\n", "3\n"):
        assert problem_of(1) == (
            f"{setting} is {scope[0]}: only the administrator may look"
        )
    else:
        assert problem_of(1) == (
            "py-spy may not look: a container needs --cap-add=SYS_PTRACE, or the "
            f"system forbids ptrace to user {os.getuid()}"
        )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_the_real_one_says_where_it_is_not_allowed(processes):
    """Another user's process: as where a system forbids it."""
    pid = processes.sleeping()
    user = {"user": 65534, "group": 65534, "extra_groups": []}
    # That of the environment may lie below a folder that only root can enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        py_spy = shutil.copy(sampling._program(), folder)
        words = [py_spy, "dump", "--json", "--pid", str(pid)]
        done = subprocess.run(words, **user, capture_output=True, check=False)
    assert done.returncode
    assert "py-spy may not look" in sampling._forbidden(done.stderr.decode())


def test_one_that_hangs(instead):
    instead("exec sleep 600")
    start = time.monotonic()
    found = sample([worker(1, rank) for rank in range(8)], 0.5)
    assert 0.5 <= time.monotonic() - start < 3
    assert {stack.problem for stack in found} == {"no answer of py-spy"}


def test_one_that_hangs_is_ended(instead, tmp_path):
    instead(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    sample([worker(1)], 1)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_one_that_hangs_does_not_keep_the_others_waiting(instead, processes):
    real = sampling._program()
    instead(f'case "$4" in 1) exec sleep 600;; *) exec {real} "$@";; esac')
    start = time.monotonic()
    pid = processes.sleeping()
    found = sample([worker(1, 4), worker(pid, 5)], 2)
    assert [stack.problem for stack in found] == ["no answer of py-spy", ""]
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_one_that_cannot_be_started(instead, mode, tmp_path):
    """A file system without exec; a program for another kind of machine."""
    instead("", mode)
    (tmp_path / "py-spy").write_bytes(b"\x7fELF" + bytes(60))
    problem_of(1)


# What it writes, of process 7.
GARBAGE = {
    "nothing": "",
    "no JSON": "Error: what?",
    "null": "null",
    "a number": "5",
    "a text": '"text"',
    "no thread": "[]",
    "no threads": "{}",
    "numbers for threads": "[5]",
    "an object for threads": '{"threads": []}',
    "another thread": '[{"os_thread_id": 8, "frames": []}]',
    "a thread without a number": '[{"os_thread_id": null, "frames": []}]',
    "a thread without frames": '[{"os_thread_id": 7}]',
    "no list of frames": '[{"os_thread_id": 7, "frames": 5}]',
    "null for frames": '[{"os_thread_id": 7, "frames": null}]',
    "numbers for frames": '[{"os_thread_id": 7, "frames": [5]}]',
    "frames without a file": '[{"os_thread_id": 7, "frames": [{"name": "f"}]}]',
    "no UTF-8": "[\udcff",
    "half of it": '[{"os_thread_id": 7, "frames": [{"name": "f"',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_an_answer_that_cannot_be_read(name, instead, tmp_path):
    (tmp_path / "answer").write_bytes(os.fsencode(GARBAGE[name]))
    instead(f"cat {tmp_path}/answer")
    problem_of(7)


def test_what_it_says_is_one_line(instead):
    instead('printf "\\n  Error: what?\\033[2J\\nCaused by: that\\n" >&2; exit 1')
    assert problem_of(7) == "what? [2J"
    instead("exit 1")
    assert problem_of(7) == "py-spy has said nothing"
    instead("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1")
    assert problem_of(7) == "x" * 200


def test_frames_can_be_printed(instead, tmp_path):
    frames = [
        {
            "name": "a\x1b[2J\n",
            "filename": "/x/a.py",
            "short_filename": None,
            "line": 1,
        },
        {"name": "b" * 300, "filename": "/x/b.py", "short_filename": "b.py", "line": 2},
    ]
    answer = [{"os_thread_id": 7, "frames": frames}]
    (tmp_path / "answer").write_text(json.dumps(answer))
    instead(f"cat {tmp_path}/answer")
    assert sample([worker(7)], LIMIT) == [
        WorkerStack(5, 1, ("b" * 200, "a [2J  /x/a.py:1"))
    ]


# --- what other nodes send ----------------------------------------------------------

GOOD = WorkerStack(5, 1, ("f a.py:1", "g b.py:2"))
BAD = WorkerStack(6, 1, problem="no answer of py-spy")


def as_sent(*stacks):
    return json.loads(json.dumps([asdict(stack) for stack in stacks]))


def test_what_is_sent_is_received():
    assert received(as_sent(GOOD, BAD)) == [GOOD, BAD]
    assert received([]) == []


def test_what_is_received_can_be_printed():
    sent = as_sent(WorkerStack(5, 1, ("\x1b[2Jf", "g" * 300), "\nno"))
    assert received(sent) == [WorkerStack(5, 1, (" [2Jf", "g" * 200), " no")]


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "text",
        {},
        {"rank": 5},
        [None],
        [[]],
        [{}],
        [{"rank": 5}],
        [{"rank": None, "frames": [], "problem": ""}],
        [{"rank": "five", "frames": [], "problem": ""}],
        [{"rank": float("nan"), "frames": [], "problem": ""}],
        [{"rank": float("inf"), "frames": [], "problem": ""}],
        [{"rank": 5, "frames": None, "problem": ""}],
        [{"rank": 5, "frames": [5], "problem": ""}],
        [{"rank": 5, "frames": [[5]], "problem": ""}],
        [{"rank": 5, "frames": [], "problem": None}],
        [{"rank": 5, "frames": [], "problem": [5]}],
        [*as_sent(GOOD), None],
    ],
)
def test_what_cannot_be_read_is_nothing(value):
    assert received(value) == []


NAMES = ["rank", "node", "frames", "problem"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner)
    ),
)
nearly = st.lists(
    st.fixed_dictionaries(dict.fromkeys(NAMES, json_values)),
    min_size=1,
    max_size=3,
)


@given(json_values | nearly)
def test_whatever_is_sent_nothing_is_raised(value):
    for stack in received(value):
        assert type(stack.rank) is int
        for text in (*stack.frames, stack.problem):
            assert re.fullmatch(".{,200}", text)
            assert text.isprintable()
