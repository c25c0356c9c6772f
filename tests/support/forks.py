"""Programs that run as forks of one process, which has imported what they need.

Each does all that a program of its own does, except the start of Python and imports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.patience import PATIENCE
from tests.support.processes import Result, RunningProgram, end_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

# The exit code of a program that took too long.
KILLED = 124

# The last line of the fork is the program, so that it ends as Python ends.
_DRIVER = """\
from tests.support.forks import serve
{imports}
exec(serve())
"""


@dataclass(frozen=True)
class ForkedProgram:
    """A program that a fork runs.

    Attributes:
        text: Python. It has the names that the process has imported.
        cwd: Working directory; by default a folder of the process.
        environ: Variables to add to those outside of any job.
        limit: Seconds after which it is killed; its exit code is then `KILLED`.
    """

    text: str
    cwd: Path | None = None
    environ: dict[str, str] = field(default_factory=dict)
    limit: float = PATIENCE


class ForkingProcess:
    """A process that forks for each program, until its context ends.

    Args:
        imports: Statements that the process runs first.
    """

    def __init__(self, imports: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process = RunningProgram(
            [sys.executable, "-c", _DRIVER.format(imports=imports)],
            stdin=subprocess.PIPE,
            stderr=None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end()
        self._folder.cleanup()

    def run(self, text: str, **options: Any) -> Result:
        """Run one program; the options are those of `ForkedProgram`."""
        return self.run_all([ForkedProgram(text, **options)])[0]

    def run_all(
        self, programs: Sequence[ForkedProgram], *, at_once: int = 2
    ) -> list[Result]:
        """Run programs, some at the same time; return their ends."""
        folder = Path(self._folder.name)
        requests = [
            {
                **asdict(program),
                "cwd": str(program.cwd or folder),
                "streams": [f"{folder}/{number}.{stream}" for stream in ("out", "err")],
            }
            for number, program in enumerate(programs)
        ]
        self._process.stdin.write(f"{json.dumps([at_once, requests])}\n".encode())
        codes = json.loads(self._process.line())
        return [
            Result(code, *(Path(file).read_text() for file in request["streams"]))
            for request, code in zip(requests, codes, strict=True)
        ]


def serve() -> str:
    """Fork for each request until standard input ends; return a fork's program."""
    for line in sys.stdin:
        at_once, requests = json.loads(line)
        waiting = list(enumerate(requests))
        running: dict[int, tuple[int, float]] = {}
        codes: dict[int, int] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                number, request = waiting.pop(0)
                if (pid := os.fork()) == 0:
                    _become(request)
                    return str(request["text"])
                running[pid] = number, time.monotonic() + request["limit"]
            for pid, (number, end) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[number] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[number] = KILLED
                else:
                    continue
                end_group(pid)
                del running[pid]
            time.sleep(0.01)
        sys.stdout.write(f"{json.dumps([codes[n] for n in range(len(requests))])}\n")
        sys.stdout.flush()
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Turn this fork into a freshly started Python, except its imports."""
    os.setsid()
    os.chdir(request["cwd"])
    # setproctitle needs all other variables where they are.
    os.environ.update(request["environ"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(request["streams"], 1):
        os.dup2(os.open(file, flags, 0o600), number)
    os.closerange(3, 100)
