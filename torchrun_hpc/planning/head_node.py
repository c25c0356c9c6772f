"""The head node: by name, which is equal on all nodes, and as this node sees it."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, Setting, count, to_copy
from torchrun_hpc.host.network import is_number, join_endpoint
from torchrun_hpc.options import values
from torchrun_hpc.planning.meeting import place_of
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import same_host
from torchrun_hpc.variables import MASTER_ADDR, MASTER_PORT

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


# Options that name the endpoint.
ENDPOINT = ("rdzv_endpoint", "master_addr", "master_port")

# Number of ports that a coordinator tries, and of ports to report that it cannot start.
_TRIES = 8
_NOTICES = 4


@dataclass(frozen=True)
class HeadNode:
    """The node where the nodes meet: node 0, unless the user names another one.

    `by_name` makes it, equal on all nodes. `on_this_node` adds this node's view. Until
    then, the fields after ``index`` have their defaults.

    Attributes:
        host: Its name or number, rewritten for the site. On this node, the name that
            resolves here.
        setting: The explicit endpoint; ``None`` if the host was derived.
        plain: The host before it was rewritten.
        index: Index in the job's nodes; ``None`` if it has no node's name.
        connect_host: Number of ``host``, so that torch asks no name server. The name if
            it has several numbers; empty if it has none.
        local_name: Name of this node, as used here.
        local_address: This node's address; ``None`` if no known address is reachable
            from other nodes.
        is_local: Whether this node is the head node.
        others_may_differ: Whether other nodes could use another name or address.
        warnings: Problems that the launch survives.
    """

    host: str
    port: int
    setting: Setting | None = None
    plain: str = ""
    index: int | None = None
    connect_host: str = ""
    local_name: str = ""
    local_address: Address | None = None
    is_local: bool = False
    others_may_differ: bool = False
    warnings: tuple[Message, ...] = ()

    def __str__(self) -> str:
        """Return host and port as an endpoint."""
        return join_endpoint(self.host, self.port)


# --- the port -------------------------------------------------------------------------


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


# --- by name: equal on all nodes ------------------------------------------------------


def explicit(options: Options, host: str, port: int) -> HeadNode:
    """Return the explicit head node; ``host`` and ``port`` are the defaults."""
    port = port if options.master_port is None else options.master_port
    endpoint = options.endpoint
    if endpoint is None:
        return HeadNode(host, port)
    port = port if endpoint.port is None else endpoint.port
    return HeadNode(endpoint.host, port, options.endpoint_setting)


def by_name(inputs: Inputs, job: Job, exported: HeadNode | None = None) -> HeadNode:
    """Return the head node by name; refuse port 0.

    The first known host counts: the user's, the scheduler's first node,
    ``MASTER_ADDR``, the machine that the launcher shows.
    """
    # The only node of a launch is this one, even if the launcher does not name it.
    first = job.nodes[0] or (job.hostname if len(job.nodes) == 1 else "")
    head = exported or explicit(inputs.options, first, port_of(job.launch_id))
    if head.setting is None and not (head.host and job.nodelist_is_shared):
        head = _of_master_addr(inputs, job, head)
    host = head.host or _shown_by_launcher(inputs, job)
    if head.port == 0:
        raise _port_0(inputs.options, host)
    index = 0 if head.setting is None else _index_of(inputs, job, host)
    is_rewritten = index is not None and not is_number(host)
    fast = inputs.rewrite(host) if is_rewritten else host
    return replace(head, host=fast, plain=host, index=index)


def _of_master_addr(inputs: Inputs, job: Job, head: HeadNode) -> HeadNode:
    """Return the head node of ``MASTER_ADDR`` for agents without node names.

    A user passes it to mpirun. With node names it is ignored, because hooks of
    containers export old values. A port that not all nodes know is also ignored.
    """
    host, port = inputs.environ.get(MASTER_ADDR, ""), head.port
    if not host:
        return head
    explicit_port = inputs.environ.get(MASTER_PORT, "")
    if explicit_port and job.nodelist_is_shared:
        port = _exported_port(explicit_port)
    return HeadNode(host, port, Setting(host, MASTER_ADDR))


def _exported_port(text: str) -> int:
    return int(values.port(Setting(text, MASTER_PORT)))


def _port_0(options: Options, host: str) -> LaunchError:
    endpoint, setting = options.endpoint, options.endpoint_setting
    if endpoint is None or endpoint.port != 0:
        setting = options["master_port"]
    line = f"--rdzv_endpoint={join_endpoint(host, C10D_PORT)}"
    text = f"{setting}: port 0 means a random port, which the other nodes cannot know. "
    text += f"Remove the port, or pass one: {line}"
    return LaunchError("HPC051", text, everywhere=True)


def _index_of(inputs: Inputs, job: Job, host: str) -> int | None:
    """Return the index of the node with this name, plain or rewritten for the site."""
    if is_number(host):
        return None
    for index, name in enumerate(job.nodes):
        names = (name, inputs.rewrite(name)) if name else ()
        if any(same_host(each, host) for each in names):
            return index
    return None


def _shown_by_launcher(inputs: Inputs, job: Job) -> str:
    """Return the machine of the launcher, which node 0 checks.

    Of several addresses, the one in the network of this node's own address counts,
    because gloo will use that network. An unclear choice is refused.
    """
    if not job.head_candidates:
        text = (
            f"{job.scheduler} gives {count(len(job.nodes), 'node')} ranks, but no "
            f"names ({job.provenance['nodes']}), so they cannot meet. To name the host "
            f"of node 0, {head_hint(inputs, job, 'HOST')}"
        )
        raise LaunchError("HPC038", text, everywhere=job.nodelist_is_shared)
    numbers = [ipaddress.ip_address(h) for h in job.head_candidates if is_number(h)]
    if not numbers:
        return job.head_candidates[0]
    network, is_first = inputs.network, job.node_rank == 0
    others = [n for n in numbers if is_first or not network.owner(n)] or numbers
    near = [n for n in others if network.shares(n)] or others
    names = (inputs.rewrite(job.own_name), job.own_name)
    address = next(filter(None, map(network.own_address, names)), None)
    same = [n for n in near if address and network.address_toward(n) == address]
    differ = inputs.mode.is_direct and len({*map(network.address_toward, near)}) > 1
    if differ and not (same or is_first):
        raise LaunchError(
            "HPC230",
            f"{job.launcher.name} runs at {' and '.join(map(str, near))}, and this "
            f"node's name, {job.own_name}, does not show which of these networks the "
            f"job uses. {network_hint(job)}",
        )
    return str((same or near)[0])


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


def check_first_is_known(job: Job, head: HeadNode, option: str) -> None:
    """Check that all tasks know rank 0's node; its host completes ``option``."""
    if "order" not in job.provenance or head.setting:
        return
    first = job.own_name if job.task.rank == 0 else "HOST"
    text = (
        f"tasks are in a custom order ({job.provenance['order']}), which "
        f"{job.launcher.name} does not tell them. Only rank 0 knows that it is on "
        f"{first}. Pass its host to all tasks:{to_copy(option + first)}"
    )
    raise LaunchError("HPC141", text, everywhere=True)


