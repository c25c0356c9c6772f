"""Passes on what workers write to stderr, and keeps the end of it.

Each worker has a pipe, and the agent a thread for it. Byte for byte, and at once, all
goes to the agent's own stderr; a worker waits there if nobody reads, as it would
without a pipe. If stderr is a terminal, or the same file as stdout, there is no pipe:
the order of the two streams is worth more.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import subprocess
import sys
import termios
import threading
import time
from typing import TYPE_CHECKING, Any

from torchrun_hpc.failures.last_words import KEPT
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = 256 * 1024  # bytes: of the pipe, and of a piece
_REST_TIMEOUT = 0.1  # seconds to wait for the rest of a line
_PAUSE = 0.01  # seconds

# For what workers leave behind: it copies until the last of these processes has ended.
_COPY = f"""
import os
while piece := os.read(0, {_SIZE}):
    while piece:
        piece = piece[os.write(1, piece):]
"""


def reason_not_to_read() -> str:
    """Say why the workers' stderr is not read; empty if it is."""
    if os.isatty(2):
        return "it is a terminal"
    with contextlib.suppress(OSError):  # one of them is closed
        if os.path.sameopenfile(1, 2):
            return "it is the same file as stdout"
    return ""


class Relay:
    """Passes on the stderr of the workers of this node.

    Attributes:
        unread: Why it does not, as `reason_not_to_read`.
    """

    def __init__(self) -> None:
        self.unread = reason_not_to_read()
        self._pipes: dict[int, _Pipe] = {}  # by process number

    def start(self, popen: Callable[[Any], Any], *, is_shown: bool = True) -> Any:
        """Start a worker whose stderr is passed on, if that is possible.

        Args:
            popen: Starts it: gets the open file that is to be its stderr, ``None`` for
                the one that it would have; returns an object with a ``pid``.
            is_shown: Whether it is passed on; else it is read only.
        """
        try:
            reader, writer = (None, None) if self.unread and is_shown else os.pipe()
        except OSError:  # no more files
            reader = writer = None
        if reader is None or writer is None:
            return popen(None)
        with contextlib.suppress(OSError, AttributeError):  # a user may have many
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _SIZE)  # new in Python 3.10
        try:
            with open(writer, "wb") as stderr:  # noqa: PTH123 - a number
                worker = popen(stderr)
        except BaseException:
            os.close(reader)
            raise
        self._pipes[worker.pid] = _Pipe(reader, is_shown=is_shown)
        return worker

    def reads(self, pid: int) -> bool:
        """Say whether it reads what this worker writes."""
        return pid in self._pipes

    def end_of(self, pid: int, timeout: float) -> tuple[bytes, float]:
        """Return the end of what a worker wrote, which has ended, and when it failed.

        Args:
            pid: Its number.
            timeout: Seconds to wait for the rest: processes that it has started may
                write for ever.

        Returns:
            The bytes, and the time of the last traceback or crash in them, in seconds
            since 1970; 0 without.
        """
        pipe = self._pipes[pid]
        end = time.monotonic() + timeout
        while not pipe.is_read() and time.monotonic() < end:
            time.sleep(_PAUSE)
        return bytes(pipe.tail[-KEPT:]), pipe.failed_at

    def close(self, timeout: float) -> None:
        """Pass on the rest; leave what comes later to a process of its own.

        Args:
            timeout: Seconds to wait for the end of all pipes.
        """
        end = time.monotonic() + timeout
        for pipe in self._pipes.values():
            pipe.thread.join(max(end - time.monotonic(), 0))
            if pipe.thread.is_alive():
                pipe.leave_behind()
        self._pipes.clear()


class _Pipe:
    """The stderr of one worker.

    Attributes:
        tail: The end of what it wrote.
        failed_at: When it wrote a traceback; 0 if it has not.
        thread: Passes it on.
    """

    def __init__(self, reader: int, *, is_shown: bool) -> None:
        self.tail = bytearray()
        self.failed_at = 0.0
        self._reader = reader
        self._is_shown = is_shown
        self._lock = threading.Lock()  # held while it is read, and kept
        self._is_open = True
        self._waits = select.poll()
        self._waits.register(reader, select.POLLIN)
        self.thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self.thread.start()

    def is_read(self) -> bool:
        """Say whether all that was written has been read."""
        unread = array.array("i", [0])
        with self._lock:
            if self._is_open:
                fcntl.ioctl(self._reader, termios.FIONREAD, unread)
        return not unread[0]

    def leave_behind(self) -> None:
        """Let a process of its own pass on the rest, whoever writes it."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                with contextlib.suppress(OSError):
                    subprocess.Popen(  # noqa: S603
                        [sys.executable, "-ISc", _COPY],
                        stdin=self._reader,
                        stdout=2 if self._is_shown else subprocess.DEVNULL,
                        start_new_session=True,
                    )
                os.close(self._reader)

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            while piece := self._read():
                if self._is_shown:
                    with streams.exclusive():
                        streams.copy(piece)
                        self._pass_on_rest(piece)
        with self._lock:
            if self._is_open:  # its next write fails, as ours did
                self._is_open = False
                os.close(self._reader)

    def _pass_on_rest(self, piece: bytes) -> None:
        """Pass on the rest of a line, before others write.

        Whatever the pipe had room for is there as a whole. Where a worker wrote more,
        it is about to write the rest.
        """
        while (
            not piece.endswith(b"\n")
            and len(piece) >= select.PIPE_BUF
            and self._waits.poll(_REST_TIMEOUT * 1000)
        ):
            piece = self._read()
            streams.copy(piece)

    def _read(self) -> bytes:
        """Wait for the next piece; it is empty at the end."""
        self._waits.poll()
        with self._lock:
            if not self._is_open:
                return b""
            piece = os.read(self._reader, _SIZE)
            self.tail += piece
            if len(self.tail) > 2 * KEPT:
                del self.tail[:-KEPT]
        if b"Traceback (most " in piece or b"Fatal Python error" in piece:
            self.failed_at = time.time()
        return piece
