"""One end of a connection between an agent and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any


class End(asyncio.Protocol):
    """One end of a connection.

    Attributes:
        at_end: Whether an end of file has come. The kernel of a process sends it when
            the process ends.
    """

    at_end = False
    _transport: Any = None

    def eof_received(self) -> None:
        """Take note of the end of file."""
        self.at_end = True

    def abort(self) -> None:
        """Close the connection now, whatever is still to be sent.

        The other end gets a reset instead of an end of file: this process lives.
        """
        if self._transport is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            self._transport.abort()
