"""How a worker has failed: its exit code, and its last words from where they are."""

from __future__ import annotations

import json
import os
import threading

import pytest

from tests.support.raised import CAUSE, RAISED
from torchrun_hpc.failures.failure import Kind
from torchrun_hpc.failures.worker import Worker, describe_failure


@pytest.fixture
def relay(children):
    return children.relay


def worker(pid=0, **about):
    return Worker(5, 8, 1, 1, pid, exit_code=lambda: None, **about)


def part_of(failure):
    """Return a failure's details about its worker."""
    assert failure.worker is not None
    return failure.worker


def ended(children, text=RAISED):
    """Run a worker to its end; return its number."""
    child = children.start()
    child.end(1, text)
    return child.pid


def test_what_is_known_of_a_failure(children, relay):
    failure = describe_failure(worker(ended(children)), 1, relay)
    part = part_of(failure)
    assert (failure.rank, part.size, part.local_rank) == (5, 8, 1)
    assert (failure.kind, failure.nodes) == (Kind.WORKER, (1,))
    assert (failure.code, failure.time) == (1, children.now)
    assert failure.text == CAUSE
    assert part.lines[-1] == CAUSE
    assert (part.log, part.unread) == ("", "")


@pytest.mark.parametrize(("code", "seconds"), [(1, 0.0), (-9, 60.0)])
def test_a_traceback_of_long_ago_is_not_when_it_failed(children, relay, code, seconds):
    """But how long its end took does not matter."""
    child = children.start()
    child.write(RAISED)
    children.end_of(child)
    begin, children.now = children.now, children.now + 60
    child.end(code)
    assert describe_failure(worker(child.pid), code, relay).time == begin + seconds


def test_a_log_file(relay, tmp_path):
    log = tmp_path / "stderr.log"
    assert describe_failure(worker(log=str(log)), 1, relay).text == ""
    log.write_bytes(b"x" * 10**6 + b"\nKeyError: 1\n")
    failure = describe_failure(worker(log=str(log)), 1, relay)
    assert (failure.text, part_of(failure).log) == ("KeyError: 1", str(log))


STACK = RAISED.replace(CAUSE, "KeyError: 1")
RECORDED = json.dumps({"message": {"extraInfo": {"py_callstack": STACK}}})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (RECORDED, "KeyError: 1"),
        ("no JSON", CAUSE),
        ("", CAUSE),
        ("[]", CAUSE),
        ('{"message": "x"}', CAUSE),
        ('{"message": {"extraInfo": {"py_callstack": 3}}}', CAUSE),
        ("\udcff", CAUSE),
        ('{"message": ' + "[" * 100_000, CAUSE),
        (RECORDED + " " * 2**24, CAUSE),
        (None, CAUSE),
    ],
)
def test_what_record_has_written_is_better(children, relay, tmp_path, text, cause):
    file = tmp_path / "error.json"
    if text is not None:
        file.write_bytes(os.fsencode(text))
    failed = worker(ended(children), error_file=str(file))
    assert describe_failure(failed, 1, relay).text == cause


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(children, relay, tmp_path, make):
    made = str(tmp_path / "made")
    make(made)
    failed = worker(ended(children), error_file=made)
    assert describe_failure(failed, 1, relay).text == CAUSE
    assert part_of(describe_failure(worker(log=made), 1, relay)).lines == ()


def test_it_says_why_nothing_is_read(relay):
    part = part_of(describe_failure(worker(), 3, relay))
    assert part.unread == "it does not pass through the agent"
    relay.unread = "it is a terminal"
    assert part_of(describe_failure(worker(), 3, relay)).unread == "it is a terminal"


@pytest.mark.parametrize(
    ("code", "is_explained"), [(1, True), (-6, False), (-15, True)]
)
def test_a_fork_tells_what_is_not_read(relay, code, is_explained):
    """An exception does not explain a crash, as of C++: only stderr has that text."""
    told = json.dumps({"error": f"{RAISED}\udcff", "time": 7.5}).encode()
    failed = describe_failure(worker(told=lambda *_: told), code, relay)
    assert failed.text == rf"{CAUSE}\udcff"
    assert failed.time == 7.5
    assert part_of(failed).lines[0].startswith("Traceback ")
    assert (part_of(failed).unread == "") == is_explained


@pytest.mark.parametrize(("code", "is_explained"), [(1, True), (134, False)])
def test_record_has_written_what_is_not_read(relay, tmp_path, code, is_explained):
    (tmp_path / "error.json").write_text(RECORDED)
    failed = worker(error_file=str(tmp_path / "error.json"))
    part = part_of(describe_failure(failed, code, relay))
    assert part.lines[-1] == "KeyError: 1"
    assert (part.unread == "") == is_explained


@pytest.mark.parametrize("text", ["bad config", "SystemExit(1)"])
def test_a_fork_that_exits_says_so(relay, text):
    """But what it has written before is elsewhere."""
    told = json.dumps({"error": text, "time": 7.5}).encode()
    failed = describe_failure(worker(told=lambda *_: told), 1, relay)
    assert (failed.text, failed.time, failed.is_doubtful) == (text, 7.5, False)
    assert part_of(failed).unread


def test_when_record_has_written(relay, tmp_path):
    """Its end may take long."""
    file = tmp_path / "error.json"
    file.write_text(RECORDED)
    os.utime(file, (7, 7))
    assert describe_failure(worker(error_file=str(file)), 1, relay).time == 7


@pytest.mark.parametrize("told", [b'{"error": ""}', b'{"error": 1}', b"[]", b"", b"{"])
def test_a_fork_that_tells_nothing(relay, told):
    failed = describe_failure(worker(told=lambda *_: told), 1, relay)
    assert failed.text == ""
    assert part_of(failed).unread


def test_it_does_not_wait_for_those_who_never_stop_writing(children, relay):
    child, is_over = children.start(), threading.Event()

    def write():
        while not is_over.is_set():
            child.write("more\n")

    writing = threading.Thread(target=write)
    writing.start()
    describe_failure(worker(child.pid), 3, relay)
    is_over.set()
    writing.join()
