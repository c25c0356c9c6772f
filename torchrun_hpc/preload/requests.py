"""The protocol between an agent and its fork server.

The agent sends a `Request` for each worker, with five open files: standard input,
output, error, and two sockets. On the first socket, the fork server sends the process
number, or the error of the fork; later the exit code. The agent closes its end when
torch has the code: until then, no other process gets this number. If the other end is
closed early, the fork server and all its workers have ended. The second socket is for
questions to the worker, see `recorder`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait  # select(2) is limited to 1024 files
from typing import TYPE_CHECKING

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.stacks.calls import AT_END
from torchrun_hpc.wire import AnyText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# torchrun starts a worker's Python with these words.
PYTHON = (sys.executable, "-u")

_LENGTH = 8  # bytes before a request: its length
_FILES = 5
_ANSWER = 32  # bytes, at most
_FORK_ANSWER = 2**17  # bytes of a worker's answer, at most

_LIMITS = tuple(
    sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")})
)


@dataclass(frozen=True)
class Request:
    """A worker to start, with everything that an exec would pass on.

    `command` is Python, its option ``-u``, and what it runs. `ignored` and `blocked`
    are signal numbers. `limits` are number, soft and hard limit of each resource.
    """

    command: list[AnyText]
    environ: Mapping[AnyText, AnyText]
    ignored: list[int]
    blocked: list[int]
    limits: list[tuple[int, int, int]]
    cpus: list[int]


def request_of(command: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Return a request with the signals, limits and CPUs of this thread."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    ignored = {number for number in handlers if handlers[number] == signal.SIG_IGN}
    return Request(
        command=[*command],
        environ=environ,
        ignored=sorted(ignored - {signal.SIGPIPE, signal.SIGXFSZ}),  # Python's own
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        limits=[(number, *resource.getrlimit(number)) for number in _LIMITS],
        cpus=sorted(os.sched_getaffinity(0)),
    )


def send(connection: socket.socket, request: Request, files: Sequence[int]) -> None:
    """Send a request with its open files."""
    text = wire.to_line(wire.encode(request))
    socket.send_fds(connection, [len(text).to_bytes(_LENGTH, "big")], files)
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[Request, list[int]] | None:
    """Receive a request, and its open files; ``None`` at the end, or without files."""
    files: list[int] = []
    with contextlib.suppress(OSError):  # the agent has ended without reading all
        head, files, _, _ = socket.recv_fds(connection, _LENGTH, _FILES)
    if len(files) < _FILES:
        return None
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        part = connection.recv(length - len(text))
        if not part:
            return None
        text += part
    return wire.decode(Request, wire.from_json(text)), files


class ForkedWorker:
    """A worker of the fork server, with the part of ``Popen`` that torch uses.

    It calls ``lost`` if the fork server ends first. The constructor raises `OSError` if
    no more processes are possible, `EOFError` if the fork server has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        answers: socket.socket,
        questions: socket.socket,
        lost: Callable[[], None],
    ) -> None:
        self.args = command
        self._questions = questions
        self._left = b""
        self._asking = threading.Lock()  # one question at a time
        self._answers = answers
        self._lost = lost
        self._lock = threading.Lock()
        self._code: int | None = None
        kind, _, number = answers.recv(_ANSWER).partition(b" ")
        if not kind:
            raise EOFError
        if kind == b"error":
            raise OSError(int(number), os.strerror(int(number)))
        if kind != b"started":  # its exit code: killed for memory, for example
            text = f"the worker ended before it began, with exit code {int(kind)}"
            raise ChildProcessError(errno.ECHILD, text)
        self.pid = int(number)

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative signal if killed; ``None`` while it runs.

        Reading it does not free the process number, which may still be signalled.
        """
        with self._lock:
            if self._code is None and wait([self._answers], 0):
                # A signal's exception may interrupt this, so it must be repeatable.
                number = self._answers.recv(_ANSWER, socket.MSG_PEEK)
                self._code = int(number) if number else -signal.SIGKILL
                self._receive(0)  # its last words
                self._questions.close()
                if not number:
                    self._lost()
            return self._code

    def poll(self) -> int | None:
        """Return its exit code, and free its process number; ``None`` while it runs."""
        code = self.returncode
        if code is not None:
            self._answers.close()
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code; or raise `TimeoutExpired`."""
        limit = math.inf if timeout is None else timeout
        pause = limits.FORK_PAUSE
        waiting.until(lambda: self.returncode is not None, limit, pause=pause)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, limit)
        return code

    def told(self, question: bytes, timeout: float) -> bytes:
        """Return a `ForkAnswer` within ``timeout`` seconds, the last one, or nothing.

        Without a ``question``, the worker is not asked.
        """
        with self._asking:
            self._receive(0)  # late answers, which are not used
            if not question or self._left or self._code is not None:
                return self._left
            with contextlib.suppress(OSError):  # it has just ended, or does not read
                self._questions.send(question, socket.MSG_DONTWAIT)
            return self._receive(timeout)

    def _receive(self, timeout: float) -> bytes:
        answer = b""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while wait([self._questions], 0 if answer else timeout):
                answer = self._questions.recv(_FORK_ANSWER, socket.MSG_DONTWAIT)
                if answer[:1] == AT_END:
                    self._left = answer[1:]
                elif not answer:
                    break
        return self._left or answer

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs; torch 2.0 ends workers this way."""
        if self.returncode is None:
            os.kill(self.pid, number)
