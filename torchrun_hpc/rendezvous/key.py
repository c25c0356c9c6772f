"""The user's key, and the proof that both ends of a connection have it.

Both know the launch's secret. The caller begins::

    caller                            listener
    nonce, to, request      ───────►
                            ◄───────  nonce, proof
    the request, proof      ───────►

Each side has a random ``nonce``. ``to`` is the dialled address and port, so nobody can
pass on the proofs from another port. ``request`` is the request's digest, so that both
proofs cover it, and the listener proves itself first. Before the caller's proof, the
listener's answers differ only in random numbers.

The key is a file of random bytes on a file system that all nodes share. Without it, the
proofs show only that both sides know the launch id.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files, limits, waiting, wire
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import procfs
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torchrun_hpc.planning.meeting import KeyFile

    # Yields the lines to send, takes the received ones; a listener's returns a request.
    Steps = Generator[Mapping[str, Any], Mapping[str, Any], Any]

# --- the proof --------------------------------------------------------------------

CALLER, LISTENER = "caller", "listener"

NOWHERE = ("", 0)  # dialled within a process
_ALL = ("0.0.0.0", "::")

NO_PROOF = "no proof: another job, or another key"


class UnprovedError(ConnectionError):
    """The other side does not have the secret of this launch."""


@dataclass(frozen=True)
class Hello:
    """The caller's first line; `request` is the SHA-256 of the request's line."""

    nonce: str
    to: tuple[str, int]
    request: str


@dataclass(frozen=True)
class Challenge:
    """The listener's answer, with its proof."""

    nonce: str
    proof: str


@dataclass(frozen=True)
class Secret:
    """The secret that both sides know: the launch id, and the user's key, if any."""

    launch: str
    key: bytes = field(default=b"", repr=False)

    @functools.cached_property
    def _value(self) -> bytes:
        return hmac.digest(self.key, self.launch.encode(errors="replace"), "sha256")

    def proof(self, role: str, hello: Hello, nonce: str) -> str:
        """Return one side's proof, in hexadecimal. The nonce is the listener's."""
        facts = [role, self.launch, hello.nonce, nonce, *hello.to, hello.request]
        return hmac.digest(self._value, wire.to_line(facts), "sha256").hex()

    def call(self, to: tuple[str, int], request: Mapping[str, Any]) -> Steps:
        """Prove who calls: yield each line to send, and receive the answer to it.

        Raise `UnprovedError` if the listener has another secret, `WireError` if it is
        another program.
        """
        hello = Hello(secrets.token_hex(16), to, _digest(request))
        answer = yield wire.encode(hello)
        challenge = wire.decode(Challenge, answer)
        expected = self.proof(LISTENER, hello, challenge.nonce)
        if not _is_same(challenge.proof, expected):
            raise UnprovedError(NO_PROOF)
        yield {**request, "proof": self.proof(CALLER, hello, challenge.nonce)}

    def listen(self, address: str, port: int) -> Steps:
        """Examine a caller: receive each line, yield its answer, return the request.

        Raise `WireError` without a proof. A side that listens on all addresses cannot
        know the dialled one.
        """
        hello = wire.decode(Hello, (yield {}))
        if hello.to[1] != port or address not in {*_ALL, hello.to[0]}:
            raise WireError("dialled another address")
        nonce = secrets.token_hex(16)
        challenge = Challenge(nonce, self.proof(LISTENER, hello, nonce))
        request = dict((yield wire.encode(challenge)))
        proof, expected = request.pop("proof", ""), self.proof(CALLER, hello, nonce)
        is_proved = _is_same(proof, expected)
        if not (is_proved and _is_same(hello.request, _digest(request))):
            raise WireError("no proof")
        return request


def _digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(wire.to_line(request)).hexdigest()


def _is_same(received: object, expected: str) -> bool:
    # As bytes: text must be ASCII.
    received = str(received).encode(errors="replace")
    return hmac.compare_digest(received, expected.encode())


# --- the key ----------------------------------------------------------------------

_SIZE = 32  # bytes

# A file server may recover, and another node's new file may become visible. Lustre
# reports ESHUTDOWN to an evicted client.
_OF_SERVER = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ESHUTDOWN}
_PASSING = _OF_SERVER | {errno.ENOENT, errno.EEXIST}

REMEDY = "Pass --hpc-key-file=FILE on a shared file system"


class Key:
    """This node's key. `name` is its file and fingerprint, or why there is none.

    Once it is read, it stays, whatever happens to the file.
    """

    def __init__(self, file: KeyFile, launch: str) -> None:
        self._file = file
        self.secret = Secret(launch)
        self.name = "none (--hpc-auth=none)"

    def load(self) -> bool:
        """Read the file, or make it: nodes that start together get the same key.

        Return false if there is no file at the default path, none can be made, and
        nobody requires a key. In all other cases without a key, raise `LaunchError`.
        """
        late = limits.KEY_FILE_TIMEOUT
        waiting.until(lambda: getattr(self.attempt(), "errno", 0) not in _PASSING, late)
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
    """Return whether other users can replace a folder's files, or a link to it."""
    try:
        state = folder.lstat()
    except OSError:  # it does not exist, or a folder above it cannot be searched
        return False
    is_sticky = state.st_mode & stat.S_ISVTX  # like /tmp: only owners replace
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
    """Make a key, or return nothing. Raise `FileExistsError` if another node was first.

    Raise another `OSError` if this is impossible.
    """
    folder = Path(os.path.realpath(path.parent))
    kind = procfs.file_system(folder, procfs.read("/proc/self/mountinfo") or "")
    if not wanted.source and kind.removeprefix("fuse.") not in procfs.SHARED:
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
