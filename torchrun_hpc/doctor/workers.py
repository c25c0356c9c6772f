"""The processes of this node that run torch's collective operations.

They may hang in an import, be stopped, or be killed: whoever has started them waits no
longer than it wants to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any, cast

from torchrun_hpc import wire
from torchrun_hpc.doctor.results import no_torch
from torchrun_hpc.failures.failure import ending
from torchrun_hpc.failures.last_words import last_words
from torchrun_hpc.failures.worker import end_of
from torchrun_hpc.host import network
from torchrun_hpc.planning.endpoints import LOOPBACK
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from torchrun_hpc.doctor.collectives import Settings
    from torchrun_hpc.doctor.results import Collective, Torch

# The beginning of the problem where it is not known which worker hangs.
NO_END = "no end"

_PROGRAM = ("-m", "torchrun_hpc.doctor.collectives")
# Seconds: to be killed, where it may hang in the kernel; between two questions.
_KILL_TIMEOUT = 2.0
_POLL = 0.5


class _Worker:
    """One process.

    Attributes:
        rank: Its rank: on this node, until it gets that in the job.
        torch: What it has found; ``None`` until that has come.
        backend: What has run the operations; empty until it is done.
        problem: How it has failed; empty if it has not.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self.rank = rank
        self.torch: Torch | None = None
        self.backend = self.problem = ""
        self._unread = b""  # the beginning of a line
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - see close()
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, *_PROGRAM],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environ),
            start_new_session=True,
        )
        self._stdin = cast("IO[bytes]", self.process.stdin)
        self._stdout = cast("IO[bytes]", self.process.stdout)

    def send(self, settings: Settings) -> None:
        """Let it start; a pipe has room for this, whether it is read or not."""
        self.rank = settings["rank"]
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(wire.to_line(settings))

    def fileno(self) -> int:
        """Return what `select` waits for."""
        return self._stdout.fileno()

    def read(self) -> list[Collective]:
        """Read what it has written, or find that it has ended; one of them is known."""
        piece = os.read(self.fileno(), 2**16)
        if not piece:
            self.problem = self._ending()
        *lines, self._unread = (self._unread + piece).split(b"\n")
        rows = []
        for message in filter(None, map(_parsed, lines)):
            if self.torch is None:
                self.torch = message
            elif "done" in message:
                self.backend = message["done"]
            else:
                rows.append(message)
        return rows

    def _ending(self) -> str:
        """Say how it has ended, and why."""
        self.process.kill()  # without effect, unless it has closed its output only
        code = self.wait(_KILL_TIMEOUT)
        cause = last_words(end_of(self._stderr.fileno()), code).cause
        return ": ".join(filter(None, (ending(code), cause)))

    def wait(self, timeout: float) -> int:
        """Wait for its end, after it was killed, and return its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return -signal.SIGKILL

    def close(self) -> None:
        """Close its files."""
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()


class Workers:
    """The processes of this node that run torch's collective operations.

    They import torch at once, and end with this process, or with `close`.

    Args:
        count: How many.
        environ: Their environment.
        address: Where their store listens, if they are the first ones: a number.

    Attributes:
        address: The same.
        port: The store's, which is kept free for it.
    """

    def __init__(
        self, count: int, environ: Mapping[str, str], address: str = LOOPBACK
    ) -> None:
        self.address = address
        self._reserved = network.bound_socket(address, 0)
        self.port: int = self._reserved.getsockname()[1]
        self._workers: list[_Worker] = []
        self._problem = ""
        try:
            for rank in range(count):
                self._workers.append(_Worker(rank, environ))
        except OSError as error:
            self.close()
            self._problem = f"{sys.executable} cannot be started: {error.strerror}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def torch(self, timeout: float) -> Torch:
        """Wait, so many seconds at most, until the first one has imported torch."""
        end, problem = time.monotonic() + timeout, self._problem
        while not problem:
            first = self._workers[0]
            if first.torch is not None:
                return first.torch
            if first.problem:
                problem = f"the process that imports it {first.problem}"
            elif time.monotonic() >= end:
                problem = f"it is not imported within {timeout:g} s"
            else:
                _read([first], end)
        return no_torch(problem)

    def run(
        self,
        settings: Sequence[Settings],
        timeout: float,
        on_row: Callable[[Collective], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[str, str]:
        """Run the operations, once.

        Args:
            settings: Those of each process.
            timeout: Seconds for all.
            on_row: Gets each result that is this node's to report, as it comes.
            is_over: Says whether they have failed elsewhere, so that waiting is in
                vain; asked twice a second, and after each result.

        Returns:
            The backend, and why it has not come to an end; at least one is empty.
        """
        end, last = time.monotonic() + timeout, ""
        self._reserved.close()
        for worker, own in zip(self._workers, settings, strict=True):
            worker.send(own)
        while not all(worker.backend for worker in self._workers):
            for worker in self._workers:
                if worker.problem:
                    return "", f"worker {worker.rank} {worker.problem}"
            if is_over():
                return "", ""
            if time.monotonic() >= end:
                return "", f"{NO_END} within {timeout:g} s{last}"
            for row in _read(self._workers, min(end, time.monotonic() + _POLL)):
                on_row(row)
                last = f", after {row['operation']} of {row['size']} B"
        return self._workers[0].backend, ""

    def close(self) -> None:
        """Kill all, whatever they do."""
        self._reserved.close()
        for worker in self._workers:
            worker.process.kill()
        end = time.monotonic() + _KILL_TIMEOUT
        for worker in self._workers:
            worker.wait(max(end - time.monotonic(), 0))
            worker.close()
        self._workers.clear()


def _parsed(line: bytes) -> Any:
    """Return what a line tells; nothing if it is another program's."""
    with contextlib.suppress(WireError):
        message = wire.from_json(line)
        return message if isinstance(message, dict) else {}
    return {}


def _read(workers: Sequence[_Worker], end: float) -> list[Collective]:
    """Wait until one of these writes something, or ends; return results."""
    waiting = [each for each in workers if not (each.backend or each.problem)]
    ready, _, _ = select.select(waiting, [], [], max(end - time.monotonic(), 0))
    return [row for worker in ready for row in worker.read()]
