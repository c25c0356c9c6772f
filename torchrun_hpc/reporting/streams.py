"""The standard streams. A launch continues, whatever is wrong with them."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torchrun_hpc import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

_STDERR = 2

# Held during a write, so that it stays in one piece.
lock = threading.RLock()

# Other exceptions come from signal handlers, and must pass.
_FAULTS = (OSError, ValueError, RuntimeError)


def open_closed() -> None:
    """Open /dev/null for each closed standard stream. The workers inherit it.

    Otherwise the next open file or socket would get the stream's number and messages.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203 - there are three
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003


def write(text: str, stream: TextIO | None) -> None:
    """Write to a stream. If it is broken, only the text is lost.

    The text bypasses Python's buffer. Otherwise Python would write it again at exit,
    and exit with code 120.
    """
    if stream is None:
        return
    # A broken line is better than none.
    has_lock = lock.acquire(timeout=limits.WRITE_TIMEOUT)
    try:
        _write(text, stream)
    finally:
        if has_lock:
            lock.release()


def _write(text: str, stream: TextIO) -> None:
    with contextlib.suppress(*_FAULTS):
        descriptor = _descriptor(stream)
        if descriptor is None:
            stream.write(text)
            stream.flush()
            return
        rest = text.encode(stream.encoding, "backslashreplace")
        while rest and _takes_more(descriptor):
            # If it can be written to, PIPE_BUF bytes do not block: pipe(7).
            rest = rest[os.write(descriptor, rest[: select.PIPE_BUF]) :]


def copy(data: bytes) -> None:
    """Write bytes to standard error, however long that takes; a full disk loses them.

    Raises:
        BrokenPipeError: Nobody will ever read them.
    """
    try:
        while data:
            # It can be non-blocking, and other processes also write there.
            select.select([], [_STDERR], [])
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(_STDERR, data) :]
    except BrokenPipeError:
        raise
    except OSError:
        pass


def forgive_at_exit(stream: TextIO | None) -> None:
    """At exit, discard a stream's unwritable text, which would change the exit code."""
    if stream is not None:
        atexit.register(_flush_or_discard, stream)


def forget_at_exit() -> None:
    """Undo `forgive_at_exit`."""
    atexit.unregister(_flush_or_discard)


def flush(stream: TextIO | None) -> bool:
    """Write a stream's buffer; return whether that worked."""
    try:
        if stream is not None:
            stream.flush()
    except _FAULTS:
        return False
    return True


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, with its buffer."""
    with contextlib.suppress(*_FAULTS), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Restore the default of SIGPIPE for a program that replaces this process.

    Python ignores it, and the program would inherit that: ``yes | head`` would not end.
    torchrun's workers, started with ``subprocess``, also have the default.
    """
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _flush_or_discard(stream: TextIO) -> None:
    if not flush(stream):
        discard(stream)


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of a stream, unless a program has replaced the stream."""
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def _takes_more(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(limits.WRITE_TIMEOUT * 1000))
