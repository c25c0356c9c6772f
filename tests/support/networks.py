"""The network of a node, made of dictionaries."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from torchrun_hpc.host.network import Interface, Network

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchrun_hpc.host.network import Address


def make_network(
    interfaces: Mapping[str, str],
    hosts: Mapping[str, str] | None = None,
    routes: Mapping[str, str] | None = None,
    down: Collection[str] = (),
) -> Network:
    """Describe the network of a node.

    Args:
        interfaces: Name to addresses with prefixes, between blanks.
        hosts: Host name to addresses, between blanks, as /etc/hosts would give them.
        routes: Network to the address that is sent from. The networks of the interfaces
            have routes.
        down: Names of the interfaces that are down.
    """
    described = tuple(
        Interface(
            name, tuple(map(ipaddress.ip_interface, text.split())), name not in down
        )
        for name, text in interfaces.items()
    )
    names = {"localhost": "127.0.0.1", **(hosts or {})}

    def resolve(host: str) -> tuple[Address, ...]:
        try:
            return (ipaddress.ip_address(host),)
        except ValueError:
            return tuple(map(ipaddress.ip_address, names.get(host, "").split()))

    def source_toward(address: Address) -> Address | None:
        for interface in described:
            for each in interface.addresses:
                if address in each.network:
                    return each.ip
        for network, source in (routes or {}).items():
            if address in ipaddress.ip_network(network):
                return ipaddress.ip_address(source)
        return None

    return Network(lambda: described, resolve, source_toward)
