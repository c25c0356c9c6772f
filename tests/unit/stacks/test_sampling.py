"""The stacks that py-spy and forks report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT
from tests.support.patience import PATIENCE
from tests.support.simulated_job import worker_failure
from tests.support.stack_samples import as_sent, problem_of, worker
from torchrun_hpc import limits, wire
from torchrun_hpc.stacks import calls, sampling
from torchrun_hpc.stacks.calls import Call, ForkAnswer, Group
from torchrun_hpc.stacks.sampling import WorkerStack, received, sample


def test_no_worker():
    assert sample([], PATIENCE) == []


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
        f"py-spy is not installed. Run {sys.executable} -m pip install "
        "'torchrun_hpc[stacks]'"
    )
    assert sample([worker(1, 4), worker(1, 5)], PATIENCE) == [
        WorkerStack(4, 1, problem=text),
        WorkerStack(5, 1, problem=text),
    ]
    assert "\nstacks = [" in (ROOT / "pyproject.toml").read_text()


class PySpy:
    """A stand-in for a process of py-spy, which has ended or hangs."""

    def __init__(self, output, errors):
        self._answer = output, errors
        self.waited = []
        self.is_killed = False

    def communicate(self, timeout):
        self.waited.append(timeout)
        if self._answer[0] is None:
            raise subprocess.TimeoutExpired("py-spy", timeout)
        return self._answer

    def kill(self):
        self.is_killed = True


@pytest.fixture
def instead(monkeypatch):
    """Let py-spy answer this; None if it hangs. Return all that have been started."""
    monkeypatch.setattr(sampling, "_program", lambda: "py-spy")

    def instead(output=b"", errors=b""):
        started = {}

        def start(words, **_):
            started[tuple(words)] = PySpy(output, errors)
            return started[tuple(words)]

        popen = SimpleNamespace(**vars(subprocess) | {"Popen": start})
        monkeypatch.setattr(sampling, "subprocess", popen)
        return started

    return instead


def test_how_it_is_called(instead):
    started = instead()
    sample([worker(4711)], PATIENCE)
    assert list(started) == [("py-spy", "dump", "--json", "--pid", "4711")]


# The errors of py-spy without a permission.
DENIED = {
    "the process": (
        "Permission Denied: Try running again with elevated permissions by going "
        "'sudo env \"PATH=$PATH\" !!'"
    ),
    "a file": "Error: Permission denied (os error 13)",
    "ptrace": "Error: EPERM: Operation not permitted",
    "what lies behind it": "Error: Failed to open\nCaused by: EACCES",
}


def test_it_says_which_setting_forbids_it(instead, tmp_path, monkeypatch):
    for number, scope in enumerate(("0\n", "1\n", "2\n", "3\n", None)):
        setting = tmp_path / str(number)
        if scope is not None:
            setting.write_text(scope)
        monkeypatch.setattr(sampling, "_PTRACE_SCOPE", setting)
        text = (
            "py-spy has no permission: a container needs --cap-add=SYS_PTRACE, or the "
            f"system forbids ptrace to user {os.getuid()}"
        )
        if scope in ("2\n", "3\n"):
            text = f"{setting} is {scope[0]}: only root can read stacks"
        for name, errors in DENIED.items():
            instead(errors=errors.encode())
            assert problem_of(1) == text, (scope, name)


def test_those_that_hang(instead, monkeypatch):
    """All of them have the time that is given; then each is ended."""
    started = instead(None)
    monkeypatch.setattr(
        sampling, "time", SimpleNamespace(monotonic=lambda: 7.0 + 3.0 * len(ended()))
    )

    def ended():
        return [each for each in started.values() if each.is_killed]

    found = sample([worker(rank, rank) for rank in range(4)], 5.0)
    assert {stack.problem for stack in found} == {"py-spy did not answer"}
    assert [each.waited[0] for each in started.values()] == [
        5.0,
        2.0,
        limits.PY_SPY_TIMEOUT,
        limits.PY_SPY_TIMEOUT,
    ]
    assert ended() == list(started.values())


# Its output about process 7.
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
def test_an_answer_that_cannot_be_read(name, instead):
    instead(os.fsencode(GARBAGE[name]))
    problem_of(7)


def test_what_it_says_is_one_line(instead):
    for errors, problem in {
        b"\n  Error: what?\033[2J\nCaused by: that\n": "what? [2J",
        b"": "py-spy printed nothing",
        b"x" * 100_000: "x" * 200,
    }.items():
        instead(errors=errors)
        assert problem_of(7) == problem


def test_frames_can_be_printed(instead):
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
    instead(json.dumps(answer).encode())
    assert sample([worker(7)], PATIENCE) == [
        WorkerStack(5, 1, ("b" * 200, "a [2J  /x/a.py:1"))
    ]


# --- what other nodes send ----------------------------------------------------------

GOOD = WorkerStack(5, 1, ("f a.py:1", "g b.py:2"))
BAD = WorkerStack(6, 1, problem="py-spy did not answer")


def test_what_is_sent_is_received():
    assert received(as_sent(GOOD, BAD)) == [GOOD, BAD]
    assert received([]) == []


def test_what_is_received_can_be_printed():
    sent = as_sent(WorkerStack(5, 1, ("\x1b[2Jf", "g" * 300), "\nno"))
    assert received(sent) == [WorkerStack(5, 1, (" [2Jf", "g" * 200), " no")]
    (good,) = as_sent(GOOD)
    for odd in ({"problem": "\nno"}, {"frames": ["\x1b[2Jf"]}, {"frames": ["g" * 201]}):
        assert received([good | odd]) == []


NAMES = [field.name for field in fields(WorkerStack)]
NOTHING: list[object] = [None, 5, "text", {}, {"rank": 5}, [None], [[]], [{}]]
NOTHING.append([*as_sent(GOOD), None])
WRONG = {
    "rank": (None, "five", float("nan"), float("inf")),
    "frames": (None, [5], [[5]]),
    "problem": (None, [5]),
}


def test_what_cannot_be_read_is_nothing():
    (good,) = as_sent(GOOD)
    lacking = [{k: v for k, v in good.items() if k != name} for name in NAMES]
    wrong = [{**good, name: each} for name in WRONG for each in WRONG[name]]
    for value in (*NOTHING, *([each] for each in lacking + wrong)):
        assert received(value) == [], value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner)
    ),
    max_leaves=10,
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


# --- forks, and workers that have ended -----------------------------------------------


def fork(rank, record):
    """Return a worker that tells this; ``None`` if it does not answer."""
    line = b"" if record is None else wire.to_line(wire.encode(record))
    return replace(worker(os.getpid(), rank), told=lambda *_: line)


GROUPS = (Group("0", 8, (Call(3, "all_reduce", "float32[1]"),)),)


def test_a_fork_tells_it_itself(instead):
    started = instead(errors=b"Error: no")
    told, silent, exec_ = sample(
        [
            fork(4, ForkAnswer(("f a.py:1",), GROUPS)),
            fork(5, None),
            worker(os.getpid(), 6),
        ],
        PATIENCE,
    )
    assert (told.rank, told.frames, told.groups) == (4, ("f a.py:1",), GROUPS)
    assert told.waits > 0
    assert [(s.rank, s.frames, s.problem) for s in (silent, exec_)] == [
        (5, (), "no"),
        (6, (), "no"),
    ]
    assert len(started) == 1  # of the same process number


def test_without_time_py_spy_is_not_started(instead):
    """The main thread's CPU time still shows whether such a worker makes progress."""
    started = instead()
    told, silent = sample([fork(4, ForkAnswer(("f a.py:1",))), fork(5, None)], 0)
    assert (told.frames, told.problem) == (("f a.py:1",), "")
    assert silent == WorkerStack(5, 1, problem="no answer")
    assert not silent.is_known
    assert not silent.is_lasting
    assert silent.cpu > 0
    assert started == {}


