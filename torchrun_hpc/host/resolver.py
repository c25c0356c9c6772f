"""Checks of this node's resolver; one of them runs while torch is imported.

Torch asks for the names of addresses such as ``::ffff:10.20.0.1``, which no hosts file
has. If no name server answers, each worker waits for it, and prints a warning.
"""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from enum import Enum
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from torchrun_hpc import limits, programs
from torchrun_hpc.host import procfs

if TYPE_CHECKING:
    import subprocess

    from torchrun_hpc.host.network import Network


class Resolver(Enum):
    """The state of this node's resolver."""

    UNKNOWN = "unknown"  # not asked, or asked only a moment ago
    ANSWERS = "answers"
    SILENT = "silent"  # no answer in time, or a temporary failure
    DOWN = "down"  # no name server is reached


FILE, PORT = "/etc/resolv.conf", 53  # resolv.conf(5)
_SERVERS = re.compile(r"^nameserver\s+(\S+)", re.MULTILINE)

# A query for the root's name servers: RFC 1035, 4.1.
_QUERY = b"\0\1\1\0\0\1" + bytes(6) + b"\0\0\2\0\1"

_NO_ANSWER = 4  # the exit code of the query for an address


def ask_name_servers() -> Resolver:
    """Return whether a name server answers soon, or is at least reached."""
    state = Resolver.DOWN
    for server in _SERVERS.findall(procfs.read(FILE) or "") or ["127.0.0.1"]:
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.settimeout(limits.NAME_SERVER_TIMEOUT)
            asking.connect((server, PORT))
            asking.send(_QUERY)
            try:
                asking.recv(512)
            except TimeoutError:
                state = Resolver.SILENT
            else:
                return Resolver.ANSWERS
    return state


class ResolverCheck:
    """A query for the name of this node's first IPv4 address, in its own process."""

    def __init__(self, network: Network) -> None:
        self._start = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        ips = (a.ip for i in network.interfaces if i.up for a in i.addresses)
        usable = (a for a in ips if isinstance(a, IPv4Address) and not a.is_loopback)
        address = next(usable, None)
        if address is not None:
            with suppress(OSError):  # too many processes: not worth a message
                self._process = programs.start("ask_resolver", f"::ffff:{address}")

    def result(self) -> Resolver:
        """Return the resolver's state as far as it is known, and end the query."""
        if self._process is None:
            return Resolver.UNKNOWN
        with self._process as process:
            code = process.poll()
            process.kill()
        self._process = None
        if code is None and time.monotonic() - self._start > limits.RESOLVER_TIMEOUT:
            return Resolver.SILENT
        if code == _NO_ANSWER:
            is_down = ask_name_servers() is Resolver.DOWN
            return Resolver.DOWN if is_down else Resolver.SILENT
        return Resolver.ANSWERS if code == 0 else Resolver.UNKNOWN
