"""Whether the resolver of this node answers: found out while torch is imported.

Torch asks for the names of addresses, ``::ffff:10.20.0.1``, which no hosts file has. If
no name server answers, each worker waits for it, and prints a warning.
"""

from __future__ import annotations

import subprocess
import sys
import time
from enum import Enum
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Network


class Resolver(Enum):
    """Whether the resolver of this node answers."""

    UNKNOWN = "unknown"  # nobody has asked, or not for long
    ANSWERS = "answers"
    SILENT = "silent"  # it has not answered, or says that it cannot
    DOWN = "down"  # no name server can be reached


_ASK = """
import socket, sys

def is_reached(server):
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.settimeout(1)
        try:
            asking.connect((server, 53))
            asking.send(b"\\0\\1\\1\\0\\0\\1" + bytes(6) + b"\\0\\0\\2\\0\\1")
            asking.recv(512)
        except TimeoutError:
            return True  # it may be slow
        except OSError:
            return False
    return True

try:
    socket.getnameinfo((sys.argv[1], 0, 0, 0), socket.NI_NUMERICSERV)
except socket.gaierror as error:
    if error.errno != socket.EAI_AGAIN:
        sys.exit(0)
else:
    sys.exit(0)
try:
    with open("/etc/resolv.conf") as file:
        words = [line.split() for line in file]
except OSError:
    words = []
servers = [line[1] for line in words if line[:1] == ["nameserver"] and line[1:]]
sys.exit(4 if any(map(is_reached, servers or ["127.0.0.1"])) else 3)
"""

_SLOW = 0.5  # seconds: before these it is not known whether an answer is late
_RESULTS = {0: Resolver.ANSWERS, 3: Resolver.DOWN, 4: Resolver.SILENT}  # exit codes


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
        if code is None and time.monotonic() - self._start > _SLOW:
            return Resolver.SILENT
        return _RESULTS.get(-1 if code is None else code, Resolver.UNKNOWN)
