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

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.network import is_number, join_endpoint
from torchrun_hpc.schedulers.job import same_host
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.network import Address
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

# Below Linux's ephemeral ports (32768 and up), which any program may be given.
PORTS = range(20000, 29000)
_PORTS_END = 2**16

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# How many ports a head tries; and how many more, only to say that it cannot start.
_TRIES = 8
_NOTICES = 4


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes are to meet, as far as names tell.

    Attributes:
        host: Name or number of the host, rewritten for the site.
        plain: The same before it was rewritten.
        port: Its port.
        node: Index of the node that it names; ``None`` if it names none.
        explicit: What the user typed; ``None`` if the host was derived.
    """

    host: str
    plain: str
    port: int
    node: int | None
    explicit: Setting | None


@dataclass(frozen=True)
class LocalEndpoint:
    """Where the nodes meet, as this node sees it.

    Attributes:
        host: Name or number of the host, as used here.
        name: Name of this node, as used here.
        port: Its port.
        connect_host: What to connect to: the number behind ``host``, so that torch asks no
            name server; the name, if it has several; empty if it has none here.
        own: This node's address; ``None`` if other nodes could reach none of those
            that are known.
        is_host: Whether this node is the host.
        used_plain_name: Whether the host may be known by another name or address elsewhere.
        warnings: What was worked around on this node.
    """

    host: str
    name: str
    port: int
    connect_host: str
    own: Address | None
    is_host: bool
    used_plain_name: bool
    warnings: tuple[Message, ...]

    def __str__(self) -> str:
        """Write host and port as an endpoint."""
        return join_endpoint(self.host, self.port)


def port_of(launch_id: str) -> int:
    """Derive the port of a launch from its identity; the same on all nodes."""
    digest = hashlib.sha256(launch_id.encode()).digest()
    return PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]


def ports_of(launch_id: str) -> tuple[int, ...]:
    """Derive the ports of a launch: its own, and those to try if that is taken."""
    return _derived_ports(launch_id)[:_TRIES]


def notice_ports(launch_id: str) -> tuple[int, ...]:
    """Derive the ports on which a head tells that it found none to listen on."""
    return _derived_ports(launch_id)[_TRIES:]


def _derived_ports(launch_id: str) -> tuple[int, ...]:
    numbers = range(1, _TRIES + _NOTICES)
    names = [launch_id, *(f"{launch_id} {number}" for number in numbers)]
    return tuple(dict.fromkeys(port_of(name) for name in names))


def explicit_endpoint(
    inputs: Inputs, host: str, port: int
) -> tuple[str, int, Setting | None]:
    """Read ``--rdzv-endpoint``, else ``--master-addr`` and ``--master-port``.

    Args:
        inputs: What the plan is made from.
        host: The host if none was typed.
        port: The port if none was typed.

    Returns:
        Host and port, and what the host came from; ``None`` if it was not typed.

    Raises:
        LaunchError: What was typed is not an endpoint.
    """
    master_port = inputs.options.get("master_port")
    if master_port is not None:
        port = master_port.value
        if not 0 <= port < _PORTS_END:
            raise LaunchError(
                "HPC050",
                f"{master_port} is not a port: type one from 1 to 65535",
                everywhere=True,
            )
    explicit = inputs.options.get("rdzv_endpoint") or inputs.options.get("master_addr")
    if explicit is None or not (inputs.is_static or inputs.is_c10d):
        return host, port, None
    host, explicit_port = split_endpoint(explicit)
    return host, port if explicit_port is None else explicit_port, explicit


def endpoint_of(inputs: Inputs, job: Job) -> Endpoint:
    """Say where the nodes are to meet: a function of names.

    That is what was typed, else the scheduler's first node, else ``MASTER_ADDR``, else
    what the launcher itself shows.

    Raises:
        LaunchError: What was typed is not an endpoint, or there is no other.
    """
    port = port_of(job.launch_id)
    # A launcher that tells no names may have started this node alone.
    first = job.nodes[0] or (job.hostname if len(job.nodes) == 1 else "")
    host, port, explicit = explicit_endpoint(inputs, first, port)
    if explicit is None and not (host and job.nodelist_is_shared):
        master, port, explicit = _master(inputs, port, job)
        host = master or host
    host = host or _guessed(inputs, job)
    if port == 0:
        zero = inputs.options.get("master_port")
        if explicit is not None and split_endpoint(explicit)[1] == 0:
            zero = explicit
        raise LaunchError(
            "HPC051",
            f"{zero}: port 0 is another port at every "
            "start, which the other nodes could not know. Leave it out, or type one: "
            f"--rdzv_endpoint={join_endpoint(host, 29400)}",
            everywhere=True,
        )
    node: int | None = 0
    if explicit is not None:
        named = (
            index
            for index, name in enumerate(job.nodes)
            if name and (same_host(name, host) or same_host(inputs.rewrite(name), host))
        )
        node = None if is_number(host) else next(named, None)
    fast = host if node is None or is_number(host) else inputs.rewrite(host)
    return Endpoint(fast, host, port, node, explicit)


def _master(inputs: Inputs, port: int, job: Job) -> tuple[str, int, Setting | None]:
    """Read ``MASTER_ADDR`` and ``MASTER_PORT``, which a user hands to mpirun.

    Elsewhere they are left alone: hooks of containers export old ones. A port that not
    all nodes may have is left alone, too.
    """
    host = inputs.environ.get(MASTER_ADDR, "")
    if not host:
        return "", port, None
    explicit_port = inputs.environ.get(MASTER_PORT, "")
    if explicit_port and job.nodelist_is_shared:
        port = port_number(explicit_port, MASTER_PORT)
    return host, port, Setting(host, MASTER_ADDR)


def port_number(text: str, source: str) -> int:
    """Read a port.

    Raises:
        LaunchError: It is none.
    """
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < _PORTS_END:
        raise LaunchError(
            "HPC129",
            f"{source}={text} is not a port: set one from 1 to 65535, or unset it",
            everywhere=True,
        )
    return int(text)


def _guessed(inputs: Inputs, job: Job) -> str:
    """Return the machine where the launcher runs, which node 0 has to check.

    Of several addresses it is the one that is nearest: another machine in a network
    that this node has too.

    Raises:
        LaunchError: The launcher does not show any.
    """
    if not job.head_candidates:
        raise LaunchError(
            "HPC038",
            f"{job.scheduler} tells {count(len(job.nodes), 'node')} their ranks, but "
            f"no names ({job.provenance['nodes']}), so that they cannot meet. Tell them "
            f"where node 0 is: {head_hint(job, 'HOST')}",
            everywhere=job.nodelist_is_shared,
        )
    numbers = [ipaddress.ip_address(h) for h in job.head_candidates if is_number(h)]
    if not numbers:
        return job.head_candidates[0]
    others = [n for n in numbers if job.node_rank == 0 or not inputs.network.owner(n)]
    near = (n for n in others if inputs.network.shares(n))
    return str(next(near, numbers[0]))


def head_hint(job: Job, host: str) -> str:
    """Say how to tell a launcher's tasks where node 0 is."""
    option = f"--rdzv_endpoint={host}:{port_of(job.launch_id)}"
    if job.nodes[0] and not job.has_several_tasks:
        return option
    variable = f"export {MASTER_ADDR}={host}"
    if job.launcher.name == "mpirun":  # which does not pass the environment on
        variable = f"mpirun -x {MASTER_ADDR}={host} …"
    return variable if job.has_several_tasks else f"{variable}   (or {option})"


