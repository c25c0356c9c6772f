"""Where the nodes meet, as this node sees it: addresses, and whether it is the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import is_number, join_endpoint
from torchrun_hpc.planning.endpoints import MASTER_ADDR, head_hint
from torchrun_hpc.schedulers.job import same_host

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Address
    from torchrun_hpc.planning.endpoints import Endpoint
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job


@dataclass(frozen=True)
class LocalEndpoint:
    """Where the nodes meet, as this node sees it.

    Attributes:
        host: Name or number of the host, as used here.
        name: Name of this node, as used here.
        port: Its port.
        connect_host: What to connect to: the number behind ``host``, so that torch asks
            no name server; the name, if it has several; empty if it has none here.
        local_address: This node's address; ``None`` if other nodes could reach none of
            those that are known.
        is_host: Whether this node is the host.
        used_plain_name: Whether the host may be known by another name or address on
            other nodes.
        warnings: What was worked around on this node.
    """

    host: str
    name: str
    port: int
    connect_host: str
    local_address: Address | None
    is_host: bool
    used_plain_name: bool
    warnings: tuple[Message, ...]

    def __str__(self) -> str:
        """Write host and port as an endpoint."""
        return join_endpoint(self.host, self.port)


def local_endpoint(
    inputs: Inputs, job: Job, index: int, endpoint: Endpoint
) -> LocalEndpoint:
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
    _check_rank_0(inputs, job, endpoint, host)
    plain = job.own_name
    name = inputs.rewrite(plain)
    name = host if name == endpoint.host else _resolvable(inputs, name, plain, warnings)
    neighbours = filter(None, job.nodes[:index] + job.nodes[index + 1 :])
    neighbour = next(neighbours, endpoint.plain)
    named = _named_address(inputs, endpoint, host, name, neighbour)
    own = named
    if inputs.options.local_addr:
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
        local_address=own,
        is_host=_is_host(inputs, job, index, endpoint, host),
        used_plain_name=host != endpoint.host
        or (endpoint.setting is None and any(map(is_number, job.head_candidates))),
        warnings=tuple(warnings),
    )


def explicit_local_address(inputs: Inputs) -> Address:
    """Return the number behind the typed ``--local-addr``, loopback included.

    Raises:
        LaunchError: No interface of this node has it.
    """
    address = inputs.network.local_address(inputs.options.local_addr)
    if address is not None:
        return address
    own = [str(a.ip) for i in inputs.network.interfaces for a in i.addresses]
    raise LaunchError(
        "HPC052",
        f"{inputs.options['local_addr']} is not an address of this node, which has "
        f"{', '.join(own)}. Leave the option out",
    )


def _named_address(
    inputs: Inputs, endpoint: Endpoint, host: str, name: str, neighbour: str
) -> Address | None:
    """Return the address under which the other nodes know this one.

    It is one that the node's name gives and an interface owns; otherwise the one that
    kernel would send from to a neighbour. Where the user typed an endpoint that is no
    node's name, the endpoint says which network is meant.
    """
    return (
        (inputs.network.address_near(host) if endpoint.node is None else None)
        or inputs.network.own_address(name)
        or inputs.network.address_near(inputs.rewrite(neighbour))
        or inputs.network.address_near(neighbour)
    )


def _connect_host(inputs: Inputs, host: str) -> str:
    """Return what to connect to: a number, otherwise a name, otherwise nothing."""
    known = inputs.network.addresses_of(host)
    if not known:
        return ""
    alike = [address for address in known if address.version == known[0].version]
    # torch tries all addresses of a name.
    return str(alike[0]) if len(alike) == 1 else host


def _resolvable(inputs: Inputs, host: str, plain: str, warnings: list[Message]) -> str:
    """Return the rewritten name if it resolves here, otherwise the plain one."""
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
    """Return whether this node is the host.

    It is the node that the endpoint names, otherwise the owner of its address,
    otherwise the first one.
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


def _check_rank_0(inputs: Inputs, job: Job, endpoint: Endpoint, host: str) -> None:
    """Check on rank 0 that it is where the others will look for it.

    Raises:
        LaunchError: It is not.
    """
    is_first = job.node_rank == 0
    if inputs.mode.is_direct:
        is_first = job.task.rank == 0  # hosts in another order: on any node
    elif not job.head_candidates or (
        endpoint.setting and endpoint.setting.source != MASTER_ADDR
    ):
        return  # the agents find each other, and their ranks are the scheduler's
    here = job.hostname or job.own_name
    if not is_first or same_host(host, here) or same_host(endpoint.plain, here):
        return
    if any(map(inputs.network.local_address, (host, endpoint.plain))):
        return
    source = job.provenance["nodes" if job.nodes[0] else "head"]
    if endpoint.setting:
        source = endpoint.setting.source
    text = f"{source}). Let {job.launcher.name} place it there, or"
    if not job.nodes[0] and not endpoint.setting:
        text = f"{source}), where {job.launcher.name} runs. Please"
    raise LaunchError(
        "HPC039",
        f"rank 0 is on {here}, but the other nodes will look for it on "
        f"{endpoint.plain} ({text} tell them: {head_hint(inputs, job, here)}",
    )


def unreachable(
    inputs: Inputs, job: Job, endpoint: Endpoint, here: LocalEndpoint
) -> LaunchError:
    """Return why this node cannot reach the head node."""
    known = ", ".join(str(address) for address in inputs.network.resolve(here.host))
    fault = f"means only {known} here" if known else "does not resolve here"
    fix = f"--rdzv_endpoint=HOST:{here.port}"
    if inputs.mode.is_direct:
        fix = f"export {MASTER_ADDR}=HOST"
    return LaunchError(
        "HPC059",
        f"the head node's name {here.host} "
        f"({endpoint.setting or job.provenance['nodes']}) {fault}. Type a name or an "
        f"address that every node can reach: {fix}",
        # A typed name is wrong for all; a derived one perhaps for this node only. An
        # agent would find out which; a task that is a worker cannot.
        everywhere=endpoint.setting is not None and not inputs.mode.is_direct,
    )


def source_of(inputs: Inputs, job: Job, endpoint: Endpoint, here: LocalEndpoint) -> str:
    """Return how host and port came about."""
    parts = [str(endpoint.setting)]
    if endpoint.setting is None:
        parts = [f"first of {job.provenance['nodes']}"]
        if not job.nodes[0]:
            one = len(job.nodes) == 1
            parts = ["this node" if one else f"by {job.provenance['head']}"]
    if here.host != endpoint.plain and inputs.site:
        parts.append(f"{here.host} by site {inputs.site.name}")
    if here.connect_host != here.host:
        parts.append("its address")
    if endpoint.port == endpoint.ports[0]:
        parts.append(f"port by hash of {job.launch_id}")
    return ", ".join(parts)
