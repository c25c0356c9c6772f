"""What a worker wrote last: the traceback that it ended with, or what there is else.

Python's own form of a traceback is known, in which torch puts ``[rank0]:`` in front of
each line, and that of ``rich``; and what ``faulthandler`` writes when a process
crashes.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LAUNCHER = "/torchrun_hpc/worker/"  # in the frames of a fork, below its script
KEPT = 64 * 1024  # bytes that are kept of what a worker writes
SENT = 8 * 1024  # bytes of its last words that leave its node

_SHOWN = 30  # lines of a traceback, the middle of which is cut
_HEAD = 8  # of them, those in front of the cut
_LAST = 20  # lines that are shown without a traceback
# Lines that others may write between a traceback and the end of a process whose exit
# code is that of an exception, 1.
_BEHIND_EXCEPTION = 50
_FRAMES = 10  # the innermost ones, of a crash
_MESSAGE = 8  # further lines of an exception's message
_LONGEST = 240  # characters of a line
_KILLED, _SIGNALS = 128, 65

_LINE_END = re.compile(r"\r\n|\n|\r")
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch/distributed/__init__.py
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")  # of Python 3.13, and rich
# Python's own, and in the frame of a box; others quote it, with more behind it.
_TRACEBACK = re.compile(
    r"(Exception Group )?Traceback \(most recent call last\)(:|[ +╮─-]*)\s*$"
)
_FRAME_OF_BOX = " \t|+╭─-"  # what may be in front of it; a progress bar has more
_IN_GROUP = re.compile(r"\s+\|")
# One of a group: ``  | ValueError: text``, below frames that are indented more.
_MEMBER = re.compile(r"[\s|]*\| (?P<exception>[^\W\d][\w.]*(: .*)?)$")
_CHAINED = re.compile(
    "The above exception was the direct cause of|During handling of the above exception"
)
_NOT_FATAL = re.compile("Exception ignored ")
_FATAL = "Fatal Python error: "
_CXX = "terminate called "  # libstdc++, in front of SIGABRT
_CXX_STACK = re.compile(r"frame #\d+:|Exception raised from ")  # c10::Error
_WHAT = "what():"
_FRAME = "  File "
_THREAD = re.compile(r"(Current thread|Thread) 0x")
# Behind a traceback: what others log while the process ends.
_LOG = re.compile(r"(\[rank\d+\]:)?\[?[WEIF]\d{4}")
_OTHERS = re.compile(rf"{_LOG.pattern}|Exception |Traceback |{_FATAL}|{_CXX}")
_SOURCE = re.compile(r"\[\S+\.(cc|cpp|cu|h|hpp):\d+\] ")  # of torch and gloo
_OF_STACK = re.compile(rf"[\s|+│╭╰─]|$|{_LOG.pattern}")


class LastWords(NamedTuple):
    """What a worker wrote last.

    Attributes:
        cause: Why it ended, in one line; empty if it wrote nothing.
        lines: What to show; the last one is the newest.
        is_traceback: Whether this is how Python, or a crash, ended it.
    """

    cause: str = ""
    lines: tuple[str, ...] = ()
    is_traceback: bool = False


def last_words(tail: bytes, code: int) -> LastWords:
    """Find the last words in the end of what a worker wrote to stderr.

    Args:
        tail: The end of it.
        code: Its exit code; below 0 the signal that killed it.
    """
    lines = _lines(tail)
    if _KILLED < code < _KILLED + _SIGNALS:  # what a shell makes of a signal
        code = _KILLED - code
    found = None
    if code not in (0, -signal.SIGKILL):  # that one comes from outside
        crash = _crash(lines) if code < 0 else None
        behind = _BEHIND_EXCEPTION if code == 1 else _LAST
        has_frames = crash and crash.lines[-1].startswith(_FRAME)
        found = crash if has_frames else _traceback(lines, behind) or crash
    if found is None:
        rest = lines[-_LAST:]
        # What it wrote before it was killed need not be the reason.
        says_why = rest if code > 0 else _what(rest)
        found = LastWords(_cause(says_why[-1]) if says_why else "", tuple(rest))
    return _limited(found)


def _lines(tail: bytes) -> list[str]:
    """Split the end of what was written; a traceback begins with a line of its own."""
    text = _COLOUR.sub("", tail.decode(errors="backslashreplace"))
    lines: list[str] = []
    for written in _LINE_END.split(text):
        line = _RANK.sub("", written, count=1)
        header = _TRACEBACK.search(line)
        if header and line[: header.start()].strip(_FRAME_OF_BOX):
            lines.append(line[: header.start()])
            line = line[header.start() :]
        lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _traceback(lines: Sequence[str], most: int) -> LastWords | None:
    """Return the last traceback that ended the process.

    Args:
        lines: What it wrote.
        most: How many lines may be behind it: a process may have survived what it
            reported long before.
    """
    count = len(lines)
    for start in reversed(range(count)):
        if not _TRACEBACK.search(lines[start]) or _IN_GROUP.match(lines[start]):
            continue
        if start and _NOT_FATAL.match(lines[start - 1]):
            continue
        stack = itertools.takewhile(_OF_STACK.match, lines[start + 1 :])
        end = start + 1 + len([*stack])
        cause = _of_group(lines[start:end]) or "".join(lines[end : end + 1])
        limit = min(end + _MESSAGE, count)
        end = next((i for i in range(end + 1, limit) if _OTHERS.match(lines[i])), limit)
        crash = next((i for i in range(end, count) if _FATAL in lines[i]), count)
        if crash - end > most:
            return None
        while not lines[end - 1].strip():
            end -= 1
        shown = lines[_first_of_chain(lines, start) : end]
        return LastWords(cause, tuple(shown), is_traceback=True)
    return None


def _of_group(block: Sequence[str]) -> str:
    """Return the first exception of a group that is none itself; empty without."""
    if "Exception Group" not in block[0]:
        return ""
    matches = filter(None, map(_MEMBER.match, block))
    members = [match["exception"] for match in matches]
    plain = [member for member in members if "ExceptionGroup" not in member]
    return next(iter(plain or members), "")


def _first_of_chain(lines: Sequence[str], start: int) -> int:
    """Return where the first of several exceptions begins that led to one another."""
    before = next((i for i in reversed(range(start)) if lines[i].strip()), 0)
    if _CHAINED.match(lines[before]):
        for earlier in reversed(range(before)):
            if _TRACEBACK.search(lines[earlier]):
                return _first_of_chain(lines, earlier)
    return start


def _crash(lines: Sequence[str]) -> LastWords | None:
    """Return why a process crashed, and the innermost frames of a thread.

    It is the current one, or the main thread, which comes last, where the current one
    runs no Python.
    """
    fatal = next((i for i in reversed(range(len(lines))) if _FATAL in lines[i]), None)
    if fatal is None:
        return None
    first = next((i for i in range(fatal - 1, -1, -1) if _CXX in lines[i]), None)
    if first is not None:
        kept = [line for line in lines[first:fatal] if not _CXX_STACK.match(line)]
        reason = [line for line in kept if line.strip()][:_MESSAGE]
    else:  # the C library says why it aborts, in one line
        near = [line for line in lines[max(fatal - 2, 0) : fatal] if line.strip()]
        reason = near[-1:] if "Aborted" in lines[fatal] else []
    cause = (_what(reason) or reason[-1:] or [lines[fatal]])[0]
    threads = [i for i in range(fatal, len(lines)) if _THREAD.match(lines[i])]
    current = [i for i in threads if lines[i].startswith("Current ")] or threads[-1:]
    below = lines[current[0] + 1 :] if current else ()
    frames = [*itertools.takewhile(_is_frame, below)][:_FRAMES]
    thread = [lines[i] for i in current[:1]] if frames else []
    shown = *reason, lines[fatal], *thread, *frames
    return LastWords(_cause(cause), shown, is_traceback=True)


def _is_frame(line: str) -> bool:
    return line.startswith(_FRAME) and LAUNCHER not in line


def _what(lines: Sequence[str]) -> list[str]:
    """Return the lines in which C++ says what an exception was."""
    return [line for line in lines if line.strip().startswith(_WHAT)]


def _cause(line: str) -> str:
    return line.strip().removeprefix(_WHAT).strip()


def _limited(words: LastWords) -> LastWords:
    """Cut what is too long, and make control characters visible."""
    lines = words.lines
    left_out = len(lines) - _SHOWN
    if left_out > 0:
        tail = len(lines) - (_SHOWN - _HEAD - 1)
        cut = f"  ... {left_out + 1} lines left out ..."
        lines = *lines[:_HEAD], cut, *lines[tail:]
    cause = _SOURCE.sub("", words.cause[: 2 * _LONGEST])
    longest = _LONGEST
    while True:
        shown = [_visible(line, longest) for line in (cause, *lines)]
        if len(json.dumps(shown)) <= SENT:
            return words._replace(cause=shown[0], lines=tuple(shown[1:]))
        longest //= 2


def _visible(line: str, longest: int) -> str:
    line = line.expandtabs()
    if len(line) > longest:
        line = line[: longest - 4] + " ..."
    escaped = (c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return "".join(escaped)
