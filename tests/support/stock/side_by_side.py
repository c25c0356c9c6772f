"""Launches for tests: torchrun_hpc and stock torchrun, side by side.

Importing torch takes most of the time of a short launch, so one process imports it
once and forks for every launch. What the fork runs is what ``python -m`` runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.patience import OWN, PATIENCE, without_waits

OURS, STOCK = "ours", "stock"
COMMANDS = {
    OURS: [sys.executable, "-m", "torchrun_hpc"],
    STOCK: [sys.executable, "-m", "torch.distributed.run"],
}

# Exit code of a launch that took too long.
KILLED = 124

# Set by schedulers, launchers, users: they would decide what is tested.
_FOREIGN = (
    *("SLURM", "PET_", "OMP_", "GLOO_", "NCCL_", "TORCH", "MASTER_", "MKL_", "PYTHON"),
    *("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "CUDA_VISIBLE", "LOGLEVEL"),
    *("SYSTEMNAME", "PMI", "OMPI_", "PALS_", "PBS_"),
)


def clean_environ() -> dict[str, str]:
    """Return this environment as it is outside of any job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return {**kept, "PYTHONPATH": str(ROOT)}


def bare(which: str) -> list[str]:
    """Return what to add to a line that says nothing of a rendezvous.

    Without it stock torchrun of some releases takes a port that never changes, which
    somebody else may have; the others, and torchrun_hpc, take any.
    """
    from torch.distributed.run import get_args_parser  # noqa: PLC0415

    if which == OURS or get_args_parser().get_default("master_port") is None:
        return []
    return ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def words_of(line: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a line as in a shell, and the variables before them."""
    words = shlex.split(line)
    front = [*itertools.takewhile(re.compile(r"[A-Z_]+=").match, words)]
    return words[len(front) :], dict(word.split("=", 1) for word in front)


@dataclass(frozen=True)
class Result:
    """What a launch left behind.

    Attributes:
        code: Exit code.
        out: What it wrote to stdout.
        err: And to stderr.
    """

    code: int
    out: str
    err: str

    @property
    def own_lines(self) -> list[str]:
        """The lines that torchrun_hpc wrote, but for those that depend on load."""
        own = (x for x in self.err.splitlines() if OWN.match(x))
        return without_waits(own)


def run(command: list[str], *, limit: float = PATIENCE, **options: Any) -> Result:
    """Run a command in a process group of its own; nothing of it is left."""
    options.setdefault("env", clean_environ())
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        finally:
            end_group(process.pid)
    return Result(process.returncode, out, err)


def end_group(leader: int) -> None:
    """End what is left of a process group that we started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


class Launcher:
    """A process that has imported torch and forks for every launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environ(),
            cwd=ROOT,
        )
        self._ask([])

    def close(self) -> None:
        """End the process; it has no children between two calls."""
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def ours(self, argv: list[str], **options: Any) -> Result:
        """Launch with torchrun_hpc."""
        return self.many([(OURS, argv)], **options)[0]

    def many(  # noqa: PLR0913 - all but the first are rarely given
        self,
        launches: list[tuple[str, list[str]]],
        *,
        environ: dict[str, str] | None = None,
        environs: list[dict[str, str]] | None = None,
        streams: list[dict[str, str]] | None = None,
        cwd: Path | None = None,
        limit: float = PATIENCE,
        at_once: int = 2,
    ) -> list[Result]:
        """Launch several times, some at once.

        Args:
            launches: ``OURS`` or ``STOCK``, and the arguments. ``{which}`` in an
                argument becomes the former.
            environ: Variables to add.
            environs: More of them, for each launch its own.
            streams: For each launch, what is wrong with its streams: ``0``, ``1`` or
                ``2`` to a key of `BROKEN` or `OTHERS`.
            cwd: Working directory.
            limit: Seconds after which a launch is killed; its exit code is then
                `KILLED`.
            at_once: Number of launches at the same time.
        """
        requests = []
        for number, (which, argv) in enumerate(launches):
            self._number += 1
            more = {**(environ or {}), **(environs[number] if environs else {})}
            requests.append(
                {
                    "which": which,
                    "argv": [word.replace("{which}", which) for word in argv],
                    "environ": clean_environ()
                    | {
                        key: value.replace("{which}", which)
                        for key, value in more.items()
                    },
                    "cwd": str(cwd or self._folder),
                    "output": str(self._folder / f"launch{self._number}"),
                    "streams": streams[number] if streams else {},
                    "limit": limit,
                }
            )
        answers = self._ask(requests, at_once, limit * len(requests))
        results = []
        for request, code in zip(requests, answers, strict=True):
            out, err = (
                Path(f"{request['output']}.{stream}").read_text() for stream in "12"
            )
            results.append(Result(code, out, err))
        return results

    def _ask(self, requests: list[Any], at_once: int = 2, limit: float = 0) -> Any:
        self._process.stdin.write(json.dumps([at_once, requests]) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], limit + 120)
        line = self._process.stdout.readline() if ready else ""
        assert line, "the launching process has died"
        return json.loads(line)


# --- broken streams ----------------------------------------------------------------


def _closed() -> int:
    return -1


def _full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def _read_only() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def _without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _terminal_gone() -> int:
    terminal, stream = pty.openpty()
    os.close(terminal)
    return stream


def _not_read(*, blocking: bool = True) -> int:
    """Return a pipe that is full, and whose reader does not read."""
    writer = os.pipe()[1]
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, blocking)
    return writer


# What can be wrong with a stream, and a descriptor with which it is; below 0 for none.
BROKEN = {
    "closed": _closed,
    "full": _full,
    "read-only": _read_only,
    "without reader": _without_reader,
    "terminal gone": _terminal_gone,
    "not read": _not_read,
    "not read, non-blocking": functools.partial(_not_read, blocking=False),
}
OTHERS = {"as stdout": lambda: os.dup(1)}  # 2>&1


def break_streams(how: dict[str, str]) -> None:
    """Give this process streams as a shell does that starts it with such ones."""
    for number, what in how.items():
        descriptor = (BROKEN | OTHERS)[what]()
        if descriptor < 0:
            os.close(int(number))
            setattr(sys, ("stdin", "stdout", "stderr")[int(number)], None)
        else:
            os.dup2(descriptor, int(number))


# --- the launching process --------------------------------------------------------


def _serve() -> None:
    """Fork for every request; the fork returns from here and becomes the launcher."""
    for line in sys.stdin:
        at_once, requests = json.loads(line)
        waiting = list(enumerate(requests))
        running: dict[int, tuple[int, float]] = {}
        answers: list[Any] = [None] * len(requests)
        while waiting or running:
            while waiting and len(running) < at_once:
                number, request = waiting.pop(0)
                pid = os.fork()
                if pid == 0:
                    _become(request)
                    return
                running[pid] = (number, time.monotonic())
            for pid, (number, start) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() - start > requests[number]["limit"]
                if done or late:
                    _end(pid, known=bool(done))
                    code = os.waitstatus_to_exitcode(status) if done else KILLED
                    answers[number] = code
                    del running[pid]
            time.sleep(0.01)
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()
    os._exit(0)


def _end(pid: int, *, known: bool) -> None:
    end_group(pid)
    if not known:
        os.waitpid(pid, 0)


def _become(request: dict[str, Any]) -> None:
    """Turn this fork into a freshly started launcher, up to its imports."""
    os.setsid()
    # So that --nproc-per-node=cpu starts two workers on any machine.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(f"{request['output']}.{stream}", mode, 0o600), stream)
    break_streams(request["streams"])
    sys.argv = [COMMANDS[request["which"]][-1], *request["argv"]]


def _main() -> None:
    from torch.distributed import run as stock  # noqa: PLC0415

    from torchrun_hpc import main  # noqa: PLC0415
    from torchrun_hpc.agent.patches import registry  # noqa: F401, PLC0415
    from torchrun_hpc.options import torchrun_parser  # noqa: F401, PLC0415

    # Forks that do not touch these objects need not copy them.
    gc.collect()
    gc.freeze()
    _serve()
    # In a fork. Whatever is raised here ends it as it would end python -m.
    (main.main if sys.argv[0] == COMMANDS[OURS][-1] else stock.main)()


if __name__ == "__main__":
    _main()
