"""The last words of workers: Python's own, and whatever bytes there may be."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import traceback
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.failures.last_words import SENT, last_words

RAISES = """
def inner():
    raise ValueError("bad batch 17")
def outer():
    inner()
outer()
"""
CHAINED = """
try:
    {}["key"]
except KeyError as error:
    raise RuntimeError("no such key") from error
"""
TASKS = """
import asyncio
async def bad():
    raise ValueError("bad batch 17")
async def other():
    raise KeyError("other")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(bad())
        group.create_task(other())
asyncio.run(main())
"""
IGNORED = """
import sys
class Noisy:
    def __del__(self):
        raise OSError("in a finalizer")
noisy = Noisy()
raise ValueError("bad batch 17")
"""
THREAD = """
import threading
def run():
    raise ValueError("in a thread")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


STACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
"""
KEY = f"{STACK}KeyError: 1"


def written_by(program):
    """Run a program here; return what Python writes to stderr of it."""
    names: dict[str, object] = {}
    with (
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        mock.patch("sys.unraisablehook", sys.__unraisablehook__),
        mock.patch("threading.excepthook", threading.__excepthook__),
    ):
        try:
            exec(compile(program, "<string>", "exec"), names)  # noqa: S102
        except Exception as error:  # noqa: BLE001
            frames = error.__traceback__
            assert frames is not None
            traceback.print_exception(error.with_traceback(frames.tb_next))
        names.clear()  # as at its end
    return stderr.getvalue()


def words_of(program, code=1):
    return last_words(written_by(program).encode(), code)


def test_an_exception():
    words = words_of(RAISES)
    assert words.is_traceback
    assert words.cause == "ValueError: bad batch 17"
    assert words.lines[0] == "Traceback (most recent call last):"
    assert words.lines[-1] == words.cause
    assert any("in inner" in line for line in words.lines)


def test_a_chain_is_shown_from_its_beginning():
    words = words_of(CHAINED)
    assert words.cause == "RuntimeError: no such key"
    assert "KeyError: 'key'" in words.lines
    assert sum("Traceback" in line for line in words.lines) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs groups")
def test_a_group_of_tasks_is_shown_from_its_beginning():
    """Each of them has a traceback of its own."""
    words = words_of(TASKS)
    assert words.cause == "ValueError: bad batch 17"
    assert words.lines[0].strip() == (
        "+ Exception Group Traceback (most recent call last):"
    )
    assert any("KeyError: 'other'" in line for line in words.lines)


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 1, in <module>
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 2, in bad
    | ValueError: bad batch 17
    +------------------------------------
"""


def test_a_chain_that_begins_with_a_group_is_shown_from_its_beginning():
    caused = "The above exception was the direct cause of the following exception:"
    written = f"{GROUP}\n{caused}\n\n{KEY}"
    words = last_words(written.encode(), 1)
    assert words.cause == "KeyError: 1"
    assert "\n".join(words.lines) == written


def test_what_python_ignores_is_not_the_cause():
    written = written_by(IGNORED)
    assert "Exception ignored" in written
    assert last_words(written.encode(), 1).cause == "ValueError: bad batch 17"


def test_an_exception_of_a_thread():
    assert words_of(THREAD, 3).cause == "ValueError: in a thread"


@pytest.mark.parametrize(
    ("lines", "code", "cause"),
    [
        (3, 3, "E: survived"),  # it may be
        (27, 3, "E: survived"),
        (28, 3, "step 27"),
        (57, 1, "E: survived"),
        (58, 1, "step 57"),
        (2, -9, ""),
        (30, -6, ""),
        (2, -6, "E: survived"),
    ],
)
def test_an_exception_of_long_ago(lines, code, cause):
    """Python may have ended of it 20 lines before, and 50 if the exit code is its own.

    Seven others may be of its message.
    """
    steps = "".join(f"\nstep {number}" for number in range(lines))
    words = last_words(f"{STACK}E: survived{steps}".encode(), code)
    assert words.cause == cause
    assert words.is_traceback == cause.startswith("E")


FREE = "free(): invalid"
ABORT = "Fatal Python error: Aborted"
ABORTED = f"""\
{ABORT}

Thread 0x00007f1 (most recent call first):
  <no Python frame>"""
FRAMES = """\
Thread 0x00007f2 (most recent call first):
  File "train.py", line 88 in step
  File "train.py", line 99 in <module>"""
CXX = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 0 Rank 1] Watchdog terminated with exception: CUDA error: bad
CUDA kernel errors might be reported at some other call."""
CXX_STACK = "\n".join(f"frame #{i}: c10d::Foo{i} + 0x114 (0x7f)" for i in range(60))
# A thread of C++ ends the process. The frames of the main thread are also there.
WATCHDOG = f"""\
{CXX}

Exception raised from c10_cuda_check at /pytorch/c10/cuda/x.cpp:43:
{CXX_STACK}

{ABORTED}

{FRAMES}

