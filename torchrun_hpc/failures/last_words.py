"""The last words of a worker: the traceback at its end, or whatever it wrote last.

Known forms: Python's own traceback, also with torch's ``[rank0]:`` before each line;
the traceback of ``rich``; and the report of ``faulthandler`` on a crash.
"""

from __future__ import annotations

import json
import re
import signal
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.failures.failure import signal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

LAUNCHER = "/torchrun_hpc/preload/"  # in a fork's frames, below its script
KEPT = 64 * 1024  # bytes kept of a worker's stderr
SENT = 8 * 1024  # bytes of last words that leave the node

_SHOWN = 30  # lines of a traceback; its middle is cut
_HEAD = 8  # lines before the cut
_LAST = 20  # lines shown without a traceback
# Lines that can follow a traceback before the process ends with an exception's exit
# code, 1.
_BEHIND_EXCEPTION = 50
_FRAMES = 10  # innermost frames of a crash
_MESSAGE = 8  # further lines of an exception's message
_LONGEST = 240  # characters of a line

_LINE_END = re.compile(r"\r\n|\r")
# Added by torch/distributed/__init__.py.
_RANK = re.compile(r"^(.*?)\[rank\d+\]: ?", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;:]*m")  # from Python 3.13 and rich
# Python's own header, plain or in rich's box. A quoted header is followed by text.
_TRACEBACK = r"(Exception Group )?Traceback \(most recent call last\)(:|[ +╮─-]*)\s*$"
_BOX = r" \t|+╭─-"  # may come before a header; a progress bar has other characters
_HEADER = re.compile(rf"(?!\s+\|)[{_BOX}]*{_TRACEBACK}")  # not of a group's member
_BEFORE_HEADER = re.compile(
    rf"([^\n{_BOX}][{_BOX}]*)(?<!Exception Group )(?={_TRACEBACK})", re.MULTILINE
)
# A member of a group: ``  | ValueError: text``, below frames that are indented more.
_MEMBER = re.compile(r"^[ |]*\| ([^\W\d][\w.]*(?:: .*)?)$", re.MULTILINE)
_CHAINED = re.compile("The above exception was |During handling of the above ")
_NOT_FATAL = "Exception ignored "
_FATAL = "Fatal Python error: "
_CXX = "terminate called "  # libstdc++, before SIGABRT
_CXX_STACK = re.compile(r"frame #\d+:|Exception raised from ")  # c10::Error
_WHAT = "what():"
_FRAME = re.compile(f"  File (?!.*{LAUNCHER})")  # not the launcher's
# After a traceback: log lines from the end of the process.
_LOG = r"\[?[WEIF]\d{4}"
_OF_STACK = re.compile(rf"[\s|+│╭╰─]|$|{_LOG}")
_OTHERS = re.compile(rf"{_LOG}|Exception |Traceback |{_FATAL}|{_CXX}")
_SOURCE = re.compile(r"\[\S+\.(cc|cpp|cu|h|hpp):\d+\] ")  # from torch and gloo


class LastWords(NamedTuple):
    """The last lines of a worker."""

    cause: str = ""  # why it ended, in one line; empty if it wrote nothing
    lines: tuple[str, ...] = ()  # what to show; the last one is the newest
    is_traceback: bool = False  # whether a traceback or a crash report ended it


def last_words(tail: bytes, code: int) -> LastWords:
    """Find the last words in the end of a worker's stderr."""
    lines = _lines(tail)
    number = signal_of(code)
    words = None
    if code and number != signal.SIGKILL:  # SIGKILL comes from outside
        crash = _crash(lines) if number else None
        behind = _BEHIND_EXCEPTION if code == 1 else _LAST
        has_frames = crash and _FRAME.match(crash.lines[-1])
        words = crash if has_frames else _traceback(lines, behind) or crash
    if words is None:
        rest = lines[-_LAST:]
        # The lines before a kill are not always the reason.
        says_why = rest if code and not number else _what(rest)
        words = LastWords("".join(says_why[-1:]), tuple(rest))
    return _limited(words)


def _lines(tail: bytes) -> list[str]:
    text = _COLOUR.sub("", tail.decode(errors="backslashreplace"))
    text = _RANK.sub(r"\1", _LINE_END.sub("\n", text))
    text = _BEFORE_HEADER.sub(r"\1\n", text).rstrip()
    return text.split("\n") if text else []


def _traceback(lines: Sequence[str], most: int) -> LastWords | None:
    """Return the traceback that ended the process, and the chain before it.

    If more than ``most`` lines follow the last traceback, the process has survived it.
    Then return ``None``.
    """
    first = start = None
    before = ""
    for number, line in enumerate(lines):
        if _HEADER.match(line) and not before.startswith(_NOT_FATAL):
            if start is None or not _CHAINED.match(before):
                first = number
            start = number
        if line.strip():
            before = line
    if start is None:
        return None
    count = len(lines)
    end = start + 1 + len([*takewhile(_OF_STACK.match, lines[start + 1 :])])
    cause = _of_group(lines[start:end]) or "".join(lines[end : end + 1])
    limit = min(end + _MESSAGE, count)
    end = next((n for n in range(end + 1, limit) if _OTHERS.match(lines[n])), limit)
    crash = next((n for n in range(end, count) if _FATAL in lines[n]), count)
    if crash - end > most:
        return None
    while not lines[end - 1].strip():
        end -= 1
    return LastWords(cause, tuple(lines[first:end]), is_traceback=True)


def _of_group(block: Sequence[str]) -> str:
    """Return a group's first exception that is no group; empty if there is none."""
    if "Exception Group" not in block[0]:
        return ""
    members: list[str] = _MEMBER.findall("\n".join(block))
    plain = [member for member in members if "ExceptionGroup" not in member]
    return next(iter(plain or members), "")


def _crash(lines: Sequence[str]) -> LastWords | None:
    """Return why a process crashed, and the innermost frames of a thread.

    It is the current thread, or the main thread if that runs no Python.
    """
    fatal = _last(_FATAL, lines)
    if fatal is None:
        return None
    begin = _last(_CXX, lines[:fatal])
    if begin is not None:
        kept = [line for line in lines[begin:fatal] if not _CXX_STACK.match(line)]
        reason = [line for line in kept if line.strip()][:_MESSAGE]
    else:  # the C library explains an abort in one line
        near = [line for line in lines[max(fatal - 2, 0) : fatal] if line.strip()]
        reason = near[-1:] if "Aborted" in lines[fatal] else []
    cause = [lines[fatal], *reason, *_what(reason)][-1]
    shown = [*reason, lines[fatal]]
    below = lines[fatal:]
    if thread := _last("Current thread 0x", below) or _last("Thread 0x", below):
        frames = [*takewhile(_FRAME.match, below[thread + 1 :])][:_FRAMES]
        shown += [below[thread], *frames] if frames else []
    return LastWords(cause, tuple(shown), is_traceback=True)


def _last(text: str, lines: Sequence[str]) -> int | None:
    return max((n for n, line in enumerate(lines) if text in line), default=None)


def _what(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip().startswith(_WHAT)]


def _limited(words: LastWords) -> LastWords:
    lines = words.lines
    left_out = len(lines) - _SHOWN + 1
    if left_out > 1:
        cut = f"  ... {left_out} lines left out ..."
        lines = *lines[:_HEAD], cut, *lines[_HEAD + left_out :]
    cause = words.cause.strip().removeprefix(_WHAT).strip()
    cause = _SOURCE.sub("", cause[: 2 * _LONGEST])
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
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
