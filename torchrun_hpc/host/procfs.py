"""Processes, this machine and its mounts, from Linux's ``/proc``.

See proc(5) and proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path

from torchrun_hpc import files

# Changes at each boot.
BOOT_ID = "/proc/sys/kernel/random/boot_id"

# The UTS namespace (host name) outside containers: PROC_UTS_INIT_INO in proc_ns.h.
_MACHINES_UTS = 0xEFFFFFFE

_MOST_ANCESTORS = 64

# Characters of a file: many times more than a list of the largest machine's hosts.
_LONGEST = 2**24

# Characters per read. Linux refuses reads of 4 MiB in /proc/sys, even from a short file
# (proc_sys_call_handler in fs/proc/proc_sysctl.c).
_PIECE = 2**16


def read(path: str) -> str | None:
    """Return the text of a file; ``None`` if it cannot be read.

    Of a very long file, return the beginning.
    """
    try:
        with open(
            path, encoding="utf-8", errors="replace", opener=files.opened
        ) as file:
            pieces = iter(lambda: file.read(_PIECE), "")
            return "".join(islice(pieces, _LONGEST // _PIECE))
    except (OSError, ValueError):
        return None


def pairs(path: str) -> dict[str, str]:
    """Return the values in a file of lines ``Name: value``; empty without the file."""
    lines = (line.partition(":") for line in (read(path) or "").splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def status(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the status of a process or one of its threads; empty if it has ended."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    return pairs(f"{folder}/status")


def _stat(pid: int) -> tuple[str, list[str]]:
    """Return a process's name and the fields after it; empty if it has ended.

    The first field is the state, which proc(5) numbers 3. The name, in brackets, may
    have any characters.
    """
    start, _, fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")
    return start.partition("(")[2], fields.split()


def age(pid: int) -> float:
    """Return the age of a process in seconds; 0 if it has ended."""
    _, fields = _stat(pid)
    if not fields:
        return 0.0
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def threads(pid: int | str = "self") -> list[int]:
    """Return the ids of a process's threads; empty if it has ended."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def open_files() -> set[int]:
    """Return the descriptors of this process's open files."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return {n for n in numbers if target(n)}  # without the folder's, which is closed


def target(descriptor: int) -> str:
    """Return the path of an open descriptor of this process; empty if it is closed."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""


def ancestors(pid: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and pids of a process and its ancestors, nearest first."""
    names, pids = [], [pid]
    for _ in range(_MOST_ANCESTORS):
        name, fields = _stat(pids[-1])
        if not fields:
            break
        names.append(name)
        pids.append(int(fields[1]))
    return tuple(names), tuple(pids)


def may_be_renamed() -> bool:
    """Return whether this process may be in a container with its own host name."""
    try:
        return Path("/proc/self/ns/uts").stat().st_ino != _MACHINES_UTS
    except OSError:
        return True


# --- mounts ---------------------------------------------------------------------------

# Types of file systems that nodes share. FUSE types lack their "fuse.".
SHARED = {
    *("beegfs", "beegfs_nodev", "ceph", "ceph-fuse", "cvfs", "dvs", "fhgfs", "gpfs"),
    *("glusterfs", "juicefs", "lustre", "nfs", "nfs4", "panfs", "pvfs2", "quobyte"),
    "wekafs",
}


def file_system(path: Path, mounts: str) -> str:
    """Return the type of an absolute path's file system, or ``unknown``.

    ``mounts`` is the text of ``/proc/self/mountinfo``. The path has no links.
    """
    nearest, kind = "", "unknown"
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        folder = mount.split(" ")[4].replace(r"\040", " ")
        # A later mount of the same folder hides earlier ones.
        if path.is_relative_to(folder) and len(folder) >= len(nearest):
            nearest, kind = folder, source.split(" ")[0]
    return kind
