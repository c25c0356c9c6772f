"""The stacks of a node's workers: forks send theirs, and py-spy reads all others.

The traceback is the stack of an ended worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, wire
from torchrun_hpc.failures.failure import ending
from torchrun_hpc.failures.last_words import LAUNCHER
from torchrun_hpc.host import procfs
from torchrun_hpc.schedulers.process import environment
from torchrun_hpc.stacks import calls
from torchrun_hpc.stacks.calls import (
    ASK_ALL,
    ASK_FRAMES,
    IMPORTS,
    LONGEST,
    ForkAnswer,
    Frame,
    Group,
)
from torchrun_hpc.wire import WireError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.failures.worker import Worker

# States of a worker without a stack.
_IT = "it "
ENDED = f"{_IT}has ended"
STOPPED = f"{_IT}is stopped (SIGSTOP)"
_STOPPED = "T (stopped)"  # in /proc/PID/status; it is "t" while py-spy reads

# A frame in a traceback, and the folder of a library.
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/")

# Waits that py-spy adds to each sample, and the least share of CPU time that counts as
# progress. A loop that polls every 0.2 s uses 0.03 % (measured).
_OF_A_LOOK = 2
_WORKING = 0.001

_SCHEDSTAT = "/proc/{pid}/task/{pid}/schedstat"  # of the main thread
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_NOT_ALLOWED = ("permission denied", "operation not permitted", "eperm", "eacces")


@dataclass(frozen=True)
class WorkerStack:
    """The stack of a worker, by global rank and node rank.

    Attributes:
        frames: Main thread, outermost first, as ``FUNCTION FILE:LINE``.
        problem: Why they are unknown; empty if they are known.
        is_lasting: Whether the problem will stay while the job runs.
        waits: Voluntary context switches of the main thread since its start.
        cpu: Seconds of CPU time that the main thread has used.
        groups: Its latest collectives; empty if they are unknown.
    """

    rank: int
    node: int
    frames: tuple[Frame, ...] = ()
    problem: Frame = ""
    is_lasting: bool = field(default=False, compare=False)
    waits: int = field(default=0, compare=False)
    cpu: float = field(default=0.0, compare=False)
    groups: tuple[Group, ...] = field(default=(), compare=False)

    @property
    def is_known(self) -> bool:
        """Whether the worker's place is known, or that it is stopped or has ended."""
        return bool(self.frames) or self.problem.startswith(_IT)

    def has_progressed(self, before: WorkerStack, seconds: float) -> bool:
        """Return whether this worker has made progress, even at the same line.

        ``before`` is its stack ``seconds`` ago. A hung worker waits once, spins, or
        polls. Polling takes hardly any CPU time.
        """
        is_elsewhere = (self.frames, self.problem) != (before.frames, before.problem)
        works = self.cpu - before.cpu > _WORKING * seconds
        return is_elsewhere or (works and self.waits - before.waits > _OF_A_LOOK)


def sample(
    workers: Sequence[Worker], timeout: float, *, with_calls: bool = True
) -> list[WorkerStack]:
    """Return the stacks of this node's running workers, sampled together.

    py-spy has ``timeout`` seconds. With 0 seconds, only forks have a stack.
    """
    end = time.monotonic() + timeout
    question = ASK_ALL if with_calls else ASK_FRAMES
    with ThreadPoolExecutor(len(workers) or 1) as pool:
        answers = [*pool.map(lambda worker: _answer(worker, question), workers)]
    stacks, others = [], []
    for worker, answer in zip(workers, answers, strict=True):
        if answer is not None:
            stacks.append(_of_running(worker, answer))
        elif procfs.status(worker.pid).get("State") == _STOPPED:
            stacks.append(WorkerStack(worker.rank, worker.node, problem=STOPPED))
        else:
            others.append(worker)
    read = _by_py_spy(others, end) if timeout else map(_silent, others)
    for worker, stack in zip(others, read, strict=True):
        groups = calls.groups_in_dump(worker, environment()) if with_calls else ()
        stacks.append(replace(stack, groups=groups))
    return stacks


