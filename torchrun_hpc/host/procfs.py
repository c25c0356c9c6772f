"""Processes and this machine in Linux's ``/proc``: see proc(5)."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path

from torchrun_hpc import files

# Of this machine since it was started.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# The namespace that a machine starts with: PROC_UTS_INIT_INO in Linux's proc_ns.h.
_MACHINES_UTS = 0xEFFFFFFE

_MOST_ANCESTORS = 64

# Characters of a file: many times what the hosts of the largest machine take.
_LONGEST = 2**24

# Characters that are read at once: Linux refuses to give 4 MiB of a file in /proc/sys,
# however short it is (proc_sys_call_handler in fs/proc/proc_sysctl.c).
_PIECE = 2**16


def read(path: str) -> str | None:
    """Return the text of a file, or its beginning; ``None`` if it cannot be read."""
    try:
        with open(
            path, encoding="utf-8", errors="replace", opener=files.opened
        ) as file:
            pieces = iter(lambda: file.read(_PIECE), "")
            return "".join(islice(pieces, _LONGEST // _PIECE))
    except (OSError, ValueError):
        return None


def status(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the status of a process or of one of its threads; empty if it is gone."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    pairs = (
        line.partition(":") for line in (read(f"{folder}/status") or "").splitlines()
    )
    return {name: value.strip() for name, _, value in pairs}


def _stat(pid: int) -> tuple[str, list[str]]:
    """Return the name of a process, and the fields behind it; empty if it is gone.

    The first of the fields is its state, the third one of proc(5). The name, in
    brackets, may hold anything.
    """
    start, _, fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")
    return start.partition("(")[2], fields.split()


def age(pid: int) -> float:
    """Return the age of a process in seconds; 0 if it is gone."""
    _, fields = _stat(pid)
    if not fields:
        return 0.0
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def threads(pid: int | str = "self") -> list[int]:
    """Return the numbers of the threads of a process; empty if it is gone."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def open_files() -> set[int]:
    """Return the numbers of all open files of this process."""
    found = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return {number for number in found if target(number)}  # the folder is not, now


def target(number: int) -> str:
    """Return what an open file of this process is; empty if it is not open."""
    try:
        return str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:
        return ""


def ancestors(pid: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and numbers of a process and of those above."""
    names, pids = [], [pid]
    for _ in range(_MOST_ANCESTORS):
        name, fields = _stat(pids[-1])
        if not fields:
            break
        names.append(name)
        pids.append(int(fields[1]))
    return tuple(names), tuple(pids)


def may_be_renamed() -> bool:
    """Return whether this is a namespace of host names beside the machine's own."""
    try:
        return Path("/proc/self/ns/uts").stat().st_ino != _MACHINES_UTS
    except OSError:
        return True
