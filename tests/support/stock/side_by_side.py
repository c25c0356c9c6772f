"""Launches for tests: torchrun_hpc and stock torchrun, side by side.

Importing torch takes most of the time of a short launch, so one process imports it
once and forks for every launch. The fork runs what ``python -m`` runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pty
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.forks import ForkedProgram, ForkingProcess
from tests.support.processes import ANY_RESOLVER, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

OURS, STOCK = "ours", "stock"
COMMANDS = {
    OURS: [sys.executable, "-m", "torchrun_hpc"],
    STOCK: [sys.executable, "-m", "torch.distributed.run"],
}


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


# Torch reads the log level when it is imported. Forks that do not touch the objects do
# not have to copy them.
_IMPORTS = f"""
import os
os.environ.update({ANY_RESOLVER})
from torch.distributed import run as stock
from torchrun_hpc import main as ours
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.options import torchrun_parser
from tests.support.stock.side_by_side import become
import gc
gc.collect()
gc.freeze()
"""


@dataclass(frozen=True)
class Command:
    """A command line for `LaunchingProcess`.

    Attributes:
        which: `OURS` or `STOCK`.
        argv: The arguments.
        environ: Variables to add to those outside of any job.
        streams: What is wrong with its streams: ``0``, ``1`` or ``2`` to a key of
            `BROKEN` or `OTHERS`.
    """

    which: str
    argv: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)


class LaunchingProcess(ForkingProcess):
    """A process that has imported torch and forks for every launch."""

    def __init__(self) -> None:
        super().__init__(_IMPORTS)

    def launch(
        self,
        which: str,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        streams: dict[str, str] | None = None,
        **environ: str,
    ) -> Result:
        """Launch once; see `Command` for the arguments."""
        command = Command(which, argv, environ, streams or {})
        return self.launch_all([command], cwd=cwd)[0]

    def launch_all(
        self,
        commands: Iterable[Command],
        *,
        cwd: Path | None = None,
        at_once: int = 2,
    ) -> list[Result]:
        """Launch each command, some at the same time.

        Whatever it raises ends it as it would end ``python -m``.
        """
        programs = [
            ForkedProgram(
                f"become({COMMANDS[command.which][-1]!r}, {[*command.argv]!r}, "
                f"{command.streams!r})\n{command.which}.main()",
                cwd,
                command.environ,
            )
            for command in commands
        ]
        return self.run_all(programs, at_once=at_once)


def become(name: str, argv: list[str], streams: dict[str, str]) -> None:
    """Turn a fork into a freshly started launcher, up to its imports."""
    # So that --nproc-per-node=cpu starts two workers on any machine.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    break_streams(streams)
    sys.argv = [name, *argv]


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


# Faults of a stream, each with a descriptor that has it; below 0 for none.
BROKEN: dict[str, Callable[[], int]] = {
    "closed": _closed,
    "full": _full,
    "read-only": _read_only,
    "without reader": _without_reader,
    "terminal gone": _terminal_gone,
    "not read": _not_read,
    "not read, non-blocking": functools.partial(_not_read, blocking=False),
}
OTHERS: dict[str, Callable[[], int]] = {"as stdout": lambda: os.dup(1)}  # 2>&1


def break_streams(how: dict[str, str]) -> None:
    """Give this process streams as a shell does that starts it with such ones."""
    for number, what in how.items():
        descriptor = (BROKEN | OTHERS)[what]()
        if descriptor < 0:
            os.close(int(number))
            setattr(sys, ("stdin", "stdout", "stderr")[int(number)], None)
        else:
            os.dup2(descriptor, int(number))
