"""The network as this node sees it: interfaces, names, routes, ports.

A `Network` has functions, so that a plan asks only for the facts that it needs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.host import procfs

if TYPE_CHECKING:
    from collections.abc import Callable

# Its settings of ports also count for IPv6.
_SYSCTL = "/proc/sys/net/ipv4"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """A network interface of this node."""

    name: str  # ``ib0``; ``eth0:1`` with a label
    addresses: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]
    up: bool = True  # up and running
    mtu: int = 0  # bytes per packet; 0 if unknown
    speed_mbit: int = 0  # from its driver; 0 if unknown


@dataclass(frozen=True)
class Network:
    """The network of this node.

    Attributes:
        resolve: Returns the addresses of a host name; none if it does not resolve.
        source_toward: Returns the kernel's source address toward an address; ``None``
            without a route. Sends nothing.
    """

    list_interfaces: Callable[[], tuple[Interface, ...]]
    resolve: Callable[[str], tuple[Address, ...]]
    source_toward: Callable[[Address], Address | None]

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """All interfaces of this node."""
        return self.list_interfaces()

    def addresses_of(self, host: str) -> tuple[Address, ...]:
        """Return the addresses at which other nodes could reach a host.

        Loopback and link-local addresses do not count; ``127.0.1.1`` is common in
        ``/etc/hosts``. The order is equal on all nodes, unlike getaddrinfo's: IPv4
        first, then by number.
        """
        usable = set(filter(_is_reachable, self.resolve(host)))
        return tuple(sorted(usable, key=lambda a: (a.version, int(a))))

    def owner(self, address: Address | None) -> Interface | None:
        """Return the interface of this node that has an address."""
        for interface in self.interfaces:
            if any(entry.ip == address for entry in interface.addresses):
                return interface
        return None

    def own_address(self, host: str) -> Address | None:
        """Return the address of a host name that an interface of this node has."""
        return next((a for a in self.addresses_of(host) if self.owner(a)), None)

    def local_address(self, host: str) -> Address | None:
        """Return a host name's address on this node, which may be loopback."""
        addresses = self.resolve(host)
        return next((a for a in addresses if a.is_loopback or self.owner(a)), None)

    def address_toward(self, other: Address) -> Address | None:
        """Return this node's address as another node would see it."""
        source = self.source_toward(other)
        is_usable = source and _is_reachable(source) and self.owner(source)
        return source if is_usable else None

    def address_near(self, host: str) -> Address | None:
        """Return this node's address as a host, which may be this one, would see it."""
        for far in self.addresses_of(host):
            near = far if self.owner(far) else self.address_toward(far)
            if near is not None:
                return near
        return None

    def own_addresses(self) -> str:
        """Return this node's addresses as one text, for a message."""
        return ", ".join(str(a.ip) for i in self.interfaces for a in i.addresses)

    def shares(self, address: Address) -> bool:
        """Return whether an address is in a network of this node."""
        return any(address in a.network for i in self.interfaces for a in i.addresses)

    def siblings(self, interface: Interface, address: Address) -> tuple[Interface, ...]:
        """Return an interface and its rails: ``hsn0`` to ``hsn3`` for one of them.

        Rails are up, their names differ only in the number, and they have an address in
        the network of ``address``. But ``eth0`` and ``eth1`` are often two networks, of
        which one is closed between nodes.
        """
        rail = re.escape(re.sub("[0-9]+$", "", interface.name)) + "[0-9]+"
        networks = {a.network for a in interface.addresses if a.ip == address}
        return tuple(
            other
            for other in self.interfaces
            if other == interface
            or (
                other.up
                and re.fullmatch(rail, other.name)
                and any(a.network in networks for a in other.addresses)
            )
        )


def _is_reachable(address: Address) -> bool:
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
    )


def this_node() -> Network:
    """Return this node's network, which looks each name up once: answers can differ."""
    interfaces, names = functools.cache(_interfaces), functools.cache(resolve)
    return Network(interfaces, names, source_toward)


def _interfaces() -> tuple[Interface, ...]:
    import psutil  # noqa: PLC0415 - slow to import

    stats = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        # A label (eth0:1) has no state of its own.
        state = stats.get(name) or stats.get(name.partition(":")[0])
        ip = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = tuple(_with_prefix(e.address, e.netmask) for e in ip)
        facts = (state.isup, state.mtu, state.speed) if state else ()
        interfaces.append(Interface(name, addresses, *facts))
    return tuple(interfaces)


def _with_prefix(
    address: str, netmask: str | None
) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    host = address.partition("%")[0]
    if netmask is None:
        return ipaddress.ip_interface(host)
    prefix = int(ipaddress.ip_address(netmask)).bit_count()
    return ipaddress.ip_interface(f"{host}/{prefix}")


