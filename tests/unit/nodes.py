"""Nodes and environments for the tests, made of dictionaries."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from torchrun_hpc.network import Interface, Network

ENVIRONMENTS = Path(__file__).parent / "environments"
RECORDED = sorted(path.stem for path in ENVIRONMENTS.glob("slurm-*.json"))

HOSTNAME = "(hostname)"


def recorded(name):
    """Return the environment and the host name of every task of a recorded launch."""
    tasks = json.loads((ENVIRONMENTS / f"{name}.json").read_text())["tasks"]
    return [
        ({k: v for k, v in task.items() if k != HOSTNAME}, task[HOSTNAME])
        for task in tasks
    ]


def changed(environ, changes):
    """Return a copy of an environment; a value of None removes the variable."""
    return {k: v for k, v in (environ | changes).items() if v is not None}


def make_network(interfaces, hosts=None, routes=None, down=()):
    """Describe the network of a node.

    Args:
        interfaces: Name to addresses with prefixes, between blanks.
        hosts: Host name to addresses, between blanks, as /etc/hosts would give them.
        routes: Network to the address that is sent from. Networks of the interfaces
            need none.
        down: Names of the interfaces that are down.
    """
    found = tuple(
        Interface(
            name, tuple(map(ipaddress.ip_interface, text.split())), name not in down
        )
        for name, text in interfaces.items()
    )

    def resolve(host):
        try:
            return (ipaddress.ip_address(host),)
        except ValueError:
            known = ({"localhost": "127.0.0.1"} | (hosts or {})).get(host, "").split()
            return tuple(map(ipaddress.ip_address, known))

    def source_toward(address):
        for interface in found:
            for own in interface.addresses:
                if address in own.network:
                    return own.ip
        for network, source in (routes or {}).items():
            if address in ipaddress.ip_network(network):
                return ipaddress.ip_address(source)
        return None

    return Network(found, resolve, source_toward)
