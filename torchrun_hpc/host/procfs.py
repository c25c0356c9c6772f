"""What Linux says of processes and of this machine in ``/proc``."""

from __future__ import annotations

from pathlib import Path

from torchrun_hpc import files

# Of this machine since it was started.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# The namespace that a machine starts with: PROC_UTS_INIT_INO in Linux's proc_ns.h.
_MACHINES_UTS = 0xEFFFFFFE

_MOST_ANCESTORS = 64

# Characters of a file: many times what the hosts of the largest machine take.
_LONGEST = 2**24


def read(path: str) -> str | None:
    """Return the text of a file, or its beginning; ``None`` if it cannot be read."""
    try:
        with open(
            path, encoding="utf-8", errors="replace", opener=files.opened
        ) as file:
            return file.read(_LONGEST)
    except (OSError, ValueError):
        return None


def ancestors(pid: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
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


def may_be_renamed() -> bool:
    """Return whether this is a namespace of host names beside the machine's own."""
    try:
        return Path("/proc/self/ns/uts").stat().st_ino != _MACHINES_UTS
    except OSError:
        return True
