"""Where the nodes meet, and under which address each of them is known.

Names and port are the same on all nodes: they are made of names and of the job's
identity. Addresses belong to this node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.network import names_match

if TYPE_CHECKING:
    from torchrun_hpc.job import Job
    from torchrun_hpc.network import Address
    from torchrun_hpc.question import Question, Value

# Below Linux's ephemeral ports (32768 and up), which any program may be given.
PORTS = range(20000, 29000)


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes are to meet, as far as names tell.

    Attributes:
        host: Name or number of the host, rewritten for the site.
        plain: The same before it was rewritten.
        port: Its port.
        node: Rank of the node that it names; ``None`` if it names none.
        typed: What the user typed; ``None`` if the host was derived.
    """

    host: str
    plain: str
    port: int
    node: int | None
    typed: Value | None


@dataclass(frozen=True)
class Meeting:
    """Where the nodes meet, as this node sees it.

    Attributes:
        host: Name or number of the host, as used here.
        port: Its port.
        address: The number behind ``host``; ``None`` if it has none here.
        own: This node's address; ``None`` if other nodes could reach none of those
            that are known.
        is_host: Whether this node is the host.
        warnings: What was worked around on this node.
    """

    host: str
    port: int
    address: Address | None
    own: Address | None
    is_host: bool
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Write host and port as an endpoint."""
        return join_endpoint(self.host, self.port)


def port_of(identity: str) -> int:
    """Derive the port of a launch from its identity; the same on all nodes."""
    digest = hashlib.sha256(identity.encode()).digest()
    return PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]


def endpoint_of(q: Question, job: Job) -> Endpoint:
    """Say where the nodes are to meet: a function of names.

    Raises:
        LaunchError: What was typed is not an endpoint.
    """
    typed = q.options.get("rdzv_endpoint") or q.options.get("master_addr")
    port = q.typed("master_port") or port_of(job.identity)
    if typed is None:
        plain = job.nodes[0]
        return Endpoint(q.rewrite(plain), plain, port, 0, None)
    speak = job.task_rank == 0
    host, typed_port = split_endpoint(typed, speak=speak)
    if typed_port == 0:
        raise LaunchError(
            f"{typed}: port 0 is another port at every start, which the other nodes "
            f"could not know. Leave it out, or type one: {host}:29400",
            speak=speak,
        )
    node = None
    if not is_number(host):
        named = (
            rank
            for rank, name in enumerate(job.nodes)
            if names_match((name, q.rewrite(name)), host)
        )
        node = next(named, None)
    fast = host if node is None else q.rewrite(host)
    return Endpoint(fast, host, typed_port or port, node, typed)


def meet(q: Question, job: Job, rank: int, endpoint: Endpoint) -> Meeting:
    """Look at the endpoint from this node.

    Args:
        q: The inputs.
        job: The job of ``q``.
        rank: Rank of this node.
        endpoint: The endpoint by name.
    """
    warnings: list[str] = []
    host = _resolvable(q, endpoint.host, endpoint.plain, warnings)
    plain = job.nodes[rank]
    name = q.rewrite(plain)
    name = host if name == endpoint.host else _resolvable(q, name, plain, warnings)
    own = None
    if "local_addr" in q.options:
        own = q.network.own_address(str(q.typed("local_addr")))
    else:
        if endpoint.node is None:
            own = _address_near(q, host)
        own = own or q.network.own_address(name)
        # The name gives none: look toward a neighbour.
        for other in (job.nodes[:rank] + job.nodes[rank + 1 :])[:1]:
            own = own or _address_near(q, q.rewrite(other)) or _address_near(q, other)
    if endpoint.node == rank and own is not None:
        address: Address | None = own
    else:
        known = q.network.addresses_of(host)
        # A number is taken as it was typed, although it may be 127.0.0.1.
        address = known[0] if known else _number(host)
    return Meeting(
        host=host,
        port=endpoint.port,
        address=address,
        own=own,
        is_host=_is_host(q, job, rank, endpoint, host),
        warnings=tuple(warnings),
    )


def _address_near(q: Question, host: str) -> Address | None:
    """Return the address that this node shows to a host, which may be itself."""
    for far in q.network.addresses_of(host):
        near = far if q.network.owner(far) else q.network.address_toward(far)
        if near is not None:
            return near
    return None


def _resolvable(q: Question, host: str, plain: str, warnings: list[str]) -> str:
    """Return the rewritten name if it resolves here, else the plain one."""
    if host == plain or q.network.resolve(host):
        return host
    site = q.site.name if q.site else ""
    warnings.append(
        f"{host} does not resolve here, although site {site!r} says so: using "
        f"{plain} (--hpc-site=none switches the rule off)"
    )
    return plain


def _is_host(q: Question, job: Job, rank: int, endpoint: Endpoint, host: str) -> bool:
    """Say whether this node is the host.

    It is the node that the endpoint names, else the owner of its address, else
    node 0.
    """
    if endpoint.node is not None:
        return rank == endpoint.node
    if q.network.own_address(host) is not None:
        return True
    if rank > 0:
        return False
    wanted = set(q.network.addresses_of(host))
    return not any(
        wanted.intersection(q.network.addresses_of(name))
        for node in job.nodes[1:]
        for name in dict.fromkeys((q.rewrite(node), node))
    )


def split_endpoint(typed: Value, *, speak: bool = True) -> tuple[str, int | None]:
    """Split ``host``, ``host:port``, ``[address]:port``.

    Raises:
        LaunchError: It is none of these.
    """
    text = str(typed.value).strip()
    if is_number(text):
        return text, None
    match = re.fullmatch(
        r"(?:\[(?P<number>[^\]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", text
    )
    if match and (match["name"] or is_number(match["number"])):
        port = None if match["port"] is None else int(match["port"])
        if port is None or port < 2**16:
            return match["name"] or match["number"], port
    raise LaunchError(
        f"{typed} is not an endpoint: type HOST:PORT (an IPv6 address in brackets, a "
        "port up to 65535)",
        speak=speak,
    )


def join_endpoint(host: str, port: int) -> str:
    """Write ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Say whether a host is given as an address."""
    return _number(host) is not None


def _number(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
