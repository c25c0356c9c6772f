"""This process: its variables, its host, the processes above it, and files."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NewType

from torchrun_hpc import files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.pmi import Exchanged


# Of this machine since it was started.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# The namespace that a machine starts with: PROC_UTS_INIT_INO in Linux's proc_ns.h.
_MACHINES_UTS = 0xEFFFFFFE

_MOST_ANCESTORS = 64

# Characters of a file: many times what the hosts of the largest machine take.
_LONGEST = 2**24


@dataclass(frozen=True)
class Process:
    """What a launcher or a scheduler can be recognised by.

    Attributes:
        environ: Its environment. An empty variable counts as unset.
        hostname: Name of this machine, with or without a domain.
        terminal: Whether standard input is a terminal.
        in_own_group: Whether it is in another process group than the leader of its
            session. An interactive shell starts programs in groups of their own; a
            wrapper or the start of a container does not.
        pid: Its number.
        command: The command as typed, for messages.
        ancestors: Names of the processes above it that can be seen, the nearest first;
            at most 15 characters each.
        ancestor_pids: Their numbers, and that of the next one, which may be hidden.
        may_be_renamed: Whether the host name may be a container's own, which is in no
            list of nodes.
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
    read: Callable[[str], str | None] = lambda _path: None
    exchange: Callable[[Mapping[str, str]], Exchanged | None] = lambda _environ: None


WeighedProcess = NewType("WeighedProcess", Process)
"""A process without the variables that are left over, from `schedulers.weigh`."""


def environment() -> Mapping[str, str]:
    """Return the environment of this process, as it is and will be."""
    return os.environ


def this_process(
    exchange: Callable[[Mapping[str, str]], Exchanged | None] | None = None,
    command: str = "COMMAND",
) -> Process:
    """Look at this process; without ``exchange``, no process manager may be asked."""
    names, pids = _ancestors(os.getppid())
    return Process(
        environ=environment(),
        hostname=socket.gethostname(),
        terminal=bool(sys.stdin and not sys.stdin.closed and sys.stdin.isatty()),
        in_own_group=os.getpgrp() != os.getsid(0),
        pid=os.getpid(),
        command=command,
        ancestors=names,
        ancestor_pids=pids,
        may_be_renamed=_may_be_renamed(),
        read=read,
        exchange=exchange or (lambda _environ: None),
    )


def read(path: str) -> str | None:
    """Return the text of a file, or its beginning; ``None`` if it cannot be read."""
    try:
        with open(
            path, encoding="utf-8", errors="replace", opener=files.opened
        ) as file:
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
