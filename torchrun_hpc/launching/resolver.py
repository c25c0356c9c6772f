"""Whether the resolver of this node answers: found out while torch is imported.

Torch asks for the names of addresses, ``::ffff:10.20.0.1``, which no hosts file has. If
no name server answers, each worker waits for it, and prints a warning.
"""

from __future__ import annotations

import subprocess
import sys
import time
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from torchrun_hpc.planning.inputs import Resolver

if TYPE_CHECKING:
    from torchrun_hpc.network import Network

_ASK = """
import socket, sys
try:
    socket.getnameinfo((sys.argv[1], 0, 0, 0), socket.NI_NUMERICSERV)
except socket.gaierror as error:
    sys.exit(error.errno == socket.EAI_AGAIN)
"""

_SLOW = 0.5  # seconds: before these it is not known whether an answer is late


class ResolverCheck:
    """Asks what torch will ask, in a process of its own.

    Args:
        network: Has the address to ask for.
    """

    def __init__(self, network: Network) -> None:
        self._start = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        own = (
            address.ip
            for interface in network.interfaces
            for address in interface.addresses
            if interface.up
            and isinstance(address.ip, IPv4Address)
            and not address.ip.is_loopback
        )
        address = next(own, None)
        if address is None:
            return
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-ISc", _ASK, f"::ffff:{address}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no more processes: it is not worth a message
            return

    def result(self) -> Resolver:
        """Return what is known by now, and ask no longer."""
        if self._process is None:
            return Resolver.UNKNOWN
        with self._process as process:
            code = process.poll()
            process.kill()
        self._process = None
        if code is None:
            is_slow = time.monotonic() - self._start > _SLOW
            return Resolver.SLOW if is_slow else Resolver.UNKNOWN
        known = {0: Resolver.ANSWERS, 1: Resolver.DOWN}
        return known.get(code, Resolver.UNKNOWN)
