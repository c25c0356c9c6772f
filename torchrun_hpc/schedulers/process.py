"""This process: its variables, its host, and the processes above it."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

from torchrun_hpc.host import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.pmi import Exchanged


@dataclass(frozen=True)
class Process:
    """The facts by which a launcher or scheduler is recognised.

    Attributes:
        in_own_group: Whether its process group differs from the session leader's. An
            interactive shell starts each program in its own group; a wrapper or
            container runtime does not.
        ancestors: Names, up to 15 characters, of the visible processes above it,
            nearest first.
        ancestor_pids: Their pids, then the pid above them, which may be hidden.
        may_be_renamed: Whether the host name may be a container's, which is in no list
            of nodes.
        read: Returns the text of a file; ``None`` if it cannot be read.
        exchange: Asks the process manager (`pmi.exchange`).
    """

    environ: Mapping[str, str]  # an empty variable counts as unset
    hostname: str  # of this machine, with or without a domain
    terminal: bool = False  # whether standard input is one
    in_own_group: bool = True
    pid: int | None = None
    command: str = "COMMAND"  # of the user, for messages
    ancestors: tuple[str, ...] = ()
    ancestor_pids: tuple[int, ...] = ()
    may_be_renamed: bool = False
    read: Callable[[str], str | None] = lambda _path: None
    exchange: Callable[[Mapping[str, str]], Exchanged | None] = lambda _environ: None


WeighedProcess = NewType("WeighedProcess", Process)
"""A process without stale variables, from `schedulers.weigh`."""


def environment() -> Mapping[str, str]:
    """Return the environment of this process, which also shows later changes."""
    return os.environ


def this_process(
    exchange: Callable[[Mapping[str, str]], Exchanged | None] | None = None,
    command: str = "COMMAND",
) -> Process:
    """Describe this process; without ``exchange``, it never asks a process manager."""
    names, pids = procfs.ancestors(os.getppid())
    return Process(
        environ=environment(),
        hostname=socket.gethostname(),
        terminal=bool(sys.stdin and not sys.stdin.closed and sys.stdin.isatty()),
        in_own_group=os.getpgrp() != os.getsid(0),
        pid=os.getpid(),
        command=command,
        ancestors=names,
        ancestor_pids=pids,
        may_be_renamed=procfs.may_be_renamed(),
        read=procfs.read,
        exchange=exchange or (lambda _environ: None),
    )
