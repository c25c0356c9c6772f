"""The stacks of one node's workers, as py-spy sees them from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchrun_hpc import wire
from torchrun_hpc.failures.last_words import LAUNCHER
from torchrun_hpc.host import procfs
from torchrun_hpc.wire import WireError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.failures.worker import Worker

ENDED = "it has ended"  # instead of a stack

# Waits that py-spy adds at each look, and the least share of CPU time of progress. A
# loop that polls every 0.2 s uses 0.03 % (measured).
_OF_A_LOOK = 2
_WORKING = 0.001

_SCHEDSTAT = "/proc/{pid}/task/{pid}/schedstat"  # of the main thread
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_NOT_ALLOWED = ("permission denied", "operation not permitted", "eperm", "eacces")
_IMPORTS = "<frozen importlib"  # Python's own frames of an import
_KILL_TIMEOUT = 0.5  # seconds
_LONGEST = 200  # characters of a frame, or a problem
_ShortText = Annotated[str, wire.short_text(_LONGEST)]


@dataclass(frozen=True)
class WorkerStack:
    """The stack of a worker, by global rank and node rank.

    Attributes:
        frames: Main thread, outermost first, as ``FUNCTION FILE:LINE``.
        problem: Why they are unknown; empty if they are known.
        is_lasting: Whether the problem will stay while the job runs.
        waits: Voluntary context switches of the main thread since its start.
        cpu: Seconds of CPU time that the main thread has used.
    """

    rank: int
    node: int
    frames: tuple[_ShortText, ...] = ()
    problem: _ShortText = ""
    is_lasting: bool = field(default=False, compare=False)
    waits: int = field(default=0, compare=False)
    cpu: float = field(default=0.0, compare=False)

    def has_progressed(self, before: WorkerStack, seconds: float) -> bool:
        """Return whether this worker has made progress, even at the same line.

        A hung worker waits once, spins, or polls. Polling takes hardly any CPU time.
        """
        is_elsewhere = (self.frames, self.problem) != (before.frames, before.problem)
        works = self.cpu - before.cpu > _WORKING * seconds
        return is_elsewhere or (works and self.waits - before.waits > _OF_A_LOOK)


def sample(workers: Sequence[Worker], timeout: float) -> list[WorkerStack]:
    """Return the stacks of this node's workers, sampled together while they run."""
    program = _program()
    if program is None:
        text = f"py-spy is not installed. Run {sys.executable} -m pip install "
        text += "'torchrun_hpc[stacks]'"
        return _without(workers, text)
    end = time.monotonic() + timeout
    try:
        started = [(worker, _start(program, worker.pid)) for worker in workers]
    except OSError as error:
        text = f"cannot start {program}: {error.strerror}"
        return _without(workers, text)
    return [_stack(worker, process, end) for worker, process in started]


def _without(workers: Sequence[Worker], problem: str) -> list[WorkerStack]:
    return [
        WorkerStack(worker.rank, worker.node, problem=problem, is_lasting=True)
        for worker in workers
    ]


def _program() -> str | None:
    own = Path(sys.executable).with_name("py-spy")
    return str(own) if own.exists() else shutil.which("py-spy")


def _start(program: str, pid: int) -> subprocess.Popen[bytes]:
    # py-spy stops the worker for some milliseconds, or frames might be wrong.
    return subprocess.Popen(  # noqa: S603
        [program, "dump", "--json", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _stack(worker: Worker, process: subprocess.Popen[bytes], end: float) -> WorkerStack:
    try:
        output, errors = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        frames = _frames(wire.from_json(output), worker.pid)
        waits, cpu = _activity(worker.pid)
        return WorkerStack(worker.rank, worker.node, frames, waits=waits, cpu=cpu)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            process.communicate(timeout=_KILL_TIMEOUT)
        problem, forbidden = "py-spy did not answer", ""
    except (ValueError, LookupError, TypeError, StopIteration):
        text = errors.decode(errors="replace")
        forbidden = _forbidden(text)
        problem = forbidden or _first_line(text)
    lasts = bool(forbidden)
    return WorkerStack(worker.rank, worker.node, problem=problem, is_lasting=lasts)


def _frames(threads: Sequence[Any], pid: int) -> tuple[str, ...]:
    main = next(thread for thread in threads if thread["os_thread_id"] == pid)
    frames = [f for f in main["frames"] if not f["filename"].startswith(_IMPORTS)]
    ours = (n for n, f in enumerate(frames) if LAUNCHER in f["filename"])
    shown = (
        f"{f['name']} {f['short_filename'] or f['filename']}:{f['line']}"
        for f in reversed(frames[: next(ours, len(frames))])
    )
    return tuple(printable(frame, _LONGEST) for frame in shown)


def _activity(pid: int) -> tuple[int, float]:
    waits = procfs.status(pid).get("voluntary_ctxt_switches", "0")
    used, *_ = (procfs.read(_SCHEDSTAT.format(pid=pid)) or "0").split()
    return int(waits), int(used) / 1e9


def _forbidden(errors: str) -> str:
    """Return which setting forbids a look, if py-spy had no permission."""
    if not any(word in errors.lower() for word in _NOT_ALLOWED):
        return ""
    scope = (procfs.read(_PTRACE_SCOPE) or "").strip()
    if scope in ("2", "3"):
        return f"{_PTRACE_SCOPE} is {scope}: only root can read stacks"
    return (
        "py-spy has no permission: a container needs --cap-add=SYS_PTRACE, or the "
        f"system forbids ptrace to user {os.getuid()}"
    )


def _first_line(errors: str) -> str:
    lines = (line.strip() for line in errors.splitlines())
    first = next(filter(None, lines), "py-spy printed nothing")
    return printable(first.removeprefix("Error: "), _LONGEST)


def received(value: Any) -> list[WorkerStack]:
    """Read stacks that were sent as plain data; return none if they are invalid."""
    with contextlib.suppress(WireError):
        return wire.decode(list[WorkerStack], value)
    return []
