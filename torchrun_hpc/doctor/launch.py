"""The launch of the collectives: an ordinary one, with the job's own options.

The doctor starts this module as a process, which becomes the launcher. It gets the job
as a line of JSON on stdin, because only one process can ask a process manager for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import main as launcher
from torchrun_hpc import waiting, wire
from torchrun_hpc.doctor import collectives
from torchrun_hpc.doctor.results import RESULTS, Collective, Torch, Worker
from torchrun_hpc.errors import on_one_line
from torchrun_hpc.failures.last_words import last_words
from torchrun_hpc.failures.worker import end_of
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.preload import imports
from torchrun_hpc.preload.affinity import end_with_parent
from torchrun_hpc.reporting.console import PREFIX
from torchrun_hpc.schedulers import process
from torchrun_hpc.schedulers.job import Job, Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.doctor.place import Place

SCRIPT = "torchrun_hpc.doctor.collectives"

# Seconds to import torch and to start; for the launcher to end its workers.
_START_TIMEOUT = 120.0
_END_TIMEOUT = 15.0
_LONGEST_LINE = 2**16

# The launcher's messages, without the job's failure, which is in the outcome.
_SAID = re.compile(rf"{PREFIX}(error|warning)\[(HPC(?!125)\d+)\]: (.*)")


@dataclass(frozen=True)
class Part:
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
class Ended:
    """The end of a launch on a task, with its results.

    ``at`` has number and name of each worker's last step, by rank.
    """

    code: int  # exit code of the launcher; below 0, the signal that ended it
    cause: str = ""  # what it wrote last
    reason: str = ""  # why the job failed; empty if another node reports it
    blamed: tuple[str, ...] = ()  # names of the nodes in ``reason``
    said: tuple[tuple[str, str, bool], ...] = ()  # code, text, if it is an error
    at: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    torch: Torch | None = None
    workers: tuple[Worker, ...] = ()  # results of the workers that reached their end
    rows: tuple[Collective, ...] = ()  # results of collectives
    backend: str = ""
    is_stopped: bool = False  # whether the doctor ended it


# --- in the doctor ----------------------------------------------------------------


class Launch:
    """A launcher's process; ``arguments`` are the script's."""

    def __init__(self, here: Place, part: Part, arguments: Sequence[str]) -> None:
        self._here, self._is_stopped = here, False
        job = _job_of(here, part)
        given = {
            "parent": os.getpid(),
            "job": job and wire.encode(job),
            # With an explicit option, only the launch itself imports torch.
            "imports_torch": not (here.mode.is_direct or "hpc_preload" in here.asked),
        }
        # Objects close themselves if the process does not start.
        names = "given", "results", "outcome", "stderr"
        self._files = [FileIO(os.memfd_create(name), "r+") for name in names]
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        stdin, *_, errors = self._files
        _, results, outcome, _ = paths
        os.pwrite(stdin.fileno(), wire.to_line(given), 0)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", __name__, *_words(here, part, outcome), *arguments],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**process.environment(), RESULTS: results},
        )

    def run(self, limit: float) -> Ended:
        """Wait for its end, or end it after `limit` seconds besides those to start."""
        limit += _START_TIMEOUT
        cause, found = "", dict[str, Any]()
        _, results, outcome, errors = self._files
        try:
            if not waiting.until(lambda: self._process.poll() is not None, limit):
                cause = f"the launch did not end within {limit:.0f} s"
                self.end()
            code, said = self._process.poll(), end_of(errors.fileno())
            if code is None:  # not yet ended by the kernel
                code = -signal.SIGKILL
            reason, blamed = _outcome(b"" if self._is_stopped else outcome.read())
            for message in wire.Lines(_LONGEST_LINE).feed(results.read()):
                self._keep(found, message)
        finally:
            for file in self._files:
                file.close()
        return Ended(
            code=code,
            is_stopped=self._is_stopped,
            cause=cause or last_words(said, code).cause,
            reason=reason,
            blamed=blamed,
            said=_messages(said),
            **found,
        )

    def end(self, timeout: float = _END_TIMEOUT) -> None:
        """End it, and give the launcher `timeout` seconds to end its workers."""
        if self._process.poll() is None:
            self._is_stopped = True
        for end in (self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def _keep(self, found: dict[str, Any], message: Mapping[str, Any]) -> None:
        match message:
            case {"import_s": float(seconds)}:
                found["torch"] = Torch(import_s=seconds)
            case {"torch": torch}:
                found["torch"] = wire.decode(Torch, torch).after(found.get("torch"))
            case {"worker": each}:
                worker = replace(wire.decode(Worker, each), node=self._here.node_rank)
                found["workers"] = (*found.get("workers", ()), worker)
            case {"row": each}:
                row = wire.decode(Collective, each)
                scope = row.scope and self._here.host
                found["rows"] = (*found.get("rows", ()), replace(row, scope=scope))
            case {"at": [int(rank), int(number), str(step)]}:
                found["at"] = {**found.get("at", {}), rank: (number, step)}
            case {"backend": str(name)}:
                found["backend"] = name
            case _:
                pass


def _messages(written: bytes) -> tuple[tuple[str, str, bool], ...]:
    lines = on_one_line(written.decode(errors="replace"))  # with the lines to copy
    return tuple((code, x, kind == "error") for kind, code, x in _SAID.findall(lines))


def _outcome(text: bytes) -> tuple[str, tuple[str, ...]]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(text)
        return str(found["reason"]), tuple(map(str, found["nodes"]))
    return "", ()


def _words(here: Place, part: Part, outcome: str) -> list[str]:
    words, asked = [*here.options], here.asked
    if not here.mode.is_direct:
        words += ["--max-restarts=0", f"--hpc-outcome={outcome}"]
        words += [f"--{name}={value}" for name, value in _changed(here, part)]
    if asked.run_path:  # torch then takes a path instead of a module
        return [*words, collectives.__file__]
    return [*words, *([sys.executable] if asked.no_python else []), "-m", SCRIPT]


def _changed(here: Place, part: Part) -> Iterator[tuple[str, object]]:
    """Yield the options to change if only some nodes take part, or with spares."""
    asked, is_part = here.asked, len(part.tasks) < here.task.size
    if is_part or "hpc_spares" in asked:
        yield "nnodes", len(part.nodes)
        yield "hpc_spares", 0
    if not is_part:
        return
    port = port_of(f"{here.meeting.endpoint} {part.number}")
    if "rdzv_endpoint" in asked:
        yield "rdzv_endpoint", join_endpoint(part.address, port)
    elif "master_addr" in asked:
        yield "master_addr", part.address
        yield "master_port", port
    if here.job is None or "node_rank" in asked:
        yield "node_rank", part.nodes.index(here.node_rank)


def _job_of(here: Place, part: Part) -> Job | None:
    job = here.job and replace(here.job, pmi_is_open=False)
    if job is None or len(part.tasks) == job.task.size:
        return job
    every = sorted(part.tasks)
    own = [task for task in every if part.tasks[task] == here.node_rank]
    rank = here.task.rank
    return replace(
        job,
        launch_id=f"{job.launch_id}.{part.number}",
        nodes=part.hosts,
        node_rank=part.nodes.index(here.node_rank),
        task=Task(every.index(rank), len(every), own.index(rank), len(own)),
        head_candidates=(),
        nodelist_is_shared=True,
        listed_at=None,
    )


# --- in the process that becomes the launcher -------------------------------------


def main() -> None:
    """Become the launcher."""
    given = wire.from_json(sys.stdin.buffer.readline())
    end_with_parent(given["parent"])()
    if given["imports_torch"]:  # now or a moment later
        start = time.perf_counter()
        with contextlib.suppress(Exception):  # the launcher reports it
            imports.import_torch()
            line = wire.to_line({"import_s": time.perf_counter() - start})
            Path(process.environment()[RESULTS]).write_bytes(line)
    launcher.main(job=given["job"] and wire.decode(Job, given["job"]))


if __name__ == "__main__":
    main()
