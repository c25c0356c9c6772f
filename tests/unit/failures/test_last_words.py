"""The last words of workers: Python's own, and whatever bytes there may be."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import traceback
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.failures.last_words import SENT, last_words, recorded

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
GROUP = """
raise ExceptionGroup("two of them", [ValueError("one"), TypeError("two")])
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


def lines_of(*lines: str) -> bytes:
    return "\n".join(lines).encode()


STACK = ("Traceback (most recent call last):", '  File "x.py", line 1, in <module>')


def written_by(program: str) -> bytes:
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
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        names.clear()  # as at its end
    return stderr.getvalue().encode()


def words_of(program: str, code: int = 1):
    return last_words(written_by(program), code)


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
def test_a_group():
    words = words_of(GROUP)
    assert words.cause == "ValueError: one"
    assert any("TypeError: two" in line for line in words.lines)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs groups")
def test_a_group_of_tasks_is_shown_from_its_beginning():
    """Each of them has a traceback of its own."""
    words = words_of(TASKS)
    assert words.cause == "ValueError: bad batch 17"
    assert words.lines[0].strip() == (
        "+ Exception Group Traceback (most recent call last):"
    )
    assert any("KeyError: 'other'" in line for line in words.lines)


def test_a_progress_bar_in_front():
    """It has written no end of its line, and writes it once more at the end."""
    stack = lines_of(*STACK, "E: 1", "")
    words = last_words(b"\r  1%|  | 1/99 " + stack + b"\r  2%|  | 2/99 \n", 1)
    assert words.cause == "E: 1"
    assert words.lines[:3] == (*STACK, "E: 1")


def test_what_python_ignores_is_not_the_cause():
    written = written_by(IGNORED)
    assert b"Exception ignored" in written
    assert last_words(written, 1).cause == "ValueError: bad batch 17"


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
    steps = (f"step {number}" for number in range(lines))
    words = last_words(lines_of(*STACK, "E: survived", *steps), code)
    assert words.cause == cause
    assert words.is_traceback == cause.startswith("E")


WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG 0 Rank 1] Watchdog terminated with exception: CUDA error: bad",
    "CUDA kernel errors might be reported at some other call.",
    "",
    "Exception raised from c10_cuda_check at /pytorch/c10/cuda/x.cpp:43:",
    *(f"frame #{number}: c10d::Foo{number} + 0x114 (0x7f)" for number in range(60)),
    "",
    "Fatal Python error: Aborted",
    "",
    "Thread 0x00007f1 (most recent call first):",
    "  <no Python frame>",
    "",
    "Thread 0x00007f2 (most recent call first):",
    '  File "train.py", line 88 in step',
    '  File "train.py", line 99 in <module>',
    "",
    "Extension modules: numpy",
)


def test_the_watchdog_of_nccl():
    """A thread of C++ ends the process; what the main thread did is there, too."""
    words = last_words(lines_of(*WATCHDOG), -6)
    assert words.cause.endswith("terminated with exception: CUDA error: bad")
    assert words.lines == (
        *WATCHDOG[:3],
        "Fatal Python error: Aborted",
        "Thread 0x00007f2 (most recent call first):",
        *WATCHDOG[-4:-2],
    )


def test_a_crash_of_a_process_that_runs_no_python():
    words = last_words(lines_of(*WATCHDOG[-11:-4], "  <no Python frame>"), -6)
    assert words.lines == ("Fatal Python error: Aborted",)


def test_a_crash_counts_more_than_an_exception_that_was_survived():
    written = lines_of(*STACK, "OSError: retry", *WATCHDOG)
    assert "CUDA error" in last_words(written, -6).cause


def test_an_abort_at_the_end_follows_from_the_exception():
    aborted = (*WATCHDOG[-11:-7], "  <no Python frame>")
    words = last_words(lines_of(*STACK, "KeyError: 1", *aborted), -6)
    assert words.cause == "KeyError: 1"


def test_hints_stand_behind_an_empty_line():
    written = lines_of(*STACK, "E: 1", "", "from user code:", '  File "x.py", line 3')
    assert last_words(written, 1).lines[-1] == '  File "x.py", line 3'


