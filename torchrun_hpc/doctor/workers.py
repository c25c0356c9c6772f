"""The processes of this node that run torch's collective operations.

They may hang in an import, be stopped, or be killed: whoever has started them waits no
longer than it wants to.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, cast

from torchrun_hpc.doctor.results import Collective, Torch
from torchrun_hpc.failures.collection import WorkerFailure, ending
from torchrun_hpc.failures.last_words import KEPT, last_words
from torchrun_hpc.reporting.console import printable
from torchrun_hpc.reporting.description import check_form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from torchrun_hpc.doctor.collectives import Settings

_PROGRAM = ("-m", "torchrun_hpc.doctor.collectives")
_PIECE = 64 * 1024  # bytes
_LONGEST = 80  # characters that are shown of what is no result
_KILL_TIMEOUT = 2.0  # seconds: it may hang in the kernel
_GRACE = 0.3  # seconds from one failure to the one that it follows from


class _Worker:
    """One process.

    Attributes:
        rank: Its rank: on this node, until it gets that in the job.
        torch: What it has found; ``None`` if that has not come.
        backend: What has run the operations; empty until it is done.
        problem: How it has failed; empty if it has not.
        follows: Whether it has failed as if another one had before.
        is_open: Whether it may still write.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        self.rank = rank
        self.torch: Torch | None = None
        self.backend = ""
        self.problem = ""
        self.follows = False
        self.is_open = True
        self._unread = b""  # the beginning of a line
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - see close()
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, *_PROGRAM],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environ),
            start_new_session=True,
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self.stdout = cast("IO[bytes]", self._process.stdout)

    def send(self, settings: Settings) -> None:
        """Let it start; a pipe has room for this, whether it is read or not."""
        self.rank = settings["rank"]
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps(settings).encode() + b"\n")

    def read(self) -> list[Collective]:
        """Read what it has written, or find that it has ended; one of them is known."""
        piece = os.read(self.stdout.fileno(), _PIECE)
        if not piece:
            self._end()
        *lines, self._unread = (self._unread + piece).split(b"\n")
        return [row for line in lines for row in self._take(line)]

    def _take(self, line: bytes) -> list[Collective]:
        """Take a line, and return the result in it."""
        try:
            message = json.loads(line)
            if self.torch is None:
                check_form(message, Torch)
                self.torch = message
            elif "done" in message:
                check_form(message["done"], str)
                self.backend = message["done"]
            else:
                check_form(message, Collective)
                return [message]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = printable(line.decode(errors="replace"), _LONGEST)
            self.problem = f"has written what is no result: {text}"
            self.is_open = False
        return []

    def _end(self) -> None:
        """Find out how it has ended."""
        self.is_open = False
        if self.backend:
            return
        self.kill()  # without effect, unless it has closed its output only
        code = self.wait(_KILL_TIMEOUT)
        stderr = self._stderr.fileno()
        start = max(os.fstat(stderr).st_size - KEPT, 0)
        cause = last_words(os.pread(stderr, KEPT, start), code).cause
        failure = WorkerFailure(self.rank, 0, 0, 0, code, time.time(), cause)
        self.follows = failure.follows
        self.problem = ": ".join(filter(None, (ending(code), cause)))

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Wait for its end, after `kill`, and return its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return -signal.SIGKILL

    def close(self) -> None:
        """Close its files."""
        for file in (self._stdin, self.stdout, self._stderr):
            file.close()


class Workers:
    """The processes of this node that run torch's collective operations.

    They import torch at once, and end with this process, or with `close`.

    Args:
        count: How many.
        environ: Their environment. On two nodes NCCL_ALGO=Ring belongs into it: with a
            tree, both directions of a link carry more than NCCL counts, and its figures
            exceed the network's (nccl-tests, issue 196).
    """

    def __init__(self, count: int, environ: Mapping[str, str]) -> None:
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
        """Wait until the first process has imported torch.

        Args:
            timeout: Seconds.
        """
        end = time.monotonic() + timeout
        problem = self._problem
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
        return {
            "version": "",
            "import_s": 0.0,
            "problem": problem,
            "libraries": {},
            "gpus": 0,
        }

    def run(
        self,
        settings: Sequence[Settings],
        timeout: float,
        on_row: Callable[[Collective], None],
    ) -> tuple[str, str]:
        """Run the operations, once.

        Args:
            settings: Those of each process.
            timeout: Seconds for all, from now.
            on_row: Gets each result that is this node's to report, as it comes.

        Returns:
            The backend, and why it has not come to an end; one of them is empty.
        """
        if self._problem:
            return "", self._problem
        for worker, own in zip(self._workers, settings, strict=True):
            worker.send(own)
        end = time.monotonic() + timeout
        last = ""
        while not all(worker.backend for worker in self._workers):
            if any(worker.problem for worker in self._workers):
                return "", self._first_problem()
            if time.monotonic() >= end:
                return "", f"no end within {timeout:g} s{last or self._late()}"
            for row in _read(self._workers, end):
                on_row(row)
                last = f", after {row['operation']} of {_amount(row['size'])}"
        return self._workers[0].backend, ""

    def _late(self) -> str:
        """Say which workers have not come as far as that."""
        late = [str(worker.rank) for worker in self._workers if worker.torch is None]
        return f": torch is not imported by worker {', '.join(late)}" if late else ""

    def _first_problem(self) -> str:
        """Return the problem that the others follow from, which may come after them."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(w.is_open for w in self._workers):
            _read(self._workers, end)
        failed = [worker for worker in self._workers if worker.problem]
        first = min(failed, key=lambda worker: worker.follows)
        return f"worker {first.rank} {first.problem}"

    def close(self) -> None:
        """Kill all, whatever they do."""
        for worker in self._workers:
            worker.kill()
        end = time.monotonic() + _KILL_TIMEOUT
        for worker in self._workers:
            worker.wait(max(end - time.monotonic(), 0))
            worker.close()
        self._workers.clear()


def _read(workers: Sequence[_Worker], end: float) -> list[Collective]:
    """Wait until one of these processes writes something, or ends; return results.

    Args:
        workers: The processes.
        end: Until when, on the monotonic clock.
    """
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.is_open:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
        ready = selector.select(max(end - time.monotonic(), 0))
    return [row for key, _ in ready for row in key.data.read()]


def _amount(size: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:  # noqa: PLR2004
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
