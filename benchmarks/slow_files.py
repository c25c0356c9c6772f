"""A slow file system: a folder as it would be on a busy parallel file system.

    python benchmarks/slow_files.py MILLISECONDS FOLDER...

Mounts a pass-through over each FOLDER (root, FUSE). Each request takes so long: a look
at a name, an open, or 128 KiB of a file. Requests wait at the same time, and the kernel
caches what it has read, as with Lustre or NFS. The cache is empty after each mount.
When all are unmounted, it prints a JSON object: the requests of each kind, the
different files that were opened, and the bytes that were read.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import mfusepy  # type: ignore[import-untyped]

SECONDS = 60  # for which the kernel believes what it knows of names
VERSION = (mfusepy.fuse_version_major, mfusepy.fuse_version_minor)
# Since libfuse 3.12, only ten requests wait at the same time by default.
THREADS = {"max_threads": 64} if VERSION >= (3, 12) else {}


class PassThrough(mfusepy.Operations):  # type: ignore[misc]
    """Reads of a folder, each with a delay.

    Args:
        folder: The folder, open before the mount hides it.
        delay: Seconds.
    """

    use_ns = True

    def __init__(self, folder: int, delay: float) -> None:
        self._folder = folder
        self._delay = delay
        self._lock = threading.Lock()
        self._opened: set[str] = set()
        self.counts: collections.Counter[str] = collections.Counter()

    def _wait(self, kind: str, size: int = 0) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.counts["bytes"] += size
        time.sleep(self._delay)

    def getattr(self, path: str, _fh: int | None = None) -> dict[str, Any]:
        """Return what is known of a file."""
        self._wait("lookups")
        found = os.stat(f".{path}", dir_fd=self._folder, follow_symlinks=False)
        names = (
            *("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size"),
            "st_blocks",
        )
        times = {
            name: getattr(found, f"{name}_ns") for name in ("st_mtime", "st_ctime")
        }
        return {name: getattr(found, name) for name in names} | times

    def readlink(self, path: str) -> str:
        """Return where a link leads."""
        self._wait("links")
        return os.readlink(f".{path}", dir_fd=self._folder)

    def readdir(self, path: str, _fh: int) -> list[str]:
        """Return the names in a folder."""
        self._wait("folders")
        folder = os.open(f".{path}", os.O_RDONLY, dir_fd=self._folder)
        try:
            return [".", "..", *os.listdir(folder)]  # noqa: PTH208 - a number
        finally:
            os.close(folder)

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        with self._lock:
            self.counts["files"] += path not in self._opened
            self._opened.add(path)
        self._wait("opens")
        return os.open(f".{path}", flags, dir_fd=self._folder)

    def read(self, _path: str, size: int, offset: int, fh: int) -> bytes:
        """Read a part of an open file."""
        found = os.pread(fh, size, offset)
        self._wait("reads", len(found))
        return found

    def release(self, _path: str, fh: int) -> int:
        """Close a file."""
        os.close(fh)
        return 0


def serve(folder: str, delay: float) -> collections.Counter[str]:
    """Serve a folder until it is unmounted; return what was asked."""
    files = PassThrough(os.open(folder, os.O_PATH), delay)
    mfusepy.FUSE(
        files, folder, foreground=True, auto_cache=True, allow_other=True, ro=True,
        attr_timeout=SECONDS, entry_timeout=SECONDS, negative_timeout=SECONDS,
        **THREADS,
    )  # fmt: skip
    return files.counts


def main() -> None:
    """Serve until all folders are unmounted."""
    delay, folders = float(sys.argv[1]) / 1000, sys.argv[2:]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(folders), context) as servers:
        counts = [servers.submit(serve, folder, delay) for folder in folders]
        total = sum((count.result() for count in counts), collections.Counter())
    print(json.dumps(total))


if __name__ == "__main__":
    main()
