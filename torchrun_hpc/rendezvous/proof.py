"""The proof that both ends of a connection belong to the same launch.

Both know the launch's secret. The caller begins::

    caller                            listener
    nonce, to, request      ───────►
                            ◄───────  nonce, proof
    the request, proof      ───────►

Each side has a random ``nonce``. ``to`` is the dialled address and port, so nobody can
pass the proofs on from another port. ``request`` is the digest of the request. So both
proofs cover it, and the listener proves itself first. Before the caller's proof, the
listener's answers differ in random numbers only.

Without a key, the proofs show only that both know the launch id.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    # The lines to send, the received ones, and for a listener the request.
    Steps = Generator[Mapping[str, Any], Mapping[str, Any], Any]

CALLER, LISTENER = "caller", "listener"

NOWHERE = ("", 0)  # dialled within a process
_ALL = ("0.0.0.0", "::")

NO_PROOF = "no proof: another job, or another key"


class UnprovedError(ConnectionError):
    """The other side does not have the secret of this launch."""


@dataclass(frozen=True)
class Hello:
    """The first message; `request` is the SHA-256 of the request's line of JSON."""

    nonce: str
    to: tuple[str, int]
    request: str


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
        said = [role, self.launch, hello.nonce, nonce, *hello.to, hello.request]
        return hmac.digest(self._value, wire.to_line(said), "sha256").hex()

    def call(self, to: tuple[str, int], request: Mapping[str, Any]) -> Steps:
        """Prove who calls: yield each line to send, and receive the answer to it.

        Raise `UnprovedError`, or for another program `WireError`.
        """
        hello = Hello(secrets.token_hex(16), to, _digest(request))
        answer = yield wire.encode(hello)
        nonce, theirs = (wire.decode(str, answer.get(x)) for x in ("nonce", "proof"))
        if not _is_same(theirs, self.proof(LISTENER, hello, nonce)):
            raise UnprovedError(NO_PROOF)
        yield {**request, "proof": self.proof(CALLER, hello, nonce)}

    def listen(self, address: str, port: int) -> Steps:
        """Examine a caller: receive each line, yield its answer, return the request.

        Raise `WireError` without a proof. A side that listens on all addresses cannot
        know the dialled one.
        """
        hello = wire.decode(Hello, (yield {}))
        if hello.to[1] != port or address not in {*_ALL, hello.to[0]}:
            raise WireError("dialled another address")
        nonce = secrets.token_hex(16)
        answer = {"nonce": nonce, "proof": self.proof(LISTENER, hello, nonce)}
        request = dict((yield answer))
        theirs, own = request.pop("proof", ""), self.proof(CALLER, hello, nonce)
        if not (_is_same(theirs, own) and _is_same(hello.request, _digest(request))):
            raise WireError("no proof")
        return request


def _digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(wire.to_line(request)).hexdigest()


def _is_same(theirs: object, own: str) -> bool:
    # As bytes: text must be ASCII.
    return hmac.compare_digest(str(theirs).encode(errors="replace"), own.encode())