# --- the exported endpoint, in direct mode --------------------------------------------


def exported(inputs: Inputs, job: Job) -> tuple[HeadNode | None, tuple[Message, ...]]:
    """Return the head node of ``MASTER_ADDR`` and ``MASTER_PORT``, in direct mode.

    Users export them to place rank 0. Hooks of containers export values of another
    step: these are ignored, with a note.
    """
    address = inputs.environ.get(MASTER_ADDR, "")
    exported_port = inputs.environ.get(MASTER_PORT, "")
    if exported_port == inputs.promise.hook_port or not job.nodelist_is_shared:
        exported_port = ""  # shared by all steps of a job, or not on all nodes
    if address and not _may_be_first_node(inputs, job, address):
        first = job.nodes[0] or "this one"
        text = f"{MASTER_ADDR}={address} is not node 0 of this step, {first}"
        return None, (Message("HPC078", f"{text}, and is replaced"),)
    port = inputs.free_port or port_of(job.launch_id)
    if exported_port:
        port = _exported_port(exported_port)
    source = MASTER_ADDR if address else MASTER_PORT
    if not address and exported_port and job.is_ranked:
        address = LOOPBACK if inputs.mode is Mode.DIRECT_ONE_NODE else job.nodes[0]
    if not address:
        return None, ()  # neither is set, or only the launcher knows rank 0's node
    return HeadNode(address, port, Setting(join_endpoint(address, port), source)), ()


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


