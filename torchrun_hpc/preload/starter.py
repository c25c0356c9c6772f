"""Preloading: import once, split off the fork server, let it start the workers.

The agent imports only torch. The fork server imports all other modules, so that their
side effects do not reach the agent. If preloading fails, each worker is started by
exec. If the user has asked for preloading, a message gives the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from multiprocessing.connection import wait  # select(2) is limited to 1024 files
from typing import TYPE_CHECKING, Any

from torchrun_hpc import environment, limits, waiting
from torchrun_hpc.errors import Message, Setting
from torchrun_hpc.host.procfs import open_files
from torchrun_hpc.options.values import NONE
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.preload import SplitOff, imports, requests
from torchrun_hpc.preload.fork_server import READY, Before, ForkServer
from torchrun_hpc.preload.hidden import READ_AGAIN, packages
from torchrun_hpc.preload.imports import ForkError
from torchrun_hpc.preload.plan import READ_AT_START, TORCH, is_read
from torchrun_hpc.preload.requests import PYTHON, ForkedWorker
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process
from torchrun_hpc.variables import FAULT_HANDLER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOTHING = Preload((), Setting(NONE, "--hpc-preload"))

_LONGEST = 4096  # bytes of a reason


class Preloaded:
    """The connection to the fork server.

    `server` is the process number of the fork server; 0 without one.
    """

    def __init__(self, preload: Preload = _NOTHING) -> None:
        self._preload = preload
        self._connection: socket.socket | None = None
        self._environ: Mapping[str, str] = {}
        self._problem = ""
        self.server = 0

    def start(self, words: Sequence[str]) -> None:
        """Import torch, and split off the fork server if possible.

        ``words`` are the script, or ``-m`` and a module, and its arguments. Raise
        `SplitOff` in the process of the fork server.
        """
        variables = self._preload.variables
        try:
            _check_interpreter(sys.orig_argv)
            # If the command line has needed torch, it has already read the variables.
            early = {} if TORCH in sys.modules else variables
            before = packages() - {TORCH, "numpy"}, open_files()
            with environment.with_variables(early):
                if TORCH in self._preload.modules:
                    imports.import_all([TORCH])
                self._environ = dict(process.environment())
            imports.check_threads()
            server = ForkServer(words, self._preload, Before(*before, self._environ))
            self._connection, self.server = _split_off(server)
        except (ForkError, OSError) as problem:
            self._problem = str(problem)

    def check(self, environ: Mapping[str, str], *, is_reporter: bool) -> str:
        """Wait for the imports; return why the workers cannot be forks, or nothing.

        The imports must have seen the variables ``environ`` of the workers.
        """
        if self._connection is not None:
            problem = _answer(self._connection, self._preload, is_reporter=is_reporter)
            self._problem = problem or _difference(self._environ, environ)
        if self._problem:
            self.end()
        return self._problem

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdout: Any,
        stderr: Any,
    ) -> ForkedWorker | None:
        """Start a worker; return ``None`` if it must be started by exec.

        Without ``stdout`` and ``stderr``, use this process's own. Raise `OSError` if
        there can be no more processes.
        """
        if self._connection is None or tuple(command[: len(PYTHON)]) != PYTHON:
            return None
        request = requests.request_of(command, environ)
        ours, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asks, questions = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, err = stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2
        files = [0, out, err, answers.fileno(), questions.fileno()]
        try:
            with answers, questions:
                requests.send(self._connection, request, files)
            return ForkedWorker(command, ours, asks, self._lost)
        except (EOFError, ConnectionError):
            self._lost()
            return None

    def end(self) -> None:
        """End the fork server. Its resource usage then counts for this process."""
        if self._connection is None:
            return
        import psutil  # noqa: PLC0415 - slow to import

        self._connection.close()
        self._connection = None
        with contextlib.suppress(psutil.Error):
            psutil.Process(self.server).wait(limits.FORK_SERVER_TIMEOUT)
        self.server = 0

    def _lost(self) -> None:
        if self._connection is not None:
            self.end()
            problem = "the fork server has ended, perhaps killed"
            console.write(self._preload.not_used(problem), "warning")


def _check_interpreter(command: Sequence[str]) -> None:
    """Raise `ForkError` if Python has an option other than the workers' ``-u``."""
    for word in command[1:]:
        if not word.startswith("-") or word.startswith(("-m", "-c")):
            return
        if word != "-u":
            raise ForkError(f"python {word} applies only to the launcher")


def _difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which variable has changed that the import has read; empty if none."""
    for name in sorted({*then, *now}):
        was, is_now = then.get(name), now.get(name)
        is_early = name.startswith(READ_AT_START) and name != FAULT_HANDLER
        is_lost = is_early or (is_read(name) and not (is_now and name in READ_AGAIN))
        if is_lost and was != is_now:
            return (
                f"{name} was {was or 'not set'} at the import, but is "
                f"{is_now or 'not set'} for the workers. Export it"
            )
    return ""


def _split_off(server: ForkServer) -> tuple[socket.socket, int]:
    agent = os.getpid()
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        streams.flush(stream)
    ctypes.CDLL(None).fflush(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise ForkError(f"the fork failed: {error.strerror}") from None
    if pid == 0:
        ours.close()
        streams.forget_at_exit()
        raise SplitOff(lambda: server.serve(theirs, agent))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    return ours, pid


def _answer(connection: socket.socket, preload: Preload, *, is_reporter: bool) -> str:
    """Wait for the imports; return why there can be no forks, or an empty text."""

    def report(waited: float) -> None:
        text = f"the import of {preload.setting.value} has taken {waited:.0f} s so far"
        console.write(Message("HPC170", text))

    waiting.until(
        lambda: wait([connection], limits.WAIT_PAUSE),
        report=report,
        is_reporter=is_reporter,
        pause=0,
    )
    answer = connection.recv(_LONGEST)
    if answer == READY:
        return ""
    return answer.decode(errors="replace") or "an import ended the fork server"
