"""What the sources are asked about: this process, and its variables."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.pmi import Exchanged


# Of this machine since it was started.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# The namespace that a machine starts with: PROC_UTS_INIT_INO in Linux's proc_ns.h.
_MACHINES_UTS = 0xEFFFFFFE

# How much of a variable a message quotes.
_SHOWN = 200

_MOST_ANCESTORS = 64

# Characters of a file: many times what the hosts of the largest machine take.
_LONGEST = 2**24


def _no_file(_path: str) -> None:
    return None


def _nobody(_environ: Mapping[str, str]) -> None:
    return None


@dataclass(frozen=True)
class Process:
    """This process, as far as a launcher may have left its marks on it.

    Attributes:
        environ: Its environment. An empty variable counts as unset.
        hostname: Name of this machine, with or without a domain.
        terminal: Whether standard input is a terminal.
        in_own_group: Whether it is in another process group than the leader of its
            session: so does a shell with a terminal start programs, and what stands in
            front of a program in a container does not.
        pid: Its number.
        command: The command as typed, for messages.
        ancestors: Names of the processes above it, the nearest first, as far as they
            show: at most 15 characters each.
        ancestor_pids: Their numbers, and that of the next one, which may be hidden.
        may_be_renamed: Whether the host name may be a container's, which no list has.
        read: Returns the text of a file; ``None`` if it cannot be read.
        exchange: Asks the process manager, see `pmi.exchange`; ``None`` if there is
            none.
    """

    environ: Mapping[str, str]
    hostname: str
    terminal: bool = False
    in_own_group: bool = True
    pid: int | None = None
    command: str = "COMMAND"
    ancestors: tuple[str, ...] = ()
    ancestor_pids: tuple[int, ...] = ()
    may_be_renamed: bool = False
    read: Callable[[str], str | None] = _no_file
    exchange: Callable[[Mapping[str, str]], Exchanged | None] = _nobody


def this_process(
    exchange: Callable[[Mapping[str, str]], Exchanged | None] | None = None,
    command: str = "COMMAND",
) -> Process:
    """Look at this process.

    Args:
        command: The command as typed, for messages.
        exchange: What asks the process manager; ``None`` where it must not be asked.
    """
    names, pids = _ancestors(os.getppid())
    return Process(
        environ=os.environ,
        hostname=socket.gethostname(),
        terminal=bool(sys.stdin and not sys.stdin.closed and sys.stdin.isatty()),
        in_own_group=os.getpgrp() != os.getsid(0),
        pid=os.getpid(),
        command=command,
        ancestors=names,
        ancestor_pids=pids,
        may_be_renamed=_may_be_renamed(),
        read=read,
        exchange=exchange or _nobody,
    )


def read(path: str) -> str | None:
    """Return the text of a file, or its beginning; ``None`` if it cannot be read."""
    try:
        if not Path(path).is_file():
            return None  # nor a pipe, on which nobody may ever write
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST)
    except (OSError, ValueError):
        return None


def _ancestors(pid: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and numbers of a process and of those above. Source: proc(5)."""
    names, pids = [], [pid]
    for _ in range(_MOST_ANCESTORS):
        start, _, fields = (read(f"/proc/{pids[-1]}/stat") or "").rpartition(")")
        parent = fields.split()[1:2]  # behind its name: its state, its parent
        if not parent:
            break
        names.append(start.partition("(")[2])
        pids.append(int(parent[0]))
    return tuple(names), tuple(pids)


def _may_be_renamed() -> bool:
    """Say whether this is a namespace of host names beside the machine's own."""
    try:
        return Path("/proc/self/ns/uts").stat().st_ino != _MACHINES_UTS
    except OSError:
        return True


class Variables:
    """The variables of one source, read with messages that a person can use.

    Args:
        environ: Environment of the process. An empty variable counts as unset.
        source: Whose they are, as a person writes it.
        family: What their names have in common.
    """

    def __init__(self, environ: Mapping[str, str], source: str, family: str) -> None:
        self.environ = environ
        self._source = source
        self._family = family

    def first(self, *names: str) -> str:
        """Return the first of the variables that is set, or an empty text."""
        return next((self.environ[n] for n in names if self.environ.get(n)), "")

    def name(self, *names: str) -> str:
        """Return the name of the first of the variables that is set.

        Raises:
            LaunchError: None is.
        """
        for name in names:
            if self.environ.get(name):
                return name
        raise LaunchError(
            "HPC020",
            f"{names[0]} is not set, although other variables say that {self._source} "
            "started this process; a container or a wrapper may have dropped it. Let "
            f"all {self._family} variables through, or type --standalone for one node",
            everywhere=True,
        )

    def shown(self, *names: str) -> str:
        """Write the first of the variables that is set, as a message quotes it."""
        name = next((n for n in names if self.environ.get(n)), names[0])
        value = self.first(name)
        short = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return f"{name}={short!r}"

    def integer(self, *names: str) -> int:
        """Return the first of the variables that is set, as a whole number.

        Raises:
            LaunchError: None is set, or it is not a number.
        """
        name = self.name(*names)
        value = self.environ[name]
        if not re.fullmatch("[0-9]{1,9}", value):
            raise LaunchError(
                "HPC021",
                f"{self.shown(name)} is not a whole number",
                everywhere=True,
            )
        return int(value)

    def task(self, rank: str, size: str, local_rank: str, *local_size: str) -> Task:
        """Return the task that four variables describe.

        Args:
            rank: Name of the variable of its rank.
            size: Of the number of tasks.
            local_rank: Of its rank on its node.
            local_size: Of the number of tasks there; the first that is set counts.

        Raises:
            LaunchError: One is not set, or is not a number.
        """
        return Task(
            rank=self.integer(rank),
            size=self.integer(size),
            local_rank=self.integer(local_rank),
            local_size=self.integer(*local_size),
        )

    def integer_or_zero(self, *names: str) -> int:
        """Return the first of the variables that is set as a number, 0 if none is."""
        return self.integer(*names) if self.first(*names) else 0