def test_forks_are_asked_together(instead):
    """Each waits for all others here; one after the other, none would answer."""
    instead()
    all_asked = threading.Barrier(4)

    def told(*_):
        all_asked.wait(PATIENCE)
        return wire.to_line(wire.encode(ForkAnswer(("f a.py:1",))))

    found = sample([replace(worker(1, n), told=told) for n in range(4)], PATIENCE)
    assert [stack.frames for stack in found] == [("f a.py:1",)] * 4


def test_a_stopped_worker(processes_of_tests):
    """It can tell nothing, and py-spy would wait."""
    stopped = processes_of_tests()
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    (found,) = sample([worker(stopped.pid)], PATIENCE)
    assert found.problem == sampling.STOPPED


@pytest.fixture
def processes_of_tests():
    with contextlib.ExitStack() as ending:

        def start():
            made = subprocess.Popen(["sleep", str(PATIENCE)])
            ending.callback(made.wait)
            ending.callback(made.kill)
            return made

        yield start


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/u/other.py", line 1, in other',
    "ValueError",
    "During handling of the above exception, another exception occurred:",
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 88, in <module>',
    "    train()",
    "  ... 7 lines left out ...",
    '  File "/x/lib/python3.11/site-packages/torch/distributed/c10d.py", line 83, in f',
    "           ^^^^^",
    "RuntimeError: Timed out",
)


def test_an_ended_worker_has_its_traceback():
    frames = ("<module> train.py:88", "f torch/distributed/c10d.py:83")
    failure = worker_failure(5, lines=TRACEBACK)
    assert sampling.ended(worker(7), failure) == WorkerStack(5, 1, frames)
    aborted = worker_failure(5, code=-6, lines=("Fatal Python error: Aborted",))
    problem = "it was killed by SIGABRT (6)"
    assert sampling.ended(worker(7), aborted) == WorkerStack(5, 1, problem=problem)
    assert sampling.ended(worker(7), None) == WorkerStack(5, 1, problem=sampling.ENDED)


def test_an_ended_fork_has_told_it():
    found = sampling.ended(
        fork(5, ForkAnswer(("f a.py:1",), GROUPS)), worker_failure(5, lines=TRACEBACK)
    )
    assert (found.frames, found.groups, found.problem) == (("f a.py:1",), GROUPS, "")


def test_a_dump_of_torch_is_used(monkeypatch):
    monkeypatch.setattr(
        calls, "groups_in_dump", lambda worker, _: GROUPS * (worker.rank == 5)
    )
    assert sampling.ended(worker(7), None).groups == GROUPS
    assert sampling.ended(worker(7, 4), None).groups == ()
    assert sampling.ended(fork(5, ForkAnswer()), None).groups == GROUPS
