"""The fork server: it imports what the workers need, and forks them.

    agent ──fork──► fork server ──fork──► workers

It splits off before the agent has threads, a store, or a GPU: a process that has used a
GPU driver cannot be forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import struct
from dataclasses import replace
from multiprocessing.connection import wait  # select(2) is limited to 1024 files
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.failures.worker import exit_code_of
from torchrun_hpc.host import procfs
from torchrun_hpc.preload import imports, recorder, requests, worker
from torchrun_hpc.preload.hidden import HiddenModules, Renewal, packages
from torchrun_hpc.preload.imports import ForkError
from torchrun_hpc.preload.plan import TORCH
from torchrun_hpc.preload.requests import PYTHON
from torchrun_hpc.preload.worker import end_with_parent
from torchrun_hpc.schedulers.process import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.workers import Preload
    from torchrun_hpc.preload.requests import Request

READY = b"ready"  # sent after all imports; any other answer is the reason against forks

_SIGNAL = struct.Struct("I8xI112x")  # number and sender, in linux/signalfd.h
_SIGNAL_SET = b"\xff" * 128  # all, as a sigset_t of glibc and musl


class Before(NamedTuple):
    """This process before an import: packages, open files by number, variables."""

    packages: set[str]
    files: set[int]
    environ: Mapping[str, str]


class ForkServer:
    """Imports what `preload` says, and forks a worker for each request.

    `words` are the script, or ``-m`` and a module, and its arguments. `before` is this
    process's state before it imported torch.
    """

    def __init__(self, words: Sequence[str], preload: Preload, before: Before) -> None:
        self._words = words
        self._preload = preload
        self._before = before
        self._files: set[int] = set()  # that modules have opened
        self._apart = packages() - before.packages - {TORCH}
        self._changed: dict[str, str] = {}  # variables that modules have set
        self._agent = 0
        self._running: dict[int, socket.socket] = {}  # by the workers' process numbers
        self._ended: dict[socket.socket, int] = {}  # until it is closed

    def serve(self, connection: socket.socket, agent: int) -> None:
        """Fork workers until the agent ends; in a worker, run its script.

        All signals are blocked, because schedulers also send theirs to the agent.
        """
        os.setsid()
        end_with_parent(agent)()
        self._agent = agent
        worker.set_title("torchrun_hpc: fork server")
        answer = READY
        try:
            self._import()
        except (ForkError, OSError) as reason:
            answer = str(reason).encode()
        with contextlib.suppress(OSError):  # the agent may have ended
            connection.sendall(answer)
        if answer != READY:
            os._exit(0)
        request, questions = self._wait_for_worker(connection)
        pid = os.getpid()
        hidden = packages() - self._before.packages
        HiddenModules(hidden, self._apart, Renewal(self._before.environ))
        try:
            worker.run_script(request.command[len(PYTHON) :])
        except BaseException as error:
            is_error: Any = getattr(error, "code", True)  # of a SystemExit
            if is_error and os.getpid() == pid:  # no child of the script
                recorder.leave(questions, error)
            raise

    def _import(self) -> None:
        """Import all modules; raise `ForkError` if this process cannot be forked."""
        worker.prepare_script(self._words)
        gc.disable()
        worker.set_variables(self._preload.variables)
        environ = dict(environment())
        imports.import_all(self._preload.modules)
        now = environment().items()
        self._changed = {k: v for k, v in now if environ.get(k) != v}
        gc.freeze()  # so that the workers' collectors do not copy these pages
        self._files = procfs.open_files() - self._before.files
        if self._preload.is_default and (problem := imports.build_problem()):
            raise ForkError(problem)
        imports.check_names(worker.script_folder(self._words))
        imports.check_devices(self._files)
        imports.check_openmp(is_bound=self._preload.is_bound)
        imports.check_threads()

    def _wait_for_worker(
        self, connection: socket.socket
    ) -> tuple[Request, socket.socket]:
        signals = ctypes.CDLL(None).signalfd(-1, _SIGNAL_SET, 0)
        while True:
            ready = wait([connection, signals, *self._ended])
            while wait([signals], 0):  # before a sender's number is freed
                self._take_signal(*_SIGNAL.unpack(os.read(signals, _SIGNAL.size)))
            for answers in self._ended.keys() & {*ready}:
                # The agent has closed its end, so it signals the number no longer.
                os.waitpid(self._ended.pop(answers), 0)
                answers.close()
            if connection not in ready:
                continue
            if (received := requests.receive(connection)) is None:
                os._exit(0)
            request, files = received
            questions = socket.socket(fileno=files.pop())
            if self._fork(files):
                os.close(signals)
                for opened in (connection, *self._running.values(), *self._ended):
                    opened.close()
                environ = {**request.environ, **self._changed}
                request = replace(request, environ=environ)
                kept = {*self._files, questions.fileno()}
                worker.take_over(request, files, kept)
                recorder.start(questions)  # on this worker's CPUs
                return request, questions
            questions.close()

    def _fork(self, files: list[int]) -> bool:
        """Fork a worker; return whether this process is the worker."""
        server, answers = os.getpid(), socket.socket(fileno=files.pop())
        try:
            pid = os.fork()
        except OSError as error:
            pid = None
            answers.send(b"error %d" % (error.errno or errno.EAGAIN))
        if pid == 0:
            os.setsid()
            end_with_parent(server, self._agent)()
            answers.send(b"started %d" % os.getpid())
            answers.close()
            return True
        for number in files:
            os.close(number)
        if pid is not None:
            self._running[pid] = answers
        return False

    def _take_signal(self, number: int, sender: int) -> None:
        """Pass a worker's signal to its parent on to the agent."""
        if number == signal.SIGCHLD:
            self._tell_ends()
            return
        with contextlib.suppress(OSError):  # the sender has ended
            if os.getsid(sender) in {*self._running, *self._ended.values()}:
                os.kill(self._agent, number)

    def _tell_ends(self) -> None:
        """Tell the agent the exit codes of workers that have ended."""
        for pid in [*self._running]:
            code = exit_code_of(pid)
            if code is not None:
                answers = self._running.pop(pid)
                self._ended[answers] = pid
                with contextlib.suppress(OSError):
                    answers.send(b"%d" % code)
