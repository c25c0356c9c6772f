"""The user's key: a file of random bytes that all nodes of a job see."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc import files, waiting
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import mounts, procfs
from torchrun_hpc.rendezvous.proof import Secret

if TYPE_CHECKING:
    from torchrun_hpc.planning.meeting import KeyFile

_SIZE = 32  # bytes

# Seconds until a file server recovers, or until another node's new file can be seen,
# because NFS caches its absence. Lustre reports ESHUTDOWN to an evicted client.
LATE = 10.0
_OF_SERVER = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN}
_PASSING = _OF_SERVER | {errno.ENOENT, errno.EEXIST}

REMEDY = "Pass --hpc-key-file=FILE on a shared file system"


class Key:
    """This node's key. `name` is its file and fingerprint, or why there is none.

    A known key stays, whatever happens to the file.
    """

    def __init__(self, file: KeyFile, launch: str) -> None:
        self._file = file
        self.secret = Secret(launch)
        self.name = "none (--hpc-auth=none)"

    def load(self) -> bool:
        """Read the file, or make it: nodes that start together get the same key.

        Return whether that was possible. If it was not, there is no file at the default
        path, and nobody requires a key. In all other cases, raise `LaunchError`.
        """
        waiting.until(lambda: getattr(self.attempt(), "errno", 0) not in _PASSING, LATE)
        problem, file = self.attempt(), self._file
        is_absent = isinstance(problem, RuntimeError)
        asked = file.source or file.required
        if problem is None or (is_absent and not asked):
            return problem is None
        how = REMEDY if is_absent else f"{REMEDY}, or remove this file"
        if file.source:
            how = "Set a file that only you can read, or that this node can create"
        by = f" ({asked})" if asked else ""
        text = f"this node needs a usable key{by}. Key here: {self.name}. {how}"
        # Without a proof, nobody can be told.
        raise LaunchError("HPC238", text, others_know=True)

    def attempt(self) -> Exception | None:
        """Read the file, or make it, unless this was done; return what prevents that.

        A `RuntimeError` means that there is no key, and that this node cannot make one.
        """
        path = Path(self._file.path)
        if self.secret.key or not self._file.path:
            return None
        try:
            path = path.expanduser()  # RuntimeError: there is no home
            key = _read_or_make(path, self._file)
        except (OSError, ValueError, RuntimeError) as error:
            if self.secret.key:  # another thread was faster
                return None
            kind = "none" if isinstance(error, RuntimeError) else "unusable"
            self.name = f"{kind} ({path}: {getattr(error, 'strerror', None) or error})"
            return error
        if not key:
            self.name = f"none yet ({path}: a launch creates it)"
            return None
        fingerprint = hashlib.sha256(b"fingerprint" + key).hexdigest()
        self.name = f"{path} ({fingerprint[:8]})"
        self.secret = Secret(self.secret.launch, key)
        return None


def _read_or_make(path: Path, wanted: KeyFile) -> bytes:
    try:
        return _read(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if os.path.lexists(path):  # not if its folder cannot be searched
            raise
    try:
        return _make(path, wanted)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        reason = error.strerror or str(error)
        if not wanted.source and any(map(_is_others, path.parents)):
            # One of the others may have removed the key, or replaced a folder.
            raise OSError(f"{reason}; others can write to its folder") from None
        raise RuntimeError(reason) from None


def _is_others(folder: Path) -> bool:
    """Return whether others can replace what is in a folder, or the folder's link."""
    try:
        state = folder.lstat()
    except OSError:  # it does not exist, or a folder above it cannot be searched
        return False
    is_sticky = state.st_mode & stat.S_ISVTX  # as /tmp: only owners replace
    is_open = stat.S_ISDIR(state.st_mode) and state.st_mode & 0o022 and not is_sticky
    return bool(is_open) or state.st_uid not in (0, os.geteuid())


def _read(path: Path) -> bytes:
    def opener(name: str, flags: int) -> int:
        return files.opened(name, flags | os.O_NOFOLLOW)

    with open(path, "rb", opener=opener) as file:
        state = os.fstat(file.fileno())
        key: bytes = file.read(_SIZE + 1)
    if state.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {state.st_uid}")
    if state.st_mode & 0o077:
        raise OSError(f"its mode is {state.st_mode & 0o777:o}, not 600")
    if len(key) != _SIZE or not any(key):  # zeros after a crash are no key
        raise OSError(f"it does not have {_SIZE} random bytes")
    return key


def _make(path: Path, wanted: KeyFile) -> bytes:
    """Make a key, or return nothing. Raise `FileExistsError` if another node has."""
    folder = Path(os.path.realpath(path.parent))
    kind = mounts.file_system(folder, procfs.read("/proc/self/mountinfo") or "")
    if not wanted.source and kind.removeprefix("fuse.") not in mounts.SHARED:
        raise OSError(f"nodes do not share its file system ({kind})")
    if not wanted.may_make:
        return b""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    with files.beside(path) as new:
        with open(new, "xb", 0, opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_bytes(_SIZE))
            os.fsync(file.fileno())
        key = _read(new)  # a full disk may show only then
        os.link(new, path)
    return key
