"""The launch of the collectives: an ordinary one, with the job's own options.

The doctor starts this module as a process, which becomes the launcher. It gets the job
as a line of JSON on stdin, because only one process can ask a process manager for it.
The launcher's messages, and the workers' results, come back as lines of JSON.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc import main as launcher
from torchrun_hpc.doctor import collectives
from torchrun_hpc.doctor.results import (
    Collective,
    Finding,
    Torch,
    WorkerReport,
    writer,
)
from torchrun_hpc.errors import WRONG_USE, on_one_line
from torchrun_hpc.failures.failure import Failure, Kind, ending, is_consequence
from torchrun_hpc.failures.last_words import last_words
from torchrun_hpc.failures.report import JobFailed
from torchrun_hpc.failures.worker import end_of
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.names import host, ranges
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.preload import imports
from torchrun_hpc.preload.worker import end_with_parent
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers import process
from torchrun_hpc.schedulers.job import Job, Task
from torchrun_hpc.variables import DOCTOR_RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Write
    from torchrun_hpc.errors import Message

    Ends = Mapping[int, "LaunchEnd"]  # by task rank
    Cause = tuple[str, tuple[int, ...]]  # text, and the nodes to blame

SCRIPT = "torchrun_hpc.doctor.collectives"

_LONGEST, _LONGEST_LINE = 2**12, 2**16  # characters of a message, bytes of its line


@dataclass(frozen=True)
class LaunchPart:
    """The tasks of a launch."""

    number: int  # of the launch, from 0
    tasks: Mapping[int, int]  # node ranks by task rank
    hosts: tuple[str, ...]  # names of these nodes, in the order of their ranks
    address: str  # address or name of the first node

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ranks of the nodes."""
        return tuple(sorted({*self.tasks.values()}))


@dataclass(frozen=True)
class LaunchEnd:
    """The end of a launch on a task, with its results.

    ``at`` has number and name of each worker's last step, by rank.
    """

    code: int  # exit code of the launcher; below 0, the signal that ended it
    cause: str = ""  # what torch or the script wrote last
    failure: Failure | None = None  # why the job failed, unless another node reports it
    reason: str = ""  # the failure as a sentence
    messages: tuple[Finding, ...] = ()  # the launcher's errors (suspect) and warnings
    at: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    imports: tuple[Torch, ...] = ()  # of torch, by the launcher and by a worker
    workers: tuple[WorkerReport, ...] = ()  # of the workers that reached their end
    rows: tuple[Collective, ...] = ()  # results of collectives
    backend: str = ""
    is_stopped: bool = False  # whether the doctor ended it

    @property
    def is_refusal(self) -> bool:
        """Whether the launcher refused to start."""
        return self.code == WRONG_USE and any(each.is_suspect for each in self.messages)


# --- in the doctor ----------------------------------------------------------------


