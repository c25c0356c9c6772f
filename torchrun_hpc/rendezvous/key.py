"""The user's key: a file of random bytes that all nodes of a job see."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc import files, waiting
from torchrun_hpc.host import mounts, procfs
from torchrun_hpc.rendezvous.proof import Secret

if TYPE_CHECKING:
    from torchrun_hpc.planning.meeting import KeyFile

_SIZE = 32  # bytes

# Seconds until this node sees another node's new file: NFS caches its absence.
LATE = 10.0


class Key:
    """This node's key. `name` is its file and fingerprint, or why there is none."""

    def __init__(self, file: KeyFile, launch: str) -> None:
        self._file = file
        self.secret = Secret(launch)
        self.name = "none (--hpc-auth=none)"

    def load(self) -> None:
        """Read the file, or make it: nodes that start together get the same key.

        A known key stays, whatever happens to the file.
        """
        path = Path(self._file.path)
        if self.secret.key or not self._file.path:
            return
        try:
            path = path.expanduser()
            key = _read_or_make(path, anywhere=self._file.is_explicit)
        except (OSError, ValueError, RuntimeError) as error:  # or no home
            reason = getattr(error, "strerror", None) or error
            self.name = f"none ({path}: {reason})"
        else:
            fingerprint = hashlib.sha256(b"fingerprint" + key).hexdigest()
            self.name = f"{path} ({fingerprint[:8]})"
            self.secret = Secret(self.secret.launch, key)


def _read_or_make(path: Path, *, anywhere: bool) -> bytes:
    with suppress(FileNotFoundError):
        return _read(path)
    folder = Path(os.path.realpath(path.parent))
    if not anywhere:
        kind = mounts.file_system(folder, procfs.read("/proc/self/mountinfo") or "")
        if kind.removeprefix("fuse.") not in mounts.SHARED:
            raise ValueError(f"nodes do not share its file system ({kind})")
    folder.mkdir(0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        return _make(path)
    waiting.until(path.is_file, LATE)
    return _read(path)


def _read(path: Path) -> bytes:
    def opener(name: str, flags: int) -> int:
        return files.opened(name, flags | os.O_NOFOLLOW)

    with open(path, "rb", opener=opener) as file:
        state = os.fstat(file.fileno())
        key: bytes = file.read(_SIZE + 1)
    if state.st_uid != os.geteuid():
        raise ValueError(f"it belongs to user {state.st_uid}")
    if state.st_mode & 0o077:
        raise ValueError(f"its mode is {state.st_mode & 0o777:o}, not 600")
    if len(key) != _SIZE or not any(key):  # zeros after a crash are no key
        raise ValueError(f"it does not have {_SIZE} random bytes; delete it")
    return key


def _make(path: Path) -> bytes:
    """Make a key. Raise `FileExistsError` if another node was faster."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(new, "xb", 0, opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_bytes(_SIZE))
            os.fsync(file.fileno())
        key = _read(new)  # a full disk may show only then
        os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
    return key
