"""The standard streams: whatever is wrong with them, a launch goes on.

They may be closed, full, without a reader, or lead to a terminal that is gone; at the
start, or later.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds that a message waits for a reader who is late.
_PATIENCE = 1.0

_PIPE, _FILE_SIZE = signal.SIGPIPE, signal.SIGXFSZ

# Not every exception: those of signal handlers are to go through.
_FAULTS = (OSError, ValueError, RuntimeError)


def open_closed() -> None:
    """Lead standard input, output and error to /dev/null where they are closed.

    Otherwise the next file or socket gets their number, and whoever writes to standard
    error writes into it. The workers inherit them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203 - there are three
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003


def write(text: str, stream: TextIO | None) -> None:
    """Write to a stream that may be broken: then the text is lost, and nothing else.

    Past Python's buffer, in one piece: what it cannot write, it would try again, and
    end this process with exit code 120.

    Args:
        text: What to write.
        stream: Where to; ``None`` if there is none.
    """
    if stream is None:
        return
    with contextlib.suppress(*_FAULTS):
        descriptor = _descriptor(stream)
        if descriptor is None:
            stream.write(text)
            stream.flush()
            return
        rest = text.encode(stream.encoding, "backslashreplace")
        while rest and _takes_more(descriptor):
            # There is room for so much, if for anything: pipe(7).
            rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]


def forgive_at_exit(stream: TextIO | None) -> None:
    """Let what a stream does not take at the end not change the exit code."""
    if stream is not None:
        atexit.register(_flush_or_discard, stream)


def flush(stream: TextIO | None) -> bool:
    """Write what a stream has in its buffer; say whether it could."""
    try:
        if stream is not None:
            stream.flush()
    except _FAULTS:
        return False
    return True


def discard(stream: TextIO) -> None:
    """Lead a stream to /dev/null, with all that is in its buffer."""
    with contextlib.suppress(*_FAULTS), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Let a program that takes this one's place die of SIGPIPE, as any other does.

    Python ignores it, and a program would go on to do so: ``yes | head`` in a shell.
    Torchrun's workers, which are started with ``subprocess``, have it this way too.
    """
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (_PIPE, _FILE_SIZE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flush_or_discard(stream: TextIO) -> None:
    if not flush(stream):
        discard(stream)


def _descriptor(stream: TextIO) -> int | None:
    """Return the number of a file, if it is one of Python's own.

    A program may have put something in its place, which writes to more than that.
    """
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def _takes_more(descriptor: int) -> bool:
    """Wait a moment for room: nobody may be reading, with or without O_NONBLOCK."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(_PATIENCE * 1000))
