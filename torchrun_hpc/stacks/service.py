"""The socket for ``python -m torchrun_hpc.stacks``, which only its user can use.

It has a name in the node's network namespace, and no file. Each side checks the other
side's user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, wire
from torchrun_hpc.host import procfs
from torchrun_hpc.host.sockets import user_of
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_PREFIX = "torchrun_hpc.stacks"
_LONGEST_ID = 60  # characters of a launch id: a name has 107 bytes
_SOCKETS = "/proc/net/unix"
_LISTENS = "00010000"  # among its flags: __SO_ACCEPTCON, linux/net.h


class Service:
    """Answers the command in its own thread.

    ``collect`` returns the answer as plain data. A launch on one node may have no id.
    """

    def __init__(self, launch_id: str, collect: Callable[[], Any]) -> None:
        self._collect = collect
        self._listening: socket.socket | None = None
        # Random: anybody can take a name, and so block it for others.
        end = f"{launch_id[:_LONGEST_ID]}/{os.urandom(4).hex()}"
        self._name = f"\0{_PREFIX}/{os.getuid()}/{end}"
        self._thread = threading.Thread(target=self._run, name="stacks", daemon=True)

    def start(self) -> None:
        """Start answering, if a socket can be opened."""
        with contextlib.suppress(OSError, RuntimeError):  # no files, or no threads
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(self._name)
            listening.listen()
            self._listening = listening
            self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _run(self) -> None:
        while (listening := self._listening) is not None:
            # An error in one answer must not prevent the next one.
            try:
                asking, _ = listening.accept()
                with asking:
                    asking.settimeout(limits.STACKS_READ_TIMEOUT)
                    if user_of(asking) in (os.getuid(), 0):
                        asking.sendall(wire.to_line(self._collect()))
            except Exception:  # noqa: BLE001, PERF203
                time.sleep(limits.STACKS_PAUSE)


def launches() -> Iterator[tuple[str, str]]:
    """Yield launch id and socket name of each launch of this user on this node."""
    prefix = f"{_PREFIX}/{os.getuid()}/"
    for line in (procfs.read(_SOCKETS) or "").splitlines():
        _, _, name = line.partition(f"@{prefix}")  # empty for other sockets
        launch_id, _, end = name.rpartition("/")
        if end and _LISTENS in line.split():
            yield launch_id, f"\0{prefix}{name}"


def ask(name: str, timeout: float) -> Mapping[str, Any] | None:
    """Ask the agent with this socket for up to ``timeout`` seconds.

    Return ``None`` if another user has taken the name. Raise `OSError` if the agent
    does not answer.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(timeout)
        asking.connect(name)
        if user_of(asking) != os.getuid():
            return None
        answer = b"".join(iter(lambda: asking.recv(2**16), b""))
    try:
        data: Mapping[str, Any] = wire.from_json(answer)
    except WireError:
        raise ConnectionError("no answer") from None
    return data