def is_explicit(options: Options) -> bool:
    """Return whether the user has set the host, or the port."""
    return any(name in options for name in ENDPOINT)


def check_resolves(inputs: Inputs, head: HeadNode) -> None:
    """Check that an explicit host has an address here."""
    if not inputs.network.resolve(head.host):
        text = f"{head.setting} does not resolve here. Pass a name or an address that "
        raise LaunchError("HPC067", f"{text}does: HOST:PORT")


def may_join(options: Options) -> bool:
    """Return whether another agent of this machine can have the port.

    This is the rule of torch's c10d, unless the user sets ``is_host``.
    """
    is_told = "rdzv_endpoint" in options and options.rdzv_conf.is_host is None
    return options.is_c10d and is_told


def explicit_local_address(inputs: Inputs) -> Address | None:
    """Return the number of ``--local-addr``, any of this node's, also loopback.

    ``None`` without the option.
    """
    host = inputs.options.local_addr
    address = inputs.network.local_address(host) if host else None
    if address is None and host:
        raise LaunchError(
            "HPC052",
            f"{inputs.options['local_addr']} is not an address of this node, which has "
            f"{inputs.network.own_addresses()}. Remove the option",
        )
    return address


# --- as this node sees it -------------------------------------------------------------


def on_this_node(inputs: Inputs, job: Job, head: HeadNode) -> HeadNode:
    """Add this node's view of the head node."""
    _, index = place_of(job)
    host, warnings = _usable_name(inputs, head.host, head.plain)
    _check_rank_0(inputs, job, head, host)
    fast = inputs.rewrite(job.own_name)
    local_name = host
    if fast != head.host:
        local_name, more = _usable_name(inputs, fast, job.own_name)
        warnings += more
    has_addresses = any(map(is_number, job.head_candidates))
    differs = host != head.host or (head.setting is None and has_addresses)
    is_local = _is_local(inputs, job, index, head, host)
    head = replace(head, host=host, local_name=local_name, is_local=is_local)
    neighbours = filter(None, job.nodes[:index] + job.nodes[index + 1 :])
    named = _named_address(inputs, head, next(neighbours, head.plain))
    connect_host = _connect_host(inputs, host)
    if head.index == index and not is_number(host):
        # It reaches its own store even if its name means 127.0.1.1 here.
        any_address = next(iter(inputs.network.resolve(host)), "")
        connect_host = str(named or connect_host or any_address)
    return replace(
        head,
        connect_host=connect_host,
        local_address=explicit_local_address(inputs) or named,
        others_may_differ=differs,
        warnings=warnings,
    )


def _named_address(inputs: Inputs, head: HeadNode, neighbour: str) -> Address | None:
    """Return the address by which the other nodes know this one.

    An address of the node's name that an interface owns comes first, then the kernel's
    source address toward a neighbour. An explicit endpoint that is no node's name
    chooses the network.
    """
    network = inputs.network
    return (
        (network.address_near(head.host) if head.index is None else None)
        or network.own_address(head.local_name)
        or network.address_near(inputs.rewrite(neighbour))
        or network.address_near(neighbour)
    )


def _connect_host(inputs: Inputs, host: str) -> str:
    addresses = inputs.network.addresses_of(host)
    if not addresses:
        return ""
    alike = [each for each in addresses if each.version == addresses[0].version]
    # Torch tries all addresses of a name.
    return str(alike[0]) if len(alike) == 1 else host


