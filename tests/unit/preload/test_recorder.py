"""What a fork tells its agent about itself."""

from __future__ import annotations

import json
import socket
import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.support.patience import PATIENCE
from tests.support.stack_samples import entry
from torchrun_hpc import wire
from torchrun_hpc.preload import recorder, worker
from torchrun_hpc.stacks.calls import ASK_ALL, ASK_FRAMES, AT_END, ForkAnswer


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE)
    with ours, theirs:
        yield ours, theirs


def read(line):
    return wire.decode(ForkAnswer, wire.from_json(line))


class Ranks(NamedTuple):
    """A process group."""

    number: int
    group_desc: str

    def size(self):
        return self.number


@pytest.fixture
def torch(monkeypatch):
    """Let torch have two groups, and a recorder with these entries."""

    def torch(entries, dump="_dump_fr_trace_json"):
        names = {
            Ranks(8, "default_pg"): "0",
            Ranks(2, "tp"): "1",
        }
        c10d = SimpleNamespace(_world=SimpleNamespace(pg_names=names))
        modules = {
            "torch.distributed.distributed_c10d": c10d,
            "torch._C._distributed_c10d": SimpleNamespace(
                **{dump: lambda: json.dumps({"entries": entries})}
            ),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    return torch


@pytest.fixture(autouse=True)
def without_torch(monkeypatch):
    for name in [*sys.modules]:
        if name.startswith("torch."):
            monkeypatch.delitem(sys.modules, name)


def test_an_answer_while_the_main_thread_waits(pair, torch):
    ours, theirs = pair
    torch([entry(1)])
    before = threading.enumerate()
    recorder.start(theirs)
    assert threading.enumerate() == before
    assert not theirs.get_inheritable()
    for question in (ASK_FRAMES, ASK_ALL):
        ours.send(question)
        told = read(ours.recv(2**17))
        assert (told.groups == ()) == (question == ASK_FRAMES)
    (wait,) = [frame for frame in told.frames if frame.startswith("test_an_answer")]
    assert "test_recorder.py:" in wait
    assert [(group.name, group.size, group.last) for group in told.groups] == [
        ("1 tp", 2, 0),
        ("0", 8, 1),
    ]
    theirs.shutdown(socket.SHUT_RDWR)  # and the thread ends


def test_a_script_without_torch(pair):
    """It sees no thread, and no open file."""
    _, theirs = pair
    recorder.start(theirs)
    assert theirs.fileno() == -1
    recorder.leave(theirs, RuntimeError())


def raises(text="Timed out waiting 9ms for recv operation"):
    raise RuntimeError(text)


def told_after(pair, fails, *args):
    """Return what a worker tells after an exception."""
    ours, theirs = pair
    try:
        fails(*args)
    except BaseException as error:  # noqa: BLE001
        recorder.leave(theirs, error)
    line = ours.recv(2**17)
    assert line[:1] == AT_END
    return read(line[1:])


def test_last_words(pair):
    told = told_after(pair, raises)
    names = [frame.partition(" ")[0] for frame in told.frames]
    assert names == ["told_after", "raises"]
    first, *_, last = told.error.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "RuntimeError: Timed out waiting 9ms for recv operation"
    assert told.groups == ()


def test_other_errors_do_not_touch_torch(pair, torch):
    torch([entry(1)])
    told = told_after(pair, raises, "bad shape")
    assert (len(told.frames), told.groups) == (2, ())


class OddError(Exception):
    """It has no text, and is false."""

    def __str__(self):
        raise ValueError

    def __bool__(self):
        return False


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (OddError(), "OddError"),
        (ValueError("a" * 2**20), "aaa"),
        (SystemExit("no data"), "no data"),
        (SystemExit(3), "SystemExit(3)"),
    ],
)
def test_what_python_writes(pair, error, written):
    def fails():
        raise error

    assert written in told_after(pair, fails).error


def test_frames_of_the_launcher_are_left_out(pair, monkeypatch):
    """As the interpreter's own message leaves them out."""
    monkeypatch.setattr(worker, "LAUNCHER", __file__)
    text = told_after(pair, json.loads, "{").error
    assert "decoder.py" in text
    assert __file__ not in text


def deep(number):
    return deep(number - 1) if number else raises()


def test_many_frames(pair):
    """The innermost ones fit into an answer."""
    told = told_after(pair, deep, 500)
    assert told.frames[-1].startswith("raises ")
    assert len(told.frames) == recorder._FRAMES


@pytest.mark.parametrize(
    ("dump", "entries", "groups"),
    [
        ("_dump_nccl_trace", [], 0),  # torch 2.2 to 2.5
        ("_dump_nccl_trace_json", [], 2),  # torch 2.6 and 2.7
        ("_dump_fr_trace_json", [{"another": "form"}], 0),
    ],
)
def test_other_releases(pair, torch, dump, entries, groups):
    torch(entries, dump)
    told = told_after(pair, raises)
    assert (len(told.frames), len(told.groups)) == (2, groups)


def test_an_agent_that_has_ended_or_does_not_read(pair):
    ours, theirs = pair
    for _ in range(2000):
        recorder.leave(theirs, RuntimeError())
    ours.close()
    recorder.leave(theirs, RuntimeError())


def test_files_in_a_search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "/a/b", ""])
    assert recorder._short("/a/b/c.py") == "c.py"
    assert recorder._short("/a/x/c.py") == "x/c.py"
    assert recorder._short("/ab/c.py") == "/ab/c.py"
    assert recorder._short("<frozen runpy>") == "<frozen runpy>"
