"""Safe reading and writing of files in folders where other users can write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def is_of_system(path: Path) -> bool:
    """Return whether a path exists in /dev or /proc, where only root can put links."""
    folder = os.path.realpath(path.parent)
    return os.path.exists(path) and (folder == "/dev" or folder.startswith("/proc/"))  # noqa: PTH110


def exists(path: str) -> bool:
    """Return whether a file or a folder exists; false also if nobody can tell."""
    return os.path.exists(path)  # noqa: PTH110 - raises nothing


def opened(path: str, flags: int) -> int:
    """Open a regular file, as an opener for `open`; raise `OSError` for another file.

    A pipe or a device could make the launcher wait, or have no end.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    # `open` itself refuses folders.
    if stat.S_IFMT(os.fstat(number).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        os.close(number)
        raise OSError(errno.EINVAL, "It is not a file")
    return number


def read(path: Path | str, most: int, flags: int = 0) -> bytes:
    """Read a regular file of at most ``most`` bytes, or raise `OSError`.

    ``flags`` are for `os.open`: ``os.O_NOFOLLOW`` if others can put a link there.
    """
    with open(path, "rb", opener=lambda name, more: opened(name, more | flags)) as file:
        data: bytes = file.read(most + 1)
    if len(data) <= most:
        return data
    raise OSError(errno.EFBIG, f"It has more than {most:,} bytes")


def from_toml(text: str) -> dict[str, Any]:
    """Parse TOML, or raise `ValueError`."""
    # Slow to import. Direct mode on one node reads no site.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    return tomllib.loads(text)


def write(path: Path, text: str) -> None:
    """Write the whole file, or raise `OSError` and write nothing.

    Replace an existing file or link. In /dev and /proc, append the text, because
    /dev/stdout may be a file. A new file's permissions follow from the umask or the
    folder's default ACL.
    """
    if is_of_system(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    with beside(path) as new:
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)


def check(path: Path) -> None:
    """Raise `OSError` if `write` could not write a file; skip /dev and /proc."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not is_of_system(path):
        with beside(path) as new:
            new.touch(exist_ok=False)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a random path in the same folder, for a new file; remove it at the end."""
    new = path.parent / f".torchrun_hpc.{os.urandom(8).hex()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)
