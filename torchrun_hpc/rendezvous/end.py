"""One end of a connection between an agent and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any


class End(asyncio.Protocol):
    """One end of a connection. Only a process that ends sends an end of file unasked.

    Attributes:
        at_end: Whether an end of file has come. The kernel of a process sends it when
            the process ends.
    """

    at_end = False
    _transport: Any = None
    _is_aborted = False

    def eof_received(self) -> None:
        """Take note of the end of file."""
        self.at_end = True

    def connection_lost(self, error: Exception | None) -> None:
        """Let the socket, which asyncio closes next, send a reset if a fault ends it.

        Args:
            error: The fault; ``None`` if the connection was closed.
        """
        if error is not None or self._is_aborted:
            with contextlib.suppress(OSError):  # the connection has ended already
                self._transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )

    def abort(self) -> None:
        """Close the connection now, whatever is still to be sent.

        The other end gets a reset instead of an end of file: this process lives.
        """
        if self._transport is not None:
            self._is_aborted = True
            self._transport.abort()
