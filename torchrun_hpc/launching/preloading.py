"""``--hpc-preload``: import once, split the fork server off, let it start the workers.

What cannot be preloaded is left to each worker, which is started by exec then. A
message says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from torchrun_hpc.errors import count
from torchrun_hpc.launching import environment, signals
from torchrun_hpc.planning.preload import READ_AT_START, not_used
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process
from torchrun_hpc.worker import SplitOff, requests, script
from torchrun_hpc.worker.fork_server import ForkServer
from torchrun_hpc.worker.process import open_files
from torchrun_hpc.worker.requests import PYTHON, ForkedWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchrun_hpc.errors import Message
    from torchrun_hpc.planning.inputs import Preload

# Libraries read these when they are loaded: OpenMP's, MKL, OpenBLAS.
_READ_AT_IMPORT = (*READ_AT_START, "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")

# They do, when they are imported.
_READERS = ("torch", "numpy")

# Files of the drivers of NVIDIA, AMD and Intel.
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")

_END_TIMEOUT = 1.0  # seconds

_OPEN_FILES, _THREADS = Path("/proc/self/fd"), Path("/proc/self/task")


class _ImpossibleError(Exception):
    """Says why each worker has to import by itself."""


class Preloaded:
    """The connection to the fork server, if there is one.

    Attributes:
        server: Number of its process; 0 if there is none.
        problem: Why there is none; ``None`` if there is one.
    """

    def __init__(self, preload: Preload) -> None:
        self._preload = preload
        self._connection: socket.socket | None = None
        self._environ: Mapping[str, str] = {}
        self.server = 0
        self.problem: Message | None = None

    def start(self, words: Sequence[str]) -> None:
        """Import the modules, and split off the fork server, if that is possible.

        Args:
            words: The script, or ``-m`` and a module, and its arguments.

        Raises:
            SplitOff: In the process of the fork server.
        """
        front, arguments = script.search_path(words), sys.argv
        own = sys.path[: 0 if script.is_safe_path() else 1]
        # To import as the script would do it.
        sys.path[: len(own)], sys.argv = front, script.arguments(words)
        try:
            _check_interpreter(sys.orig_argv)
            before = open_files()
            self._environ = _import(self._preload)
            files = frozenset(open_files() - before)
            _check_gpus(files)
            _check_threads()
            self._connection, self.server = _split_off(files)
        except _ImpossibleError as reason:
            self._give_up(str(reason))
        with contextlib.suppress(ValueError):  # a module has taken it out
            for path in front:
                sys.path.remove(path)
        sys.path[:0], sys.argv = own, arguments

    def _give_up(self, reason: str) -> None:
        self.problem = not_used(self._preload, reason)
        self.end()

    def end(self) -> None:
        """End the fork server; what it has used counts as used by this process."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        with contextlib.suppress(psutil.Error):
            psutil.Process(self.server).wait(_END_TIMEOUT)

    def check(self, environ: Mapping[str, str]) -> None:
        """See that the modules have read the same variables as the workers get."""
        if self._connection is None:
            return
        for name in sorted({*environ, *self._environ}):
            then, now = self._environ.get(name), environ.get(name)
            if name.startswith(_READ_AT_IMPORT) and then != now:
                self._give_up(
                    f"{name} was {then or 'not set'} when they were imported, and is "
                    f"{now or 'not set'} for the workers: export it"
                )
                break

    def fork(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdout: Any,
        stderr: Any,
    ) -> ForkedWorker | None:
        """Start a worker; return ``None`` if it has to be started by exec.

        Args:
            command: Its command line.
            environ: Its environment.
            stdout: An open file, or ``None`` for that of this process.
            stderr: The same.

        Raises:
            OSError: There can be no more processes.
        """
        if self._connection is None or tuple(command[: len(PYTHON)]) != PYTHON:
            return None
        request = requests.request_of(command, environ)
        own, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [
            0,
            1 if stdout is None else stdout.fileno(),
            2 if stderr is None else stderr.fileno(),
            answers.fileno(),
        ]
        try:
            with answers:
                requests.send(self._connection, request, files)
            return ForkedWorker(command, own)
        except (EOFError, ConnectionError):
            self._give_up("the fork server has ended")
            if self.problem is not None:
                console.write(self.problem, "warning")
            return None


def _check_interpreter(command: Sequence[str]) -> None:
    """See that Python was started as the workers would be: with ``-u``, at most."""
    if sys.platform != "linux":
        raise _ImpossibleError("only Linux ends workers together with their agent")
    for word in command[1:]:
        if not word.startswith("-") or word.startswith(("-m", "-c")):
            return
        if word != "-u":
            raise _ImpossibleError(f"python {word} is for the launcher only")


def _import(preload: Preload) -> Mapping[str, str]:
    """Import the modules, and return the variables that there were."""
    late = [name for name in _READERS if name in sys.modules]
    if late and preload.variables:
        names = ", ".join(preload.variables)
        text = f"{late[0]} had to be imported before {names} could be set: export that"
        raise _ImpossibleError(text)
    folder = Path.cwd()
    with environment.with_variables(preload.variables):
        for name in preload.modules:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001, PERF203
                said = str(error).partition("\n")[0]
                text = f"cannot be imported ({type(error).__name__}: {said})"
                raise _ImpossibleError(f"{name} {text}") from None
        if Path.cwd() != folder:
            os.chdir(folder)
            raise _ImpossibleError("the import changes the working directory")
        return dict(process.environment())


def _check_gpus(files: Iterable[int]) -> None:
    """See that no driver of a GPU was initialised, after which there is no fork."""
    links = (_OPEN_FILES / str(number) for number in files)
    names = [str(link.readlink()) for link in links]
    found = [name for name in names if name.startswith(_GPUS)]
    torch: Any = sys.modules.get("torch")
    devices = ("cuda", "xpu") if torch is not None else ()
    found += [
        f"torch.{device}"
        for device in devices
        if getattr(torch, device, None) and getattr(torch, device).is_initialized()
    ]
    if found:
        raise _ImpossibleError(f"the import has initialised a GPU ({found[0]})")


def _check_threads() -> None:
    """See that the modules have no threads, which a fork would not have.

    Libraries that can be forked end theirs before a fork: OpenBLAS does.
    """
    if len(list(_THREADS.iterdir())) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, of threads
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    threads = len(list(_THREADS.iterdir())) - 1
    if threads:
        own = ", ".join(thread.name for thread in threading.enumerate()[1:])
        text = f"the import leaves {count(threads, 'thread')} behind"
        raise _ImpossibleError(f"{text} ({own})" if own else text)


def _split_off(files: frozenset[int]) -> tuple[socket.socket, int]:
    """Split off the fork server; return the connection to it, and its number."""
    agent = os.getpid()
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        streams.flush(stream)
    ctypes.CDLL(None).fflush(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        server = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise _ImpossibleError(f"no fork: {error.strerror}") from None
    if server == 0:
        ours.close()
        signals.uninstall()
        streams.forget_at_exit()
        raise SplitOff(ForkServer(theirs, agent, files).serve)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    return ours, server