class LaunchProcess:
    """A launcher's process, which runs `SCRIPT` as the user wishes."""

    def __init__(self, place: Place, part: LaunchPart) -> None:
        self._place, self._part, self._is_stopped = place, part, False
        job = _job_of(place, part)
        given = {
            "parent": os.getpid(),
            "job": wire.encode(job) if job else None,
            # With an explicit option, only the launch itself imports torch.
            "imports_torch": not (place.mode.is_direct or "hpc_preload" in place.asked),
        }
        # Objects close themselves if the process does not start.
        names = "given", "results", "stderr"
        self._files = [FileIO(os.memfd_create(name), "r+") for name in names]
        stdin, results, errors = self._files
        os.pwrite(stdin.fileno(), wire.to_line(given), 0)
        path = f"/proc/{os.getpid()}/fd/{results.fileno()}"
        arguments = str(place.wishes.max_bytes), f"{place.wishes.limit:g}"
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", __name__, *_words(place, part), *arguments],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**process.environment(), DOCTOR_RESULTS: path},
        )

    def run(self, limit: float) -> LaunchEnd:
        """Wait for its end. End it if it takes longer than its start and ``limit``."""
        limit, cause = limit + limits.LAUNCH_START_TIMEOUT, ""
        _, results, errors = self._files
        try:
            if not waiting.until(lambda: self._process.poll() is not None, limit):
                cause = f"the launch did not end within {limit:.0f} s"
                self.end()
            code = self._process.poll()
            if code is None:  # not yet ended by the kernel
                code = -signal.SIGKILL
            cause = cause or last_words(end_of(errors.fileno()), code).cause
            end = wire.encode(LaunchEnd(code, cause, is_stopped=self._is_stopped))
            for line in wire.Lines(_LONGEST_LINE).feed(results.read()):
                _join(end, line)
        finally:
            for file in self._files:
                file.close()
        return self._with_ranks(wire.decode(LaunchEnd, end))

    def end(self, timeout: float = limits.LAUNCH_END_TIMEOUT) -> None:
        """End it, and give the launcher ``timeout`` seconds to end its workers."""
        if self._process.poll() is None:
            self._is_stopped = True
        for end in (self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def _with_ranks(self, end: LaunchEnd) -> LaunchEnd:
        """Return the end with the job's node ranks in the failure."""
        if end.failure is None:
            return end
        # Without a scheduler, torch numbers the nodes of the launch in any order.
        nodes = () if self._place.mode is Mode.MANUAL else self._part.nodes
        of_job = [n for rank, n in enumerate(nodes) if rank in end.failure.nodes]
        return replace(end, failure=replace(end.failure, nodes=tuple(of_job)))


def _join(end: dict[str, Any], line: Mapping[str, Any]) -> None:
    """Add a line of a worker or a launcher to a `LaunchEnd` in plain form."""
    for name, value in line.items():
        is_list = isinstance(value, list)
        end[name] = [*end.get(name, ()), *value] if is_list else value


def _words(place: Place, part: LaunchPart) -> list[str]:
    words, asked = [*place.options], place.asked
    if not place.mode.is_direct:
        # The outcome in the user's file is the job's.
        words += ["--max-restarts=0", f"--hpc-outcome={os.devnull}"]
        words += [f"--{name}={value}" for name, value in _changed(place, part)]
    if asked.run_path:  # torch then takes a path instead of a module
        return [*words, collectives.__file__]
    if asked.no_python:
        words.append(sys.executable)
    return [*words, "-m", SCRIPT]


def _changed(place: Place, part: LaunchPart) -> Iterator[tuple[str, object]]:
    """Yield the options to change if only some nodes take part, or with spares."""
    asked, is_part = place.asked, len(part.tasks) < place.task.size
    if is_part or "hpc_spares" in asked:
        yield "nnodes", len(part.nodes)
        yield "hpc_spares", 0
    if not is_part:
        return
    port = port_of(f"{place.meeting.endpoint} {part.number}")
    if "rdzv_endpoint" in asked:
        yield "rdzv_endpoint", join_endpoint(part.address, port)
    elif "master_addr" in asked:
        yield "master_addr", part.address
        yield "master_port", port
    if place.facts.job is None or "node_rank" in asked:
        yield "node_rank", part.nodes.index(place.node_rank)


def _job_of(place: Place, part: LaunchPart) -> Job | None:
    if place.facts.job is None:
        return None
    job = replace(place.facts.job, pmi_is_open=False)
    if len(part.tasks) == job.task.size:
        return job
    tasks, rank = sorted(part.tasks), place.task.rank
    local = [task for task in tasks if part.tasks[task] == place.node_rank]
    return replace(
        job,
        launch_id=f"{job.launch_id}.{part.number}",
        nodes=part.hosts,
        node_rank=part.nodes.index(place.node_rank),
        task=Task(tasks.index(rank), len(tasks), local.index(rank), len(local)),
        head_candidates=(),
        nodelist_is_shared=True,
        listed_at=None,
    )


# --- why it ended -----------------------------------------------------------------


def cause_of(ends: Ends, nodes: Mapping[int, int], hosts: Sequence[str]) -> Cause:
    """Return why a launch ended too early; empty if the launcher refused to start.

    ``nodes`` has each task's node.
    """
    refused = {nodes[task] for task, end in ends.items() if end.is_refusal}
    if refused:
        is_of_some = refused < {*nodes.values()}
        to_blame = tuple(sorted(refused)) if is_of_some else ()
        return "", to_blame
    failures = [*_failures(ends, nodes, hosts)]
    if not failures:
        return "", ()
    first = min(failures, key=lambda each: (each.is_of_others, each.order))
    if first.is_of_others:
        return _who_did_not_come(ends, nodes, hosts) or (first.text, ())
    return first.text, first.nodes


class _TaskFailure(NamedTuple):
    """A possible cause of the launch's end, from one task."""

    is_of_others: bool  # whether others may have caused it
    order: int  # the lower ones are more likely to be the cause
    text: str
    nodes: tuple[int, ...] = ()


def _failures(
    ends: Ends, nodes: Mapping[int, int], hosts: Sequence[str]
) -> Iterator[_TaskFailure]:
    for task, end in ends.items():
        node, name, text = nodes[task], host(nodes[task], hosts), end.cause
        # Step -1 of a worker is the import of torch.
        if not (text or end.imports or any(n >= 0 for n, _ in end.at.values())):
            text = "the import of torch did not finish"
        if end.failure is not None and not end.is_stopped:
            is_of_others = _is_of_others(end.failure)
            yield _TaskFailure(is_of_others, 1, end.reason, end.failure.nodes)
        elif end.is_stopped or (end.code > 0 and not text):
            how = f"{name}: {text or ending(end.code)}"
            yield _TaskFailure(is_of_others=True, order=3, text=how)
        elif end.code:
            how = f"{name}: the task {ending(end.code)}"
            how += f": {text}" if text else ""
            order = 0 if end.code < 0 else 2
            yield _TaskFailure(is_consequence(text), order, how, (node,))


def _is_of_others(failure: Failure) -> bool:
    """Return whether another worker, or the doctor's limit, may have caused it."""
    is_ended = failure.kind is Kind.SIGNAL and failure.code == signal.SIGTERM
    is_late = failure.kind is Kind.MISSING or is_consequence(failure.text)
    return is_ended or is_late or failure.is_doubtful


def _who_did_not_come(
    ends: Ends, nodes: Mapping[int, int], hosts: Sequence[str]
) -> Cause | None:
    """Return the workers behind all others; nothing if most workers are behind."""
    steps = dict[tuple[int, int], tuple[int, str]]()  # by task and rank
    for task, end in ends.items():
        # Its launcher did not start a worker, or did not even import torch.
        begun = -2 if end.imports else -3, "the meeting of the agents"
        for rank, step in (end.at or {-1: begun}).items():
            steps[task, rank] = step
    last, name = max(steps.values(), default=(0, ""))
    behind = [worker for worker, (number, _) in steps.items() if number < last]
    if not 0 < len(behind) <= len(steps) // 2:
        return None
    blamed = tuple(sorted({nodes[task] for task, _ in behind}))
    who = ", ".join(host(node, hosts) for node in blamed)
    if ranks := [rank for _, rank in behind if rank >= 0]:
        who = f"rank {ranges(ranks)} ({who})"
    return f"{who} did not reach {name}", blamed


# --- in the process that becomes the launcher -------------------------------------


def main() -> None:
    """Become the launcher."""
    given = wire.from_json(sys.stdin.buffer.readline())
    end_with_parent(given["parent"])()
    write = writer(process.environment())
    console.listeners.append(partial(_pass_on, write))
    if given["imports_torch"]:  # now or a moment later
        start = time.perf_counter()
        with contextlib.suppress(Exception):  # the launcher reports it
            imports.import_torch()
            torch = Torch(import_s=time.perf_counter() - start)
            write("imports", [wire.encode(torch)])
    launcher.main(job=wire.decode(Job, given["job"]) if given["job"] else None)


def _pass_on(write: Write, message: Message, kind: str) -> None:
    """Pass the failure of the job, an error or a warning to the doctor."""
    if isinstance(message, JobFailed):
        write("failure", wire.encode(message.failure.brief))
        write("reason", wire.printable(message.reason, _LONGEST))
    elif kind != "note":
        text = wire.printable(on_one_line(message.text), _LONGEST)
        finding = Finding(message.code, text, is_suspect=kind == "error")
        write("messages", [wire.encode(finding)])


if __name__ == "__main__":
    main()
