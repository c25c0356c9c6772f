"""The file system of a path: see proc_pid_mountinfo(5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Types of shared file systems; FUSE types are without "fuse.".
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
