"""The head node: by name, which is equal on all nodes, and as this node sees it."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count, to_copy
from torchrun_hpc.host.network import is_number, join_endpoint
from torchrun_hpc.names import placed
from torchrun_hpc.options import values
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import same_host
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Address, Interface
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job


# Below Linux's ephemeral ports (from 32768), which any program can get.
PORTS = range(20000, 29000)

LOOPBACK = "127.0.0.1"

# torch's defaults: run.py and c10d_rendezvous_backend.py
STATIC_PORT = 29500
C10D_PORT = 29400

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# Number of ports that a coordinator tries, and of ports to report that it cannot start.
_TRIES = 8
_NOTICES = 4


@dataclass(frozen=True)
class Endpoint:
    """The place where the nodes meet, by name."""

    host: str  # name or number of the host, rewritten for the site
    plain: str  # the host before it was rewritten
    port: int
    node: int | None  # index of the node with this name; ``None`` without one
    setting: Setting | None  # the explicit endpoint; ``None`` if the host was derived


def port_of(launch_id: str) -> int:
    """Derive the port of a launch from its id."""
    digest = hashlib.sha256(launch_id.encode()).digest()
    return PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]


def ports_of(launch_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Derive ``ports`` and ``notice_ports`` of `Meeting` from the launch id."""
    numbers = range(1, _TRIES + _NOTICES)
    names = [launch_id, *(f"{launch_id} {number}" for number in numbers)]
    ports = tuple(dict.fromkeys(map(port_of, names)))
    return ports[:_TRIES], ports[_TRIES:]


def explicit_endpoint(
    options: Options, host: str, port: int
) -> tuple[str, int, Setting | None]:
    """Return the explicit host and port, or these ones, and the source of the host."""
    port = port if options.master_port is None else options.master_port
    endpoint = options.endpoint
    if endpoint is None:
        return host, port, None
    port = port if endpoint.port is None else endpoint.port
    return endpoint.host, port, options.endpoint_setting


def endpoint_of(
    inputs: Inputs, job: Job, exported: tuple[str, int, Setting] | None = None
) -> Endpoint:
    """Return where the nodes meet; refuse port 0.

    The first known host counts: the user's, the scheduler's first node,
    ``MASTER_ADDR``, the machine that the launcher shows.
    """
    options, port = inputs.options, port_of(job.launch_id)
    # The only node of a launch is this one, even if the launcher does not name it.
    first = job.nodes[0] or (job.hostname if len(job.nodes) == 1 else "")
    host, port, setting = exported or explicit_endpoint(options, first, port)
    if setting is None and not (host and job.nodelist_is_shared):
        master, port, setting = _exported_host(inputs, port, job)
        host = master or host
    host = host or _shown_by_launcher(inputs, job)
    if port == 0:
        is_in_endpoint = options.endpoint is not None and options.endpoint.port == 0
        raise LaunchError(
            "HPC051",
            f"{setting if is_in_endpoint else options['master_port']}: port 0 means a "
            "random port, which the other nodes cannot know. Remove the port, or pass "
            f"one: --rdzv_endpoint={join_endpoint(host, C10D_PORT)}",
            everywhere=True,
        )
    node: int | None = 0
    if setting is not None:
        named = (
            index
            for index, name in enumerate(job.nodes)
            if name and (same_host(name, host) or same_host(inputs.rewrite(name), host))
        )
        node = None if is_number(host) else next(named, None)
    fast = host if node is None or is_number(host) else inputs.rewrite(host)
    return Endpoint(fast, host, port, node, setting)


def _exported_host(
    inputs: Inputs, port: int, job: Job
) -> tuple[str, int, Setting | None]:
    """Read ``MASTER_ADDR`` and ``MASTER_PORT`` for agents without node names.

    A user passes them to mpirun. With node names they are ignored, because hooks of
    containers export old values. A port that not all nodes know is also ignored.
    """
    host = inputs.environ.get(MASTER_ADDR, "")
    if not host:
        return "", port, None
    explicit_port = inputs.environ.get(MASTER_PORT, "")
    if explicit_port and job.nodelist_is_shared:
        port = int(values.port(Setting(explicit_port, MASTER_PORT)))
    return host, port, Setting(host, MASTER_ADDR)


def _shown_by_launcher(inputs: Inputs, job: Job) -> str:
    """Return the machine of the launcher, which node 0 checks.

    Of several addresses, the one in the network of this node's own address counts,
    because gloo will use that network. An unclear choice is refused.
    """
    if not job.head_candidates:
        raise LaunchError(
            "HPC038",
            f"{job.scheduler} gives {count(len(job.nodes), 'node')} ranks, but no "
            f"names ({job.provenance['nodes']}), so they cannot meet. To name the host "
            f"of node 0, {head_hint(inputs, job, 'HOST')}",
            everywhere=job.nodelist_is_shared,
        )
    numbers = [ipaddress.ip_address(h) for h in job.head_candidates if is_number(h)]
    if not numbers:
        return job.head_candidates[0]
    here, is_first = inputs.network, job.node_rank == 0
    others = [n for n in numbers if is_first or not here.owner(n)] or numbers
    near = [n for n in others if here.shares(n)] or others
    names = (inputs.rewrite(job.own_name), job.own_name)
    own = next(filter(None, map(here.own_address, names)), None)
    found = [n for n in near if own and here.address_toward(n) == own]
    differ = inputs.mode.is_direct and len({*map(here.address_toward, near)}) > 1
    if differ and not (found or is_first):
        raise LaunchError(
            "HPC230",
            f"{job.launcher.name} runs at {' and '.join(map(str, near))}, and this "
            f"node's name, {job.own_name}, does not show which of these networks the "
            f"job uses. {network_hint(job)}",
        )
    return str((found or near)[0])