def _check_guess(inputs: Inputs, job: Job, endpoint: Endpoint, host: str) -> None:
    """Let rank 0 see that it is where the others will look for it.

    Raises:
        LaunchError: It is not.
    """
    is_first = job.node_rank == 0
    if job.has_several_tasks:
        is_first = job.task.rank == 0  # hosts in another order: on any node
    elif not job.head_candidates or (
        endpoint.explicit and endpoint.explicit.source != MASTER_ADDR
    ):
        return  # the agents find each other, and their ranks are the scheduler's
    here = job.hostname or job.own_name
    if not is_first or same_host(host, here) or same_host(endpoint.plain, here):
        return
    if inputs.network.local_address(host) or inputs.network.local_address(
        endpoint.plain
    ):
        return
    source = job.provenance["nodes" if job.nodes[0] else "head"]
    if endpoint.explicit:
        source = endpoint.explicit.source
    text = f"{source}). Let {job.launcher.name} place it there, or"
    if not job.nodes[0] and not endpoint.explicit:
        text = f"{source}), where {job.launcher.name} runs. Please"
    raise LaunchError(
        "HPC039",
        f"rank 0 is on {here}, but the other nodes will look for it on "
        f"{endpoint.plain} ({text} tell them: {head_hint(job, here)}",
    )


def check_first_is_known(job: Job, endpoint: Endpoint, option: str) -> None:
    """Refuse, on all nodes, what rank 0 hosts where nobody but itself knows its node.

    Args:
        job: The job.
        endpoint: The endpoint by name.
        option: What tells all nodes where rank 0 is, up to its name.

    Raises:
        LaunchError: The user has not typed it either.
    """
    if job.is_ranked or endpoint.explicit:
        return
    first = job.own_name if job.task.rank == 0 else "HOST"
    raise LaunchError(
        "HPC141",
        f"tasks are in an order of your own ({job.provenance['order']}), which "
        f"{job.launcher.name} tells none of them, so that only rank 0 itself knows "
        f"that it is on {first}. Tell the others: {option}{first}",
        everywhere=True,
    )


