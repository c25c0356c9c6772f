"""One end of a connection between an agent and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from torchrun_hpc import wire
from torchrun_hpc.rendezvous.protocol import JOIN_REQUEST_LIMIT


class End(asyncio.Protocol):
    """One end of a connection.

    Lines are short until the other end has proved itself. Only an ending process sends
    an end of file without being asked: the kernel does.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self.lines = wire.Lines(JOIN_REQUEST_LIMIT)
        self.at_end = False
        self._is_aborted = False

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def eof_received(self) -> None:
        """Remember the end of file."""
        self.at_end = True

    def connection_lost(self, error: Exception | None) -> None:
        """If a fault ends it, let the socket send a reset when asyncio closes it."""
        if error is not None or self._is_aborted:
            with contextlib.suppress(OSError):  # the connection has ended already
                self.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )

    def abort(self) -> None:
        """Close the connection now. A reset shows that this process lives."""
        if self.transport is not None:
            self._is_aborted = True
            self.transport.abort()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        with contextlib.suppress(OSError):
            self.transport.close()