def resolve(host: str) -> tuple[Address, ...]:
    """Return the addresses of a host name or number; none if it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    texts = (str(address[0]).partition("%")[0] for *_, address in entries)
    return tuple(map(ipaddress.ip_address, texts))


def source_toward(address: Address) -> Address | None:
    """Return the kernel's source address toward an address; nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # discard; connecting UDP is local
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None


def path_problem(address: str | None, host: str) -> tuple[str, bool]:
    """Return why a host can be silent, and whether this is certain.

    The text is empty if this node shows no reason. ``address`` is this node's address
    in the job.
    """
    import psutil  # noqa: PLC0415 - slow to import

    network = this_node()
    try:
        interfaces = network.interfaces
    except (OSError, psutil.Error):
        return "", False
    owner = network.owner(ipaddress.ip_address(address)) if address else None
    if owner and not owner.up:
        return f"interface {owner.name}, which has {address}, is down", True
    if is_number(host):  # the route may use another interface than the job
        source = network.address_toward(ipaddress.ip_address(host))
        owner, address = network.owner(source) or owner, str(source or address)
    if owner is None:
        return "", False
    others = [
        i.name
        for i in interfaces
        if i.up and i != owner and any(_is_reachable(a.ip) for a in i.addresses)
    ]
    text = f"tried from {owner.name} ({address}); also up here: {', '.join(others)}"
    return text if others else "", False


def bound_socket(address: str, port: int, backlog: int | None = None) -> socket.socket:
    """Bind a socket to one address of this node, like torch's store; port 0 is any.

    With ``backlog``, it listens.

    Raises:
        OSError: The port is taken or not permitted, or this node lacks the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        if backlog is not None:
            opened.listen(backlog)
    except OSError:
        opened.close()
        raise
    return opened


def state_of(address: str, port: int, timeout: float) -> str:
    """Return what an attempt to connect shows of a node, as the end of a sentence.

    A refused connection shows that the node is reached.
    """
    try:
        socket.create_connection((address, port), timeout).close()
    except ConnectionRefusedError:
        return "is reached, and nobody listens there"
    except TimeoutError:
        return "does not answer"
    except OSError as error:
        return f"is not reached: {error.strerror or error}"
    return "is reached, and somebody listens there"


def free_port(address: str) -> int:
    """Return a port that was free on this address a moment ago."""
    with bound_socket(address, 0) as probe:
        return int(probe.getsockname()[1])


def port_problem(address: str, port: int) -> str:
    """Return why this process cannot listen on an address and port; empty if it can.

    The socket does not listen, so that no waiting client connects to it.
    """
    error = _binding_error(address, port)
    if error is not None and error.errno == errno.EADDRINUSE:
        return f"it is taken by {port_holder(port)}"
    return str(error.strerror) if error else ""


def port_is_taken(address: str, port: int) -> bool:
    """Return whether another socket is bound to an address and port of this node."""
    error = _binding_error(address, port)
    return error is not None and error.errno == errno.EADDRINUSE


def _binding_error(address: str, port: int) -> OSError | None:
    try:
        bound_socket(address, port).close()
    except OSError as error:
        return error
    return None


def port_holder(port: int) -> str:
    """Describe the program that listens on a port of this node, for a message."""
    import psutil  # noqa: PLC0415 - slow to import

    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        connections = []
    listening = (c for c in connections if c.status == psutil.CONN_LISTEN)
    pids = (c.pid for c in listening if c.laddr and c.laddr.port == port)
    for pid in filter(None, pids):  # other users' are unknown
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return f"{process.name()} (pid {pid}, {process.username()})"
    return "a program of another user"


def local_ports() -> tuple[int, int]:
    """Return the first and last port of Linux's ephemeral range; zeros if unknown.

    See ip_local_port_range in the kernel's ``Documentation/networking/ip-sysctl.rst``.
    """
    text = (procfs.read(f"{_SYSCTL}/ip_local_port_range") or "").strip()
    match = re.fullmatch(r"([0-9]{1,5})\s+([0-9]{1,5})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def reserved_ports() -> str:
    """Return the ports that Linux assigns only on request: ``20000-20010,25000``.

    The text is empty if they are unknown. See ip_local_reserved_ports in the kernel's
    ``Documentation/networking/ip-sysctl.rst``.
    """
    text = (procfs.read(f"{_SYSCTL}/ip_local_reserved_ports") or "").strip()
    return text if re.fullmatch("[0-9,-]*", text) else ""


def join_endpoint(host: str, port: int | str) -> str:
    """Write ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Return whether a host is a numeric address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