def test_the_launchers_frames_of_a_fork_are_left_out():
    ours = '  File "/x/site-packages/torchrun_hpc/worker/script.py", line 70 in run'
    written = lines_of(
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x1 (most recent call first):",
        '  File "train.py", line 3 in <module>',
        ours,
        '  File "<frozen runpy>", line 88 in _run_code',
    )
    assert last_words(written, -11).lines[-1] == '  File "train.py", line 3 in <module>'


@pytest.mark.parametrize(
    ("written", "code", "cause", "shown"),
    [
        (b"", 1, "", ()),
        (b"\n\n", 1, "", ()),
        (b"usage\nx.py: error: no\n\n", 2, "x.py: error: no", None),
        (b"1%\r 2%\r 3%", -9, "", ("1%", " 2%", " 3%")),
        (b"1%\r 2%\r 3%", 3, "3%", ("1%", " 2%", " 3%")),
        (b"terminate called\n  what():  gone\n", -6, "gone", None),
        (lines_of(*STACK, "KeyError: 1"), 1, "KeyError: 1", None),
        (
            lines_of(*(f"[rank3]: {line}" for line in (*STACK, "KeyError: 1"))),
            1,
            "KeyError: 1",
            (*STACK, "KeyError: 1"),
        ),
        (
            lines_of(*STACK, "E: CUDA", "more of it", "", "[W1122 10:00:00] bye"),
            1,
            "E: CUDA",
            (*STACK, "E: CUDA", "more of it"),
        ),
        (
            lines_of(*STACK, "KeyError: 1", "[rank0]:[W1122 10:00:00.1 x.cpp:1] bye"),
            1,
            "KeyError: 1",
            (*STACK, "KeyError: 1"),
        ),
        (
            lines_of(
                "╭── Traceback (most recent call last) ──╮", "│ x │", "╰──╯", "E: 1"
            ),
            1,
            "E: 1",
            None,
        ),
        (lines_of(*STACK), 1, "", STACK),  # the rest was never written
        (lines_of("free(): invalid", "Fatal Python error: Aborted"), -6, None, None),
        (b"\x1b[2Jnew\xff", 1, "\\x1b[2Jnew\\xff", None),
        (
            (
                b"\x1b[31m+- \x1b[1mTraceback \x1b[0;2m(most recent call last)\x1b[m -"
                b"\n| x |\n+--+\n\x1b[1;35mValueError\x1b[0m: \x1b[35mbad\x1b[0m"
            ),
            1,
            "ValueError: bad",
            None,
        ),
        (
            lines_of(*STACK, "[rank0]:[W1122 10:00:00.1 x.cpp:1] late", "KeyError: 1"),
            1,
            "KeyError: 1",
            None,
        ),
        (
            lines_of("Fatal Python error: Segmentation fault", "", "Extension: x"),
            139,
            "Fatal Python error: Segmentation fault",
            ("Fatal Python error: Segmentation fault",),
        ),
        (b"step 17", 137, "", ("step 17",)),
        (
            lines_of('{"error": "Traceback (most recent call last):\\n x"}', "bye"),
            1,
            "bye",
            None,
        ),
        (b"x\tend", 1, "x       end", None),
    ],
)
def test_what_is_written(written, code, cause, shown):
    words = last_words(written, code)
    if cause is None:
        cause = "free(): invalid"
    assert words.cause == cause
    if shown is not None:
        assert words.lines == shown


def test_the_middle_of_a_long_one_is_cut():
    stack = [f'  File "x.py", line {number}' for number in range(100)]
    words = last_words(lines_of(STACK[0], *stack, "E: 1"), 1)
    assert len(words.lines) == 30
    assert words.lines[0] == STACK[0]
    assert words.lines[8] == "  ... 73 lines left out ..."
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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            json.dumps(
                {
                    "message": {
                        "message": "KeyError: 1",
                        "extraInfo": {
                            "py_callstack": lines_of(*STACK, "KeyError: 1").decode(),
                            "timestamp": "1",
                        },
                    }
                }
            ),
            "KeyError: 1",
        ),
        ("", None),
        ("[]", None),
        ('{"message": "text"}', None),
        ('{"message": {"extraInfo": {"py_callstack": 3}}}', None),
    ],
)
def test_what_record_writes(text, cause):
    words = recorded(text)
    assert (words and words.cause) == cause