Extension modules: numpy"""
BAD_CUDA = "[PG 0 Rank 1] Watchdog terminated with exception: CUDA error: bad"
SHOWN_WATCHDOG = f"{CXX}\n{ABORT}\n{FRAMES}"
SEGFAULT = "Fatal Python error: Segmentation fault"
IN_FORK = 'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in x'
OURS = '  File "/x/torchrun_hpc/preload/worker.py", line 70 in run\n  File "run.py"'
HINT = '\n\nfrom user code:\n  File "x.py", line 3'
LOGGED = "[W1122 10:00:00.1 x.cpp:1] bye"
QUOTED = '"Traceback (most recent call last):\\n x"'
BOX = "╭── Traceback (most recent call last) ──╮\n│ x │\n╰──╯\nE: 1"
COLOURS = (
    "\x1b[31m+- \x1b[1mTraceback \x1b[0;2m(most recent call last)\x1b[m -\n| x |\n+-+\n"
    "\x1b[1;35mE\x1b[0m: \x1b[35mbad\x1b[0m"
)
WITHOUT_COLOURS = "+- Traceback (most recent call last) -\n| x |\n+-+\nE: bad"


@pytest.mark.parametrize(
    ("written", "code", "cause", "shown"),
    [
        ("", 1, "", ""),
        ("\n\n", 1, "", ""),
        ("usage\nx.py: error: no\n\n", 2, "x.py: error: no", "usage\nx.py: error: no"),
        ("1%\r 2%\r 3%", -9, "", "1%\n 2%\n 3%"),
        ("1%\r 2%\r 3%", 3, "3%", "1%\n 2%\n 3%"),
        ("step 17", 137, "", "step 17"),
        ("x\tend", 1, "x       end", "x       end"),
        ("\x1b[2Jnew\udcff", 1, "\\x1b[2Jnew\\xff", "\\x1b[2Jnew\\xff"),
        ("terminate called\n  what():  x\n", -6, "x", "terminate called\n  what():  x"),
        # tracebacks
        (KEY, 1, "KeyError: 1", KEY),
        (re.sub("^", "[rank3]: ", KEY, flags=re.MULTILINE), 1, "KeyError: 1", KEY),
        (f"{KEY}\n[rank0]:{LOGGED}", 1, "KeyError: 1", KEY),
        (f"{KEY}\nmore\n\n{LOGGED}", 1, "KeyError: 1", f"{KEY}\nmore"),
        (f"{STACK}[rank0]:{LOGGED}\nE: 1", 1, "E: 1", f"{STACK}{LOGGED}\nE: 1"),
        (f"{KEY}{HINT}", 1, "KeyError: 1", f"{KEY}{HINT}"),
        (STACK, 1, "", STACK.rstrip()),  # the rest was never written
        (BOX, 1, "E: 1", BOX),
        (COLOURS, 1, "E: bad", WITHOUT_COLOURS),
        (f"{QUOTED}\nbye", 1, "bye", f"{QUOTED}\nbye"),
        # A progress bar has written no end of its line, and writes it once more.
        (f"\r 1%| 1/99 {KEY}\n\r 2%| 2/99", 1, "KeyError: 1", f"{KEY}\n\n 2%| 2/99"),
        # crashes
        (f"{SEGFAULT}\n\nExtension: x", 139, SEGFAULT, SEGFAULT),
        (WATCHDOG, -6, BAD_CUDA, SHOWN_WATCHDOG),
        (f"{FREE}\n{ABORTED}", -6, FREE, f"{FREE}\n{ABORT}"),
        # which runs no Python
        (ABORTED, -6, ABORT, ABORT),
        # of a fork: without the frames of the launcher
        (f"{SEGFAULT}\n\n{IN_FORK}\n{OURS}", -11, SEGFAULT, f"{SEGFAULT}\n{IN_FORK}"),
        # after an exception that was survived
        (f"{KEY}\n{WATCHDOG}", -6, BAD_CUDA, SHOWN_WATCHDOG),
        # because of the exception
        (f"{KEY}\n{ABORTED}", -6, "KeyError: 1", KEY),
    ],
)
def test_what_is_written(written, code, cause, shown):
    words = last_words(written.encode(errors="surrogateescape"), code)
    assert words.cause == cause
    assert "\n".join(words.lines) == shown


def test_the_middle_of_a_long_one_is_cut():
    stack = [f'  File "x.py", line {number}' for number in range(100)]
    words = last_words("\n".join([STACK.rstrip(), *stack, "E: 1"]).encode(), 1)
    assert len(words.lines) == 30
    assert words.lines[0] == "Traceback (most recent call last):"
    assert words.lines[8] == "  ... 74 lines left out ..."
    assert words.lines[9] == stack[80]
    assert words.lines[-1] == "E: 1"


@given(st.binary(max_size=3000) | st.text(max_size=3000).map(str.encode), st.integers())
def test_whatever_is_written(written, code):
    words = last_words(written, code)
    assert len(words.lines) <= 30
    for line in (words.cause, *words.lines):
        assert line.isprintable()
    assert len(json.dumps([words.cause, *words.lines])) <= SENT


def test_lines_that_are_too_long():
    words = last_words("\n".join(["\u4e2d" * 5000] * 50).encode(), 1)
    assert len(words.lines) == 20
    assert len(json.dumps([words.cause, *words.lines])) <= SENT
