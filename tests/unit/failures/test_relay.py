"""A worker's stderr arrives, and its end is kept."""

from __future__ import annotations

import os
import threading
from unittest.mock import Mock

import psutil
import pytest

from tests.support.patience import PATIENCE, until
from torchrun_hpc import limits
from torchrun_hpc.failures.last_words import KEPT


def test_all_arrives_and_the_end_is_kept(children):
    text = "".join(map(chr, range(128))) * 1000 + "no end"
    child = children.start()
    child.write(text)
    assert children.end_of(child) == text[-KEPT:]
    children.end()
    assert children.arrived.decode() == text


def test_what_is_hidden_is_read_all_the_same(children):
    """As with --local-ranks-filter; also if stderr is a terminal."""
    children.relay.unread = "it is a terminal"
    child = children.start(is_shown=False)
    child.write("hidden\n")
    assert children.end_of(child) == "hidden\n"
    children.end()
    assert children.arrived == b""


@pytest.mark.parametrize(
    ("text", "has_failed"),
    [
        ("step 1\n", False),
        ("Traceback (most recent call last):\n", True),
        ("Fatal Python error: Aborted\n", True),
    ],
)
def test_when_it_failed(children, text, has_failed):
    child = children.start()
    child.write(text)
    children.end_of(child)
    children.now += 1
    child.write("the end\n")
    children.end_of(child)
    assert children.relay.failed_at(child.pid) == (1000.0 if has_failed else 0.0)


def test_a_worker_that_cannot_be_started(children):
    def fail(_):
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        children.relay.start(fail)
    until(lambda: "stderr" not in [each.name for each in threading.enumerate()])


def test_it_forgets_those_of_which_all_has_arrived(children):
    ended, runs = children.start(), children.start()
    ended.end(0)
    children.relay._pipes[ended.pid].thread.join(PATIENCE)
    children.relay.forget_ended()
    reads = [children.relay.reads(child.pid) for child in (ended, runs)]
    assert reads == [False, True]


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [(os, "pipe", OSError), (threading.Thread, "start", RuntimeError)],
)
def test_no_more_files_or_threads(children, monkeypatch, where, name, error):
    before = psutil.Process().num_fds()
    with monkeypatch.context() as patching:
        patching.setattr(where, name, Mock(side_effect=error))
        assert not children.relay.reads(children.start().pid)
    assert psutil.Process().num_fds() == before


def test_what_is_read_ahead_arrives_though_nothing_follows(children, monkeypatch):
    """Its reader may still sleep when all was read."""
    monkeypatch.setattr(limits, "RELAY_INTERVAL", 0.01)
    child = children.start()
    children.relay._pipes[child.pid]._unwritten.append(b"the end")
    until(lambda: children.arrived == b"the end")
