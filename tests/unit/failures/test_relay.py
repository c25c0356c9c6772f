"""What workers write to stderr arrives as they have written it, whoever reads it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RELAYING = str(Path(__file__).with_name("relaying.py"))


def command(*programs, seconds=1):
    return [sys.executable, RELAYING, str(seconds), *programs]


def run(*programs, seconds=1, **options):
    """Run programs; return what was found out about them, and what arrived."""
    done = subprocess.run(
        command(*programs, seconds=seconds),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        check=False,
        timeout=60,
    )
    return json.loads(done.stdout), done.stderr


ALL_BYTES = "import os; os.write(2, bytes(range(256)) * 1000); os.write(2, b'no end')"


def test_byte_for_byte():
    found, arrived = run(ALL_BYTES.replace("range(256)", "range(128)"))
    assert arrived == bytes(range(128)) * 1000 + b"no end"
    assert found["codes"] == [0]
    assert found["ends"][0].encode("latin-1") == arrived[-64 * 1024 :]
    _, arrived = run(ALL_BYTES)
    assert arrived == bytes(range(256)) * 1000 + b"no end"


def test_at_once():
    program = "import os, time; os.write(2, b'50 %\\r'); time.sleep(30)"
    with subprocess.Popen(command(program), stderr=subprocess.PIPE) as running:
        start = time.monotonic()
        assert os.read(running.stderr.fileno(), 100) == b"50 %\r"
        assert time.monotonic() - start < 10
        running.kill()


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


def test_what_is_known_of_a_failure():
    found, arrived = run("raise ValueError('bad batch 17')", "pass")
    assert found["codes"] == [1, 0]
    assert found["failed"] == [True, False]
    assert found["ends"] == [arrived.decode(), ""]
    assert "bad batch 17" in found["ends"][0]


def test_what_is_hidden_is_read_all_the_same():
    """As with --local-ranks-filter."""
    found, arrived = run(
        "raise ValueError('bad batch 17')", env=os.environ | {"HIDDEN": "1"}
    )
    assert arrived == b""
    assert "bad batch 17" in found["ends"][0]


# --- what cannot be read --------------------------------------------------------------


def test_one_file_for_both(tmp_path):
    with (tmp_path / "both").open("wb") as both:
        code = subprocess.run(
            command("import os; os.write(2, b'as it was\\n')"),
            stdout=both,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    text = (tmp_path / "both").read_text()
    assert code == 0
    assert text.startswith("as it was\n")
    assert (
        json.loads(text.partition("\n")[2])["unread"] == "it is the same file as stdout"
    )


def test_a_terminal():
    ours, theirs = pty.openpty()
    found, _ = run("pass", stderr=theirs)
    assert found["unread"] == "it is a terminal"
    os.close(ours)
    os.close(theirs)


def test_no_more_files():
    program = (
        "import resource, sys;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3));"
        "sys.argv[1:] = [];"
        "from torchrun_hpc.failures.relay import Relay;"
        "print(Relay().start(lambda stderr: stderr))"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from torchrun_hpc.failures import relay;" + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "None\n", done.stderr


# --- what is wrong downstream ---------------------------------------------------------


WRITES = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
while True:
    os.write(2, b"x" * 1000 + b"\\n")
"""


def test_a_reader_that_has_gone_ends_the_writer():
    with subprocess.Popen(
        command(WRITES), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        running.stderr.read(10_000)
        running.stderr.close()
        found = json.loads(running.stdout.read())
    assert found["codes"] == [-13]


def test_a_reader_that_is_slow_holds_the_writer_up(tmp_path):
    count = tmp_path / "count"
    program = (
        "import os, pathlib\n"
        "for number in range(1, 4000):\n"
        "    os.write(2, b'x' * 1000)\n"
        f"    pathlib.Path({str(count)!r}).write_text(str(number))\n"
    )
    with subprocess.Popen(
        command(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        before = ""
        while not before or before != (now := count.read_text()):
            before = now if before else count.exists() and count.read_text()
            time.sleep(1)
        _, arrived = running.communicate()
    assert int(now) < 2000  # two pipes are full, and a piece is on its way
    assert len(arrived) == 3999 * 1000


SPEAKS = "import os, time; time.sleep(0.5); os.write(2, b'the end' * 1000); os._exit(3)"


MUCH = (
    "import os, time\ntime.sleep(0.5)\nfor _ in range(500): os.write(2, b'x' * 10_000)"
)
LEAVES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {0!r}])
"""


@pytest.mark.parametrize("program", [MUCH, LEAVES.format(MUCH)])
def test_nothing_is_lost_where_others_fill_a_pipe_that_does_not_block(program):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    is_over = threading.Event()

    def fill():
        while not is_over.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(writer, b"o" * 1000)

    with (
        subprocess.Popen(
            command(program, seconds=0), stdout=subprocess.DEVNULL, stderr=writer
        ),
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(fill)
        arrived, end = 0, time.monotonic() + 5
        while arrived < 5_000_000 and time.monotonic() < end:
            time.sleep(0.0005)
            arrived += os.read(reader, 2**16).count(b"x")
        is_over.set()
        os.close(reader)
    os.close(writer)
    assert arrived == 5_000_000


def test_a_slow_reader_does_not_hide_how_it_ended():
    """What is known does not wait for what is read; and nothing is lost."""
    with subprocess.Popen(
        command(SPEAKS, WRITES.replace("while True", "for _ in range(900)")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        time.sleep(3)
        output, arrived = running.communicate()
    assert json.loads(output)["ends"][0] == "the end" * 1000
    assert len(arrived) == 7000 + 900 * 1001


def test_a_full_disk_is_no_fault_of_a_worker():
    with Path("/dev/full").open("wb") as full:
        found, _ = run(
            "import os\nfor _ in range(9): os.write(2, b'lost')", stderr=full
        )
    assert found["codes"] == [0]
    assert found["ends"] == ["lost" * 9]


# --- what workers leave behind --------------------------------------------------------

MUCH = (
    "import os, time\ntime.sleep(0.5)\nfor _ in range(500): os.write(2, b'x' * 10_000)"
)
LEAVES = """
import subprocess, sys
later = "import os, time" + chr(10) + "for number in range(30):" + chr(10)
later += "    time.sleep(0.1); os.write(2, b'left behind %d' % number + bytes([10]))"
command = [sys.executable, "-c", later]
subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
print("done", file=sys.stderr)
sys.exit(3)
"""


def test_what_is_left_behind_has_a_stderr_that_works(tmp_path):
    """The agent does not wait for it, and it can write when the agent has ended."""
    errors = tmp_path / "errors"
    start = time.monotonic()
    with errors.open("wb") as file:
        found, _ = run(LEAVES, seconds=0.5, stderr=file)
    assert time.monotonic() - start < 2.9
    assert found["codes"] == [3]
    assert found["ends"][0].startswith("done\n")
    end = time.monotonic() + 20
    while "left behind 29" not in errors.read_text():
        assert time.monotonic() < end, errors.read_text()
        time.sleep(0.1)
    expected = ["done", *(f"left behind {number}" for number in range(30))]
    assert errors.read_text().splitlines() == expected
