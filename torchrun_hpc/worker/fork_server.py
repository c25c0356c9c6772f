"""The fork server: it has imported what the workers need, and forks them.

    agent ──fork──► fork server ──fork──► workers

It splits off right after the import, before the agent has threads, a store, or has
asked for a GPU: a process that has used the driver of a GPU cannot be forked.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
from typing import TYPE_CHECKING

from torchrun_hpc.worker import process, requests, script
from torchrun_hpc.worker.parent import end_with_parent
from torchrun_hpc.worker.requests import PYTHON

if TYPE_CHECKING:
    from torchrun_hpc.worker.requests import Request

_WAKEUPS = 4096  # bytes, one for each signal


class ForkServer:
    """Forks a worker for each request.

    Args:
        connection: Leads to the agent.
        agent: Number of the agent's process.
        files: Numbers of the open files of the modules that were imported.
    """

    def __init__(
        self, connection: socket.socket, agent: int, files: frozenset[int]
    ) -> None:
        self._connection = connection
        self._agent = agent
        self._files = files
        self._answers: dict[int, socket.socket] = {}  # by the workers' process numbers

    def serve(self) -> None:
        """Fork workers until the agent ends; in a worker, run its script."""
        script.run(self._wait_for_worker().command[len(PYTHON) :])

    def _wait_for_worker(self) -> Request:
        """Serve, and return in the workers only.

        All signals are blocked: what is sent to the agent's group is not meant for it.
        """
        os.setsid()
        end_with_parent(self._agent)()
        gc.freeze()  # what the workers do not look at, they need not copy
        process.set_title("torchrun_hpc: fork server")
        ended, wakes = socket.socketpair()
        ended.setblocking(False)  # noqa: FBT003
        wakes.setblocking(False)  # noqa: FBT003
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        while True:
            ready, _, _ = select.select([self._connection, ended], [], [])
            if ended in ready:
                ended.recv(_WAKEUPS)
                self._collect()
            if self._connection not in ready:
                continue
            received = requests.receive(self._connection)
            if received is None:
                os._exit(0)
            request, files = received
            if self._fork(files):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for opened in (self._connection, ended, wakes, *self._answers.values()):
                    opened.close()
                process.take_over(request, files, self._files)
                return request

    def _fork(self, files: list[int]) -> bool:
        """Fork a worker; return whether this is it."""
        server, answers = os.getpid(), socket.socket(fileno=files.pop())
        try:
            pid = os.fork()
        except OSError as error:
            pid = None
            answers.send(b"error %d" % (error.errno or errno.EAGAIN))
        if pid == 0:
            os.setsid()
            end_with_parent(server)()
            answers.send(b"started %d" % os.getpid())
            answers.close()
            return True
        for number in files:
            os.close(number)
        if pid is not None:
            self._answers[pid] = answers
        return False

    def _collect(self) -> None:
        """Answer with the exit codes of the workers that have ended."""
        while self._answers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with self._answers.pop(pid) as answers, contextlib.suppress(OSError):
                answers.send(b"%d" % os.waitstatus_to_exitcode(status))
