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
import termios
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from torchrun_hpc import programs
from torchrun_hpc.failures.last_words import KEPT
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_SIZE = 256 * 1024  # bytes: of the pipe, and of a piece
_REST_TIMEOUT = 0.1  # seconds to wait for the rest of a line
_PAUSE = 0.01  # seconds
_INTERVAL = 0.5  # seconds until the reader sees what `read_rest` has read


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

    Args:
        clock: Returns the time in seconds since 1970.

    Attributes:
        clock: Returns the time in seconds since 1970; `Watch` takes it from here.
        unread: Why it does not, as `reason_not_to_read`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.unread = reason_not_to_read()
        self._pipes: dict[int, _Pipe] = {}  # by process number

    def start(self, popen: Callable[[Any], Any], *, is_shown: bool = True) -> Any:
        """Start a worker whose stderr is passed on, if that is possible.

        Args:
            popen: Starts it: gets the open file that is to be its stderr, ``None`` for
                the one that it would have; returns an object with a ``pid``.
            is_shown: Whether it is passed on; otherwise it is only read.
        """
        is_read = not (self.unread and is_shown)
        opened = _open_pipe(self.clock, is_shown=is_shown) if is_read else None
        if opened is None:
            return popen(None)
        pipe, writer = opened
        try:
            with open(writer, "wb") as stderr:  # noqa: PTH123 - a number
                worker = popen(stderr)
        except BaseException:
            pipe.thread.join(_REST_TIMEOUT)  # it closes the other end
            raise
        self._pipes[worker.pid] = pipe
        return worker

    def reads(self, pid: int) -> bool:
        """Return whether it reads what this worker writes."""
        return pid in self._pipes

    def end_of(self, pid: int) -> tuple[bytes, float]:
        """Return the end of what a worker wrote, which has ended, and when it failed.

        Args:
            pid: Its number.

        Returns:
            The bytes, and the time of the last traceback or crash in them, in seconds
            since 1970; 0 without.
        """
        pipe = self._pipes[pid]
        pipe.read_rest()
        return bytes(pipe.tail), pipe.failed_at

    def failed_at(self, pid: int) -> float:
        """Return when a worker wrote a traceback, which may still run; 0 if not."""
        return self._pipes[pid].failed_at if pid in self._pipes else 0.0

    def forget_ended(self, but: Collection[int]) -> None:
        """Forget the workers of which all is passed on.

        Args:
            but: Numbers of those that were started just now.
        """
        for pid, pipe in list(self._pipes.items()):
            if pid not in but and not pipe.thread.is_alive():
                del self._pipes[pid]

    def close(self, timeout: float) -> None:
        """Pass on the rest; leave what comes later to a process of its own.

        What has been read is passed on, however long that takes, because the workers
        would have waited for it, too.

        Args:
            timeout: Seconds to wait for the end of all pipes.
        """
        end = time.monotonic() + timeout
        for pipe in self._pipes.values():
            pipe.thread.join(max(end - time.monotonic(), 0))
        for pipe in self._pipes.values():
            pipe.leave_behind()
        self._pipes.clear()


def _open_pipe(
    clock: Callable[[], float], *, is_shown: bool
) -> tuple[_Pipe, int] | None:
    """Open a pipe that is read; ``None`` if there can be no more files, or threads."""
    try:
        reader, writer = os.pipe()
    except OSError:
        return None
    with contextlib.suppress(OSError, AttributeError):  # a user may have many
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _SIZE)  # new in Python 3.10
    try:
        return _Pipe(reader, clock, is_shown=is_shown), writer
    except RuntimeError:
        os.close(reader)
        os.close(writer)
        return None


class _Pipe:
    """The stderr of one worker.

    Attributes:
        tail: The end of what it wrote.
        failed_at: When it wrote a traceback; 0 if it has not.
        thread: Passes it on.
    """

    def __init__(
        self, reader: int, clock: Callable[[], float], *, is_shown: bool
    ) -> None:
        self.tail = bytearray()
        self.failed_at = 0.0
        self._clock = clock
        self._reader = reader
        self._is_shown = is_shown
        self._lock = threading.Lock()  # held while it is read, and kept
        self._unwritten: deque[bytes] = deque()  # read for the report, ahead of time
        self._is_open = True
        self._is_writing = False
        self._waits = select.poll()
        self._waits.register(reader, select.POLLIN)
        self.thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self.thread.start()

    def read_rest(self) -> None:
        """Read what its worker has written, also if it cannot be passed on now."""
        unread = array.array("i", [0])
        with self._lock:
            if self._is_open:
                fcntl.ioctl(self._reader, termios.FIONREAD, unread)
                if unread[0]:
                    self._unwritten.append(self._keep(os.read(self._reader, unread[0])))

    def leave_behind(self) -> None:
        """Let a process of its own pass on what is still to come, whoever writes it."""
        with self._lock:
            if self._is_open and self.thread.is_alive():
                self._is_open = False
                with contextlib.suppress(OSError):
                    output = 2 if self._is_shown else subprocess.DEVNULL
                    programs.start("pass_on", stdin=self._reader, stdout=output)
                os.close(self._reader)
        while self._is_writing or self._unwritten:
            self.thread.join(_PAUSE)

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            while piece := self._read():
                if self._is_shown:
                    with streams.exclusive():
                        streams.copy(piece)
                        self._pass_on_line(piece)
                self._is_writing = False
        self._is_writing = False
        with self._lock:
            self._unwritten.clear()
            if self._is_open:  # its next write fails, as ours did
                self._is_open = False
                os.close(self._reader)

    def _pass_on_line(self, piece: bytes) -> None:
        """Pass on the rest of a line, before others write.

        Whatever the pipe had room for is there as a whole. Where a worker wrote more,
        it is about to write the rest.
        """
        end = time.monotonic() + _REST_TIMEOUT
        if len(piece) < select.PIPE_BUF:
            return
        while not piece.endswith((b"\n", b"\r")):
            rest = end - time.monotonic()
            if rest < 0 or not (self._unwritten or self._waits.poll(rest * 1000)):
                return
            piece = self._read()
            streams.copy(piece)
            if not piece:
                return

    def _read(self) -> bytes:
        """Wait for the next piece; it is empty at the end."""
        # What `read_rest` takes before this thread has woken up does not wake it.
        while not self._unwritten and not self._waits.poll(_INTERVAL * 1000):
            pass
        with self._lock:
            self._is_writing = True
            if self._unwritten:
                return self._unwritten.popleft()
            return self._keep(os.read(self._reader, _SIZE)) if self._is_open else b""

    def _keep(self, piece: bytes) -> bytes:
        """Keep the end of what was read."""
        self.tail += piece
        del self.tail[:-KEPT]
        if b"Traceback " in piece or b"Fatal Python error" in piece:
            self.failed_at = self._clock()
        return piece
