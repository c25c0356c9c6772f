"""When the launcher reads ahead, and what it tells the program that does it."""

from __future__ import annotations

import io
import os
import socket
from types import SimpleNamespace

import pytest

from torchrun_hpc import programs
from torchrun_hpc.host import sockets
from torchrun_hpc.preload import read_ahead

FAST, SLOW = 0.0001, 0.001  # seconds for a page


class Started(list["Program"]):
    """The programs that were started, and how each ended."""

    def __call__(self, *words, stdin, bufsize, pass_fds):
        assert (stdin, bufsize) == (programs.PIPE, 0)
        (number,) = pass_fds
        self.append(Program(words, socket.socket(fileno=os.dup(number))))
        return self[-1]


class Program:
    def __init__(self, words, lock):
        self.words = words
        self.lock = lock  # a program has its own copy
        self.stdin = io.BytesIO()
        self.ended = False
        self.killed = False

    def kill(self):
        self.killed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended = self.killed


hold = sockets.hold


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Let torch be in a folder, and each page take a time of `pages`."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    for name in ("libtorch_cpu.so", "libtorch_python.so"):
        (tmp_path / "torch" / "lib" / name).write_bytes(b"library")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = Started()
    monkeypatch.setattr(programs, "start", found)
    # Other tests of the same user may run meanwhile.
    monkeypatch.setattr(sockets, "hold", lambda what: hold(f"{what} {tmp_path}"))
    yield found
    read_ahead.end()
    for program in found:
        program.lock.close()


def pages_take(monkeypatch, *seconds):
    clock = [0.0]
    for each in seconds:
        clock += [clock[-1], clock[-1] + each]
    times = iter(clock[1:])
    fake = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(read_ahead, "time", fake)


@pytest.mark.parametrize(
    ("pages", "is_started"),
    [
        ((FAST,), False),
        ((SLOW, FAST), False),  # this process had to wait for a CPU
        ((SLOW, SLOW), True),
    ],
)
def test_only_slow_files_are_read_ahead(monkeypatch, started, pages, is_started):
    pages_take(monkeypatch, *pages)
    read_ahead.start("module")
    assert len(started) == is_started


def test_the_program_learns_the_modules_and_ends(monkeypatch, started, tmp_path):
    pages_take(monkeypatch, SLOW, SLOW)
    read_ahead.start("one")
    read_ahead.ask("two", "three.four")
    (program,) = started
    assert program.words == ("read_ahead", str(tmp_path))
    assert program.stdin.getvalue() == b"one\ntwo\nthree.four\n"
    assert not program.ended
    read_ahead.end()
    assert program.ended
    read_ahead.end()
    read_ahead.ask("five")  # nobody reads


def test_one_program_of_a_user_reads(monkeypatch, started):
    """Its launcher does not hold the lock: its workers are forks, and run on."""
    pages_take(monkeypatch, *[SLOW] * 6)
    for _ in range(2):
        read_ahead.start("module")
        assert len(started) == 1
    started[0].lock.close()  # as at its end
    read_ahead.start("module")
    assert len(started) == 2


@pytest.mark.parametrize("missing", ["torch/__init__.py", "torch/lib/libtorch_cpu.so"])
def test_without_torch_nothing_is_read(started, tmp_path, missing):
    (tmp_path / missing).unlink()
    read_ahead.start("module")
    assert not started


def test_a_launch_continues_without_the_program(monkeypatch, started):
    def fail(*_, **__):
        raise BlockingIOError

    pages_take(monkeypatch, SLOW, SLOW)
    monkeypatch.setattr(programs, "start", fail)
    read_ahead.start("module")
    read_ahead.ask("other")
    read_ahead.end()
    assert not started