def _usable_name(
    inputs: Inputs, fast: str, plain: str
) -> tuple[str, tuple[Message, ...]]:
    """Return the name for the site; if it does not resolve here, the plain name."""
    if fast == plain or inputs.network.resolve(fast):
        return fast, ()
    site = inputs.site.name if inputs.site else ""
    text = (
        f"{fast} does not resolve here, although site {site!r} uses this name. Using "
        f"{plain}. If this is not that site, pass --hpc-site=none"
    )
    return plain, (Message("HPC056", text),)


def _is_local(inputs: Inputs, job: Job, index: int, head: HeadNode, host: str) -> bool:
    """Return whether this node is the head node.

    The head node is the one that the endpoint names, otherwise the owner of its
    address, otherwise the first node.
    """
    if head.index is not None:
        return index == head.index
    if inputs.network.own_address(host) is not None:
        return True
    if index > 0:
        return False
    addresses = {*inputs.network.addresses_of(host)}
    return not any(
        addresses.intersection(inputs.network.addresses_of(name))
        for node in filter(None, job.nodes[1:])
        for name in dict.fromkeys((inputs.rewrite(node), node))
    )


def _check_rank_0(inputs: Inputs, job: Job, head: HeadNode, host: str) -> None:
    """Check on rank 0 that the other nodes will look for it here."""
    setting = head.setting
    is_first = job.node_rank == 0
    if inputs.mode.is_direct:
        is_first = job.task.rank == 0  # hosts in another order: on any node
    elif not job.head_candidates or (setting and setting.source != MASTER_ADDR):
        return  # the agents find each other, and the scheduler ranks them
    hostname = job.hostname or job.own_name
    names = (host, head.plain)
    if not is_first or any(same_host(name, hostname) for name in names):
        return
    if any(map(inputs.network.local_address, names)):
        return
    if setting or job.nodes[0]:
        source = setting.source if setting else job.provenance["nodes"]
        text = f"{source}). Let {job.launcher.name} place it there. Or"
    else:
        source = job.provenance["head"]
        text = f"{source}), where {job.launcher.name} runs. To name its host,"
    raise LaunchError(
        "HPC039",
        f"rank 0 is on {hostname}, but the other nodes will look for it on "
        f"{head.plain} ({text} {head_hint(inputs, job, hostname)}",
    )


# --- its sources and faults -----------------------------------------------------------


def unreachable(inputs: Inputs, job: Job, head: HeadNode) -> LaunchError:
    """Return why this node cannot reach the head node."""
    addresses = ", ".join(map(str, inputs.network.resolve(head.host)))
    fault = f"resolves only to {addresses}" if addresses else "does not resolve"
    fix = f" --rdzv_endpoint=HOST:{head.port}"
    if inputs.mode.is_direct:
        fix = to_copy(f"export {MASTER_ADDR}=HOST")
    text = (
        f"the head node's name {head.host} "
        f"({head.setting or job.provenance['nodes']}) {fault} here. Pass a name or an "
        f"address that every node can reach:{fix}"
    )
    # An explicit name is wrong on all nodes, a derived one perhaps only here. An agent
    # would find out, a task in direct mode cannot.
    is_shared = head.setting is not None and not inputs.mode.is_direct
    return LaunchError("HPC059", text, everywhere=is_shared)


def source_of(inputs: Inputs, job: Job, head: HeadNode) -> str:
    """Return the source of host and port."""
    if head.setting is not None:
        parts = [str(head.setting)]
    elif job.nodes[0]:
        parts = [f"first of {job.provenance['nodes']}"]
    elif len(job.nodes) == 1:
        parts = ["this node"]
    else:
        parts = [f"by {job.provenance['head']}"]
    if head.host != head.plain and inputs.site:
        parts.append(f"{head.host} by site {inputs.site.name}")
    if head.connect_host != head.host:
        parts.append("its address")
    if head.port == port_of(job.launch_id):
        parts.append(f"port by hash of {job.launch_id}")
    return ", ".join(parts)