def view(inputs: Inputs, job: Job, index: int, endpoint: Endpoint) -> LocalEndpoint:
    """Look at the endpoint from this node.

    Args:
        inputs: What the plan is made from.
        job: The job of ``inputs``.
        index: Index of this node in the job's nodes.
        endpoint: The endpoint by name.

    Raises:
        LaunchError: The typed ``--local-addr`` is not this node's.
    """
    warnings: list[Message] = []
    host = _resolvable(inputs, endpoint.host, endpoint.plain, warnings)
    _check_guess(inputs, job, endpoint, host)
    plain = job.own_name
    name = inputs.rewrite(plain)
    name = host if name == endpoint.host else _resolvable(inputs, name, plain, warnings)
    neighbours = filter(None, job.nodes[:index] + job.nodes[index + 1 :])
    neighbour = next(neighbours, endpoint.plain)
    named = _named_address(inputs, endpoint, host, name, neighbour)
    own = named
    if "local_addr" in inputs.options:
        own = explicit_local_address(inputs)
    connect_host = _connect_host(inputs, host)
    if endpoint.node == index and not is_number(endpoint.host):
        # It reaches its own store, also where its name means 127.0.1.1 to it.
        connect_host = str(
            named or connect_host or next(iter(inputs.network.resolve(host)), "")
        )
    return LocalEndpoint(
        host=host,
        name=name,
        port=endpoint.port,
        connect_host=connect_host,
        own=own,
        is_host=_is_host(inputs, job, index, endpoint, host),
        used_plain_name=host != endpoint.host
        or (endpoint.explicit is None and any(map(is_number, job.head_candidates))),
        warnings=tuple(warnings),
    )


def explicit_local_address(inputs: Inputs) -> Address:
    """Return the number behind the typed ``--local-addr``, loopback included.

    Raises:
        LaunchError: No interface of this node has it.
    """
    explicit = inputs.options["local_addr"]
    address = inputs.network.local_address(str(explicit.value))
    if address is not None:
        return address
    own = [str(a.ip) for i in inputs.network.interfaces for a in i.addresses]
    raise LaunchError(
        "HPC052",
        f"{explicit} is not an address of this node, which has {', '.join(own)}. Leave "
        "the option out",
    )


def _named_address(
    inputs: Inputs, endpoint: Endpoint, host: str, name: str, neighbour: str
) -> Address | None:
    """Return the address under which the other nodes know this one.

    It is one that the node's name gives and an interface owns; else the one that the
    kernel would send from to a neighbour. Where the user typed an endpoint that is no
    node's name, the endpoint says which network is meant.
    """
    return (
        (address_near(inputs, host) if endpoint.node is None else None)
        or inputs.network.own_address(name)
        or address_near(inputs, inputs.rewrite(neighbour))
        or address_near(inputs, neighbour)
    )


def _connect_host(inputs: Inputs, host: str) -> str:
    """Return what to connect to: a number, else a name, else nothing."""
    known = inputs.network.addresses_of(host)
    if not known:
        return ""
    alike = [address for address in known if address.version == known[0].version]
    # torch tries all addresses of a name.
    return str(alike[0]) if len(alike) == 1 else host


def address_near(inputs: Inputs, host: str) -> Address | None:
    """Return the address that this node shows to a host, which may be itself."""
    for far in inputs.network.addresses_of(host):
        near = far if inputs.network.owner(far) else inputs.network.address_toward(far)
        if near is not None:
            return near
    return None


def _resolvable(inputs: Inputs, host: str, plain: str, warnings: list[Message]) -> str:
    """Return the rewritten name if it resolves here, else the plain one."""
    if host == plain or inputs.network.resolve(host):
        return host
    site = inputs.site.name if inputs.site else ""
    text = (
        f"{host} does not resolve here, although site {site!r} says so: using "
        f"{plain} (--hpc-site=none switches the rule off)"
    )
    warnings.append(Message("HPC056", text))
    return plain


def _is_host(
    inputs: Inputs, job: Job, index: int, endpoint: Endpoint, host: str
) -> bool:
    """Say whether this node is the host.

    It is the node that the endpoint names, else the owner of its address, else
    the first one.
    """
    if endpoint.node is not None:
        return index == endpoint.node
    if inputs.network.own_address(host) is not None:
        return True
    if index > 0:
        return False
    wanted = set(inputs.network.addresses_of(host))
    return not any(
        wanted.intersection(inputs.network.addresses_of(name))
        for node in filter(None, job.nodes[1:])
        for name in dict.fromkeys((inputs.rewrite(node), node))
    )


def split_endpoint(explicit: Setting) -> tuple[str, int | None]:
    """Split ``host``, ``host:port``, ``[address]:port``.

    Raises:
        LaunchError: It is none of these.
    """
    text = str(explicit.value).strip()
    if is_number(text):
        return text, None
    match = re.fullmatch(
        r"(?:\[(?P<number>[^\]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", text
    )
    if match and (match["name"] or is_number(match["number"])):
        port = None if match["port"] is None else int(match["port"])
        if port is None or port < _PORTS_END:
            return match["name"] or match["number"], port
    raise LaunchError(
        "HPC053",
        f"{explicit} is not an endpoint: type HOST:PORT (an IPv6 address in brackets, a "
        "port up to 65535)",
        everywhere=True,
    )
