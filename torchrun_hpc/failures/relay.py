"""The stderr of workers: passed on to the agent's stderr, and its end kept.

Each worker has a pipe and a thread of the agent. Everything is passed on at once, byte
for byte. If nobody reads the agent's stderr, a worker waits, as it would without a
pipe. If stderr is a terminal, or the same file as stdout, there is no pipe: it would
change the order of the two streams.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import subprocess
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, programs
from torchrun_hpc.failures.last_words import KEPT
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZE = 256 * 1024  # bytes of the pipe, and of a piece


def reason_not_to_read() -> str:
    """Return why the workers' stderr is not read; empty if it is."""
    if os.isatty(2):
        return "it is a terminal"
    with contextlib.suppress(OSError):  # one of them is closed
        if os.path.sameopenfile(1, 2):
            return "it is the same file as stdout"
    return ""


class Relay:
    """Passes on the stderr of this node's workers.

    ``clock`` returns seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.unread = reason_not_to_read()
        self._pipes: dict[int, _Pipe] = {}  # by process number

    def start(self, popen: Callable[[Any], Any], *, is_shown: bool = True) -> Any:
        """Start a worker, and pass on its stderr if possible.

        ``popen`` gets an open file for it, or ``None`` for the default one, and returns
        an object with a ``pid``. Unless ``is_shown``, stderr is only read.
        """
        pipe = None
        if not (self.unread and is_shown):
            # No more files or threads are possible.
            with contextlib.suppress(OSError, RuntimeError):
                pipe = _Pipe(self.clock, is_shown=is_shown)
        if pipe is None:
            return popen(None)
        with pipe.writer:
            worker = popen(pipe.writer)
        self._pipes[worker.pid] = pipe
        return worker

    def reads(self, pid: int) -> bool:
        """Return whether it reads this worker's stderr."""
        return pid in self._pipes

    def end_of(self, pid: int) -> tuple[bytes, float]:
        """Return the end of what an ended worker wrote, and when it failed.

        That is the time of its last traceback or crash, in seconds since 1970, or 0.
        """
        pipe = self._pipes[pid]
        pipe.read()
        return bytes(pipe.tail), pipe.failed_at

    def failed_at(self, pid: int) -> float:
        """Return when a worker, which may still run, wrote a traceback; 0 if not."""
        return self._pipes[pid].failed_at if pid in self._pipes else 0.0

    def forget_ended(self) -> None:
        """Forget the workers whose stderr is completely passed on."""
        pipes = self._pipes.items()
        self._pipes = {pid: pipe for pid, pipe in pipes if pipe.thread.is_alive()}

    def close(self, timeout: float) -> None:
        """Pass on the rest; leave later text to a separate process.

        Wait up to ``timeout`` seconds for the end of the pipes. Everything read is
        passed on, however long that takes: the workers would also have waited without a
        pipe.
        """
        end = time.monotonic() + timeout
        for pipe in self._pipes.values():
            pipe.thread.join(max(end - time.monotonic(), 0))
            pipe.is_left_behind = True
        for pipe in self._pipes.values():
            while pipe.thread.is_alive():  # a signal just before a wait does not end it
                pipe.thread.join(limits.RELAY_INTERVAL)


class _Pipe:
    """The stderr of one worker; its thread also passes on what other threads read."""

    def __init__(self, clock: Callable[[], float], *, is_shown: bool) -> None:
        self.tail = bytearray()
        self.failed_at = 0.0
        self.is_left_behind = False
        self._clock = clock
        self._is_shown = is_shown
        self._lock = threading.Lock()  # held while it is read
        self._unwritten: deque[bytes] = deque()  # pieces that were read
        reader, writer = os.pipe()
        self._reader = os.fdopen(reader, "rb", buffering=0)
        self.writer = os.fdopen(writer, "wb")
        os.set_blocking(reader, False)
        with contextlib.suppress(OSError):  # the user may have too many pipes
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _SIZE)
        self._waits = select.poll()
        self._waits.register(reader, select.POLLIN)
        self.thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self._reader.close()
            self.writer.close()
            raise

    def read(self) -> None:
        """Read what the worker has written, even if it cannot be passed on now."""
        with self._lock:
            piece = None if self._reader.closed else self._reader.read(_SIZE)
            if piece is None:  # there is nothing
                return
            self.tail += piece
            del self.tail[:-KEPT]
            if b"Traceback " in piece or b"Fatal Python error" in piece:
                self.failed_at = self._clock()
            self._unwritten.append(piece)

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # its next write fails, as ours did
            while piece := self._next(math.inf):
                if self._is_shown:
                    self._pass_on(piece)
        with self._lock, self._reader, contextlib.suppress(OSError):
            if self.is_left_behind:
                os.set_blocking(self._reader.fileno(), True)
                output = 2 if self._is_shown else subprocess.DEVNULL
                programs.start("pass_on", stdin=self._reader, stdout=output)

    def _pass_on(self, piece: bytes) -> None:
        """Write a piece, and the rest of its last line, before others write.

        A piece below ``PIPE_BUF`` is complete. The rest of a longer one follows soon.
        """
        end = time.monotonic() + limits.LINE_TIMEOUT
        is_long = len(piece) >= select.PIPE_BUF
        with streams.lock:
            streams.copy(piece)
            while is_long and piece and not piece.endswith((b"\n", b"\r")):
                piece = self._next(end)
                streams.copy(piece)

    def _next(self, end: float) -> bytes:
        while not self._unwritten and not self.is_left_behind:
            rest = min(end - time.monotonic(), limits.RELAY_INTERVAL)
            if rest < 0:
                return b""
            if self._waits.poll(rest * 1000):
                self.read()
        return self._unwritten.popleft() if self._unwritten else b""