def _answer(worker: Worker, question: bytes = b"") -> ForkAnswer | None:
    with contextlib.suppress(WireError):
        answer = worker.told(question, limits.FORK_ANSWER_TIMEOUT)
        return wire.decode(ForkAnswer, wire.from_json(answer))
    return None


def ended(worker: Worker, failure: Failure | None) -> WorkerStack:
    """Return the stack that a worker had when it ended."""
    part = failure and failure.worker
    answer = _answer(worker) or ForkAnswer()
    frames = answer.frames or tuple(_of_traceback(part.lines if part else ()))
    how = f"{_IT}{ending(failure.code)}" if failure else ENDED
    groups = answer.groups or calls.groups_in_dump(worker, environment())
    problem = "" if frames else how
    return WorkerStack(worker.rank, worker.node, frames, problem, groups=groups)


def _of_traceback(lines: Sequence[str]) -> Iterator[str]:
    """Yield the frames of the last traceback in these lines."""
    headers = [n for n, line in enumerate(lines) if "Traceback (most" in line]
    for line in lines[max(headers, default=len(lines)) :]:
        if match := _FRAME.match(line):
            file, number, function = match.groups()
            file = _LIBRARY.sub("", file) if _LIBRARY.match(file) else Path(file).name
            yield printable(f"{function} {file}:{number}", LONGEST)


def _by_py_spy(workers: Sequence[Worker], end: float) -> list[WorkerStack]:
    program = _program() if workers else ""
    if program is None:
        text = f"py-spy is not installed. Run {sys.executable} -m pip install "
        text += "'torchrun_hpc[stacks]'"
        return _without(workers, text)
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
    beside_python = Path(sys.executable).with_name("py-spy")
    return str(beside_python) if beside_python.exists() else shutil.which("py-spy")


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
        left = max(end - time.monotonic(), limits.PY_SPY_TIMEOUT)
        output, errors = process.communicate(timeout=left)
        frames = _frames(wire.from_json(output), worker.pid)
        return _of_running(worker, ForkAnswer(frames))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            process.communicate(timeout=limits.PY_SPY_TIMEOUT)
        problem, forbidden = "py-spy did not answer", ""
    except (ValueError, LookupError, TypeError, StopIteration):
        text = errors.decode(errors="replace")
        forbidden = _forbidden(text)
        problem = forbidden or _first_line(text)
    lasts = bool(forbidden)
    return WorkerStack(worker.rank, worker.node, problem=problem, is_lasting=lasts)


def _of_running(worker: Worker, answer: ForkAnswer) -> WorkerStack:
    waits, cpu = _activity(worker.pid)
    rank, node, groups = worker.rank, worker.node, answer.groups
    return WorkerStack(rank, node, answer.frames, waits=waits, cpu=cpu, groups=groups)


def _silent(worker: Worker) -> WorkerStack:
    return replace(_of_running(worker, ForkAnswer()), problem="no answer")


def _frames(threads: Sequence[Any], pid: int) -> tuple[str, ...]:
    main = next(thread for thread in threads if thread["os_thread_id"] == pid)
    frames = [f for f in main["frames"] if not f["filename"].startswith(IMPORTS)]
    ours = (n for n, f in enumerate(frames) if LAUNCHER in f["filename"])
    shown = (
        f"{f['name']} {f['short_filename'] or f['filename']}:{f['line']}"
        for f in reversed(frames[: next(ours, len(frames))])
    )
    return tuple(printable(frame, LONGEST) for frame in shown)


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
    return printable(first.removeprefix("Error: "), LONGEST)


def received(value: Any) -> list[WorkerStack]:
    """Read stacks that were sent as plain data; return none if they are invalid."""
    with contextlib.suppress(WireError):
        return wire.decode(list[WorkerStack], value)
    return []
