"""Ports that nobody else gets while the tests run."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def own_port(address: str = "") -> int:
    """Return a port for a server that is started later, on any address of this machine.

    A socket holds it until this process ends: bound, and not listening. So the kernel
    gives the port to nobody who asks for any, and refuses connections to it. A server
    that sets SO_REUSEADDR can listen there, as those of torch, of Python and of the
    launcher do.

    Args:
        address: Hold it on this address only.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if not address and socket.has_dualstack_ipv6():
        address, family = "::", socket.AF_INET6
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if address == "::":
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind((address, 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
