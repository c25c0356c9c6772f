"""Reading and writing files in folders in which other users can write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def is_of_system(path: Path) -> bool:
    """Return whether a path is in /dev or /proc, as /dev/stdout is.

    No other user can have put a link there.
    """
    folder = os.path.realpath(path.parent)
    return os.path.exists(path) and (folder == "/dev" or folder.startswith("/proc/"))  # noqa: PTH110


def opened(path: str, flags: int) -> int:
    """Open a file if it is a regular one; an opener for `open`.

    Opening a pipe that nobody uses would wait, and a device may have no end.

    Args:
        path: Its path.
        flags: For `os.open`.

    Raises:
        OSError: It cannot be opened, or is something else.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    # `open` itself refuses folders.
    if stat.S_IFMT(os.fstat(number).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        os.close(number)
        raise OSError(errno.EINVAL, "It is not a file")
    return number


def read(path: Path | str, most: int, flags: int = 0) -> bytes:
    """Read a regular file.

    Args:
        path: Its path.
        most: Bytes that it may have.
        flags: More for `os.open`: ``os.O_NOFOLLOW`` if others may have put a link
            there.

    Raises:
        OSError: It cannot be read, is no regular file, or has more bytes.
    """
    with open(path, "rb", opener=lambda name, own: opened(name, own | flags)) as file:
        data: bytes = file.read(most + 1)
    if len(data) <= most:
        return data
    raise OSError(errno.EFBIG, f"It has more than {most:,} bytes")


def write(path: Path, text: str) -> None:
    """Write a file: all of it, or nothing.

    An existing file or link is replaced, unless it is in /dev or /proc. There the text
    is added: /dev/stdout may be a file. Who may read a new file follows from the umask,
    or from the folder's default ACL.

    Raises:
        OSError: It cannot be written.
    """
    if is_of_system(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    with _beside(path) as new:
        with new.open("x", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)


def check(path: Path) -> None:
    """Check whether `write` can write a file, which is left as it is.

    In /dev and /proc nothing is tried.

    Raises:
        OSError: It cannot.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not is_of_system(path):
        with _beside(path) as new:
            new.touch(exist_ok=False)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a name for a new file in the same folder, which is removed in the end.

    Nobody can have put a link there: the name is random, and no link is followed.
    """
    new = path.parent / f".torchrun_hpc.{os.urandom(8).hex()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)
