"""The endpoint on this node: addresses, and whether this node is the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, to_copy
from torchrun_hpc.host.network import is_number, join_endpoint
from torchrun_hpc.planning.endpoints import MASTER_ADDR, head_hint, port_of
from torchrun_hpc.schedulers.job import same_host

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Address
    from torchrun_hpc.planning.endpoints import Endpoint
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job


@dataclass(frozen=True)
class LocalEndpoint:
    """The place where the nodes meet, as this node sees it.

    Attributes:
        connect_host: Number of ``host``, so that torch asks no name server. The name if
            it has several numbers; empty if it has none.
        local_address: This node's address; ``None`` if no known address is reachable
            from other nodes.
    """

    host: str  # its name or number, as used here
    name: str  # of this node, as used here
    port: int
    connect_host: str
    local_address: Address | None
    is_host: bool  # whether this node is the host
    used_plain_name: bool  # whether others could use another name or address
    warnings: tuple[Message, ...]  # problems that the launch survives

    def __str__(self) -> str:
        """Return host and port as an endpoint."""
        return join_endpoint(self.host, self.port)


def local_endpoint(
    inputs: Inputs, job: Job, index: int, endpoint: Endpoint
) -> LocalEndpoint:
    """Resolve the endpoint on this node, which has this index in the job's nodes."""
    warnings: list[Message] = []
    host = _resolvable(inputs, endpoint.host, endpoint.plain, warnings)
    _check_rank_0(inputs, job, endpoint, host)
    plain = job.own_name
    name = inputs.rewrite(plain)
    name = host if name == endpoint.host else _resolvable(inputs, name, plain, warnings)
    neighbours = filter(None, job.nodes[:index] + job.nodes[index + 1 :])
    neighbour = next(neighbours, endpoint.plain)
    named = _named_address(inputs, endpoint, host, name, neighbour)
    own = explicit_local_address(inputs) if inputs.options.local_addr else named
    connect_host = _connect_host(inputs, host)
    if endpoint.node == index and not is_number(endpoint.host):
        # It reaches its own store even if its name means 127.0.1.1 here.
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
    """Return the number of ``--local-addr``: any of this node's, also loopback."""
    address = inputs.network.local_address(inputs.options.local_addr)
    if address is not None:
        return address
    raise LaunchError(
        "HPC052",
        f"{inputs.options['local_addr']} is not an address of this node, which has "
        f"{inputs.network.own_addresses()}. Remove the option",
    )


def _named_address(
    inputs: Inputs, endpoint: Endpoint, host: str, name: str, neighbour: str
) -> Address | None:
    """Return the address by which the other nodes know this one.

    An address of the node's name that an interface owns comes first, then the kernel's
    source address toward a neighbour. An explicit endpoint that is no node's name
    chooses the network.
    """
    return (
        (inputs.network.address_near(host) if endpoint.node is None else None)
        or inputs.network.own_address(name)
        or inputs.network.address_near(inputs.rewrite(neighbour))
        or inputs.network.address_near(neighbour)
    )


def _connect_host(inputs: Inputs, host: str) -> str:
    known = inputs.network.addresses_of(host)
    if not known:
        return ""
    alike = [address for address in known if address.version == known[0].version]
    # Torch tries all addresses of a name.
    return str(alike[0]) if len(alike) == 1 else host


def _resolvable(inputs: Inputs, host: str, plain: str, warnings: list[Message]) -> str:
    if host == plain or inputs.network.resolve(host):
        return host
    site = inputs.site.name if inputs.site else ""
    text = (
        f"{host} does not resolve here, although site {site!r} uses this name. Using "
        f"{plain}. If this is not that site, pass --hpc-site=none"
    )
    warnings.append(Message("HPC056", text))
    return plain


def _is_host(
    inputs: Inputs, job: Job, index: int, endpoint: Endpoint, host: str
) -> bool:
    """Return whether this node is the host.

    The host is the node that the endpoint names, otherwise the owner of its address,
    otherwise the first node.
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
    """Check on rank 0 that the other nodes will look for it here."""
    is_first = job.node_rank == 0
    if inputs.mode.is_direct:
        is_first = job.task.rank == 0  # hosts in another order: on any node
    elif not job.head_candidates or (
        endpoint.setting and endpoint.setting.source != MASTER_ADDR
    ):
        return  # the agents find each other, and the scheduler ranks them
    here = job.hostname or job.own_name
    if not is_first or same_host(host, here) or same_host(endpoint.plain, here):
        return
    if any(map(inputs.network.local_address, (host, endpoint.plain))):
        return
    source = job.provenance["nodes" if job.nodes[0] else "head"]
    if endpoint.setting:
        source = endpoint.setting.source
    text = f"{source}). Let {job.launcher.name} place it there. Or"
    if not job.nodes[0] and not endpoint.setting:
        text = f"{source}), where {job.launcher.name} runs. To name its host,"
    raise LaunchError(
        "HPC039",
        f"rank 0 is on {here}, but the other nodes will look for it on "
        f"{endpoint.plain} ({text} {head_hint(inputs, job, here)}",
    )


def unreachable(
    inputs: Inputs, job: Job, endpoint: Endpoint, here: LocalEndpoint
) -> LaunchError:
    """Return why this node cannot reach the head node."""
    known = ", ".join(str(address) for address in inputs.network.resolve(here.host))
    fault = f"resolves only to {known} here" if known else "does not resolve here"
    fix = f" --rdzv_endpoint=HOST:{here.port}"
    if inputs.mode.is_direct:
        fix = to_copy(f"export {MASTER_ADDR}=HOST")
    return LaunchError(
        "HPC059",
        f"the head node's name {here.host} "
        f"({endpoint.setting or job.provenance['nodes']}) {fault}. Pass a name or an "
        f"address that every node can reach:{fix}",
        # An explicit name is wrong on all nodes, a derived one perhaps only here. An
        # agent would find out, a task in direct mode cannot.
        everywhere=endpoint.setting is not None and not inputs.mode.is_direct,
    )


def source_of(inputs: Inputs, job: Job, endpoint: Endpoint, here: LocalEndpoint) -> str:
    """Return the source of host and port."""
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
    if endpoint.port == port_of(job.launch_id):
        parts.append(f"port by hash of {job.launch_id}")
    return ", ".join(parts)
