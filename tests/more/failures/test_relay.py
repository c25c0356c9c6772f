"""The workers' stderr arrives as they have written it, whoever reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.patience import PATIENCE, until
from tests.support.processes import RunningProgram

RELAYING = str(Path(__file__).with_name("relaying.py"))


def relaying(*programs, seconds=1, **streams):
    """Start programs whose stderr is passed on."""
    command = [sys.executable, RELAYING, str(seconds), *programs]
    return RunningProgram(command, **streams)


def run(*programs, **options):
    """Run programs; return what was found out about them, and what arrived."""
    with relaying(*programs, **options) as running:
        out, err = running.process.communicate(timeout=PATIENCE)
    return json.loads(out), err


# Until its standard input is closed, which it has from the test.
WAITS = "import os, sys; sys.stdin.read();"


def test_at_once():
    program = "import os; os.write(2, b'50 %\\r');" + WAITS
    with relaying(program, stdin=subprocess.PIPE) as running:
        assert select.select([running.stderr], [], [], PATIENCE)[0]
        assert os.read(running.stderr.fileno(), 100) == b"50 %\r"
        running.stdin.close()
        assert running.wait() == 0


LINES = """
import os
for number in range(200):
    os.write(2, b"{0}" * (17 + number * 31 % {1}) + b"\\n")
"""


@pytest.mark.parametrize("longest", [100, 5000, 600_000])
def test_no_line_of_one_write_is_torn(longest):
    """Also of lines that no pipe has room for."""
    marks = "abcd"
    _, arrived = run(*(LINES.format(mark, longest) for mark in marks))
    lines = arrived.decode().splitlines()
    assert len(lines) == 200 * len(marks)
    assert [line for line in lines if len(set(line)) != 1] == []


# --- what cannot be read --------------------------------------------------------------


def test_a_terminal():
    ours, theirs = pty.openpty()
    found, _ = run("pass", stderr=theirs)
    assert found["unread"] == "it is a terminal"
    os.close(ours)
    os.close(theirs)


# --- what is wrong downstream ---------------------------------------------------------


WRITES = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
while True:
    os.write(2, b"x" * 1000 + b"\\n")
"""


def test_a_reader_that_has_gone_ends_the_writer():
    with relaying(WRITES) as running:
        running.stderr.read(10_000)
        running.stderr.close()
        found = json.loads(running.stdout.read())
    assert found["codes"] == [-13]


def test_a_reader_that_is_slow_holds_the_writer_up(tmp_path):
    count = tmp_path / "count"
    program = (
        "import os\n"
        f"file = os.open({str(count)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "for number in range(1, 4000):\n"
        "    os.write(2, b'x' * 1000)\n"
        "    os.pwrite(file, b'%04d' % number, 0)\n"
    )

    def is_held_up():
        writers = psutil.Process(running.pid).children()
        is_waiting = [w.status() for w in writers] == [psutil.STATUS_SLEEPING]
        return is_waiting and count.exists() and count.read_text()

    with relaying(program) as running:
        now = until(is_held_up)
        _, arrived = running.process.communicate()
    assert int(now) < 2000  # two pipes are full, and a piece is on its way
    assert len(arrived) == 3999 * 1000


MUCH = WAITS + "[os.write(2, b'x' * 10_000) for _ in range(500)]"
LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {0!r}], stdout=subprocess.DEVNULL)
print("done", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("program", [MUCH, LEAVES.format(MUCH)])
def test_nothing_is_lost_where_others_fill_a_pipe_that_does_not_block(program):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    is_over = threading.Event()
    arrived = bytearray()

    def fill():
        while not is_over.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(writer, b"o" * 1000)

    def has_all():
        for _ in range(10):
            arrived.extend(os.read(reader, 2**16).replace(b"o", b""))
        return arrived.count(b"x") >= 5_000_000

    with (
        relaying(
            program,
            seconds=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=writer,
        ) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(fill)
        try:
            if program != MUCH:
                until(lambda: os.read(reader, 2**16) and not running.is_running)
            running.stdin.close()
            until(has_all, lambda: len(arrived))
        finally:
            is_over.set()
            pool.shutdown()
            os.close(reader)
            os.close(writer)
    assert arrived.count(b"x") == 5_000_000


def test_a_slow_reader_does_not_hide_how_it_ended():
    """The exit code does not wait for the reader, and nothing is lost."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"o" * 1000)
    os.set_blocking(writer, True)
    program = "import os; os.write(2, b'the end' * 1000); os._exit(3)"
    with relaying(program, stderr=writer) as running:
        os.close(writer)
        found = json.loads(running.line())
        with io.FileIO(reader) as file:
            arrived = file.read()
    assert (found["codes"], found["ends"]) == ([3], ["the end" * 1000])
    assert arrived == b"o" * filled + b"the end" * 1000


def test_a_full_disk_is_no_fault_of_a_worker():
    with Path("/dev/full").open("wb") as full:
        found, _ = run(
            "import os\nfor _ in range(9): os.write(2, b'lost')", stderr=full
        )
    assert found["codes"] == [0]
    assert found["ends"] == ["lost" * 9]


# --- what workers leave behind --------------------------------------------------------


def test_what_is_left_behind_has_a_stderr_that_works(tmp_path):
    """The agent does not wait for it, and it can write when the agent has ended."""
    errors = tmp_path / "errors"
    later = WAITS + "[os.write(2, b'left behind %d\\n' % n) for n in range(30)]"
    reader, writer = os.pipe()
    with errors.open("wb") as file:
        found, _ = run(LEAVES.format(later), seconds=0, stdin=reader, stderr=file)
    assert found["codes"] == [3]
    assert found["ends"] == ["done\n"]
    for end in (reader, writer):
        os.close(end)
    until(lambda: "left behind 29\n" in errors.read_text(), errors.read_text)
    expected = ["done", *(f"left behind {number}" for number in range(30))]
    assert errors.read_text().splitlines() == expected