def network_hint(job: Job, interface: Interface | None = None) -> str:
    """Return how to name the network, if the launcher shows several."""
    if sum(map(is_number, job.head_candidates)) <= 1:
        return ""
    name = interface.name if interface else "INTERFACE"
    return f"Name the network: {job.launcher.network_hint.format(interface=name)}"


def head_hint(inputs: Inputs, job: Job, host: str) -> str:
    """Return how to name node 0's host, as the end of a sentence."""
    is_direct = inputs.mode.is_direct
    option = f"--rdzv_endpoint={host}:{port_of(job.launch_id)}"
    if job.nodes[0] and not is_direct:
        return f"pass {option}"
    # Another node's name counts as left by a hook, but rank 0 checks a number.
    number = job.nodes[0] and inputs.network.own_address(inputs.rewrite(job.own_name))
    line = f"export {MASTER_ADDR}={number or host}"
    if option_of := job.launcher.forward_option:
        line = f"{job.launcher.name} {option_of} {MASTER_ADDR}={host} …"
    either = "" if is_direct else f"pass {option}, or "
    return f"{either}set the variable:{to_copy(line)}"


def check_first_is_known(job: Job, endpoint: Endpoint, option: str) -> None:
    """Check that all tasks know rank 0's node; its host completes ``option``."""
    if "order" not in job.provenance or endpoint.setting:
        return
    first = job.own_name if job.task.rank == 0 else "HOST"
    raise LaunchError(
        "HPC141",
        f"tasks are in a custom order ({job.provenance['order']}), which "
        f"{job.launcher.name} does not tell them. Only rank 0 knows that it is on "
        f"{first}. Pass its host to all tasks:{to_copy(option + first)}",
        everywhere=True,
    )


# --- the exported endpoint, in direct mode --------------------------------------------


def exported_endpoint(
    inputs: Inputs, job: Job
) -> tuple[tuple[str, int, Setting] | None, tuple[Message, ...]]:
    """Return the endpoint of ``MASTER_ADDR`` and ``MASTER_PORT``, in direct mode.

    Users export them to place rank 0. Hooks of containers export values of another
    step: these are ignored, with a note.
    """
    address = inputs.environ.get(MASTER_ADDR, "")
    exported_port = inputs.environ.get(MASTER_PORT, "")
    if exported_port == inputs.promise.hook_port or not job.nodelist_is_shared:
        exported_port = ""  # shared by all steps of a job, or not on all nodes
    if address and not _may_be_first_node(inputs, job, address):
        first = job.nodes[0] or "this one"
        text = (
            f"{MASTER_ADDR}={address} is not node 0 of this step, {first}, and is "
            "replaced"
        )
        return None, (Message("HPC078", text),)
    port = inputs.free_port or port_of(job.launch_id)
    if exported_port:
        port = int(values.port(Setting(exported_port, MASTER_PORT)))
    source = MASTER_ADDR if address else MASTER_PORT
    if not address and exported_port and job.is_ranked:
        address = LOOPBACK if inputs.mode is Mode.DIRECT_ONE_NODE else job.nodes[0]
    if not address:
        return None, ()  # neither is set, or only the launcher knows rank 0's node
    setting = Setting(join_endpoint(address, port), source)
    return (address, port, setting), ()


def _may_be_first_node(inputs: Inputs, job: Job, address: str) -> bool:
    first = job.nodes[0]
    if inputs.mode is Mode.DIRECT_ONE_NODE:
        return inputs.network.local_address(address) is not None
    if job.head_candidates or not first:
        return True  # only node 0 knows, and checks it
    firsts = (first,) if job.is_ranked else job.nodes  # rank 0 checks it
    names = (name for node in firsts for name in (node, inputs.rewrite(node)))
    if any(_is_named(address, name) for name in names):
        return True
    # Only the node itself knows its numbers. Rank 0 checks them.
    return bool(is_number(address) and inputs.network.addresses_of(address))


def _is_named(address: str, node: str) -> bool:
    """Return whether an address can be a node's: its name, or a name made of it.

    ``n9i`` and ``n9-ib0`` are common names of a node n9 on other networks.
    """
    label = re.escape(node.partition(".")[0])
    is_made_of_it = re.fullmatch(rf"{label}([^0-9].*)?", address) is not None
    return same_host(address, node) or is_made_of_it


# --- for several modes ----------------------------------------------------------------


def check_resolves(inputs: Inputs, host: str, setting: Setting | None) -> None:
    """Check that an explicit host has an address here."""
    if not inputs.network.resolve(host):
        raise LaunchError(
            "HPC067",
            f"{setting} does not resolve here. Pass a name or an address that does: "
            "HOST:PORT",
        )


def may_join(inputs: Inputs) -> bool:
    """Return whether another agent of this machine can have the port.

    This is the rule of torch's c10d, unless the user sets ``is_host``.
    """
    options = inputs.options
    is_told = "rdzv_endpoint" in options and options.rdzv_conf.is_host is None
    return options.is_c10d and is_told


def hosts_of(job: Job) -> tuple[str, ...]:
    """Return the names of the nodes by rank; unknown ones are empty.

    Only this node's name is certain: under Slurm, a rank may be no place in the list.
    """
    own = {} if job.node_rank is None else {job.node_rank: job.own_name}
    return placed(job.nodes, own)


# --- the endpoint on this node --------------------------------------------------------


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
