"""Where the nodes are to meet: host, port, ``MASTER_ADDR``.

All of it is the same on all nodes: it is made of names, and of the launch's id. What a
name means to this node stands in `local_endpoint`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.host.network import is_number, join_endpoint
from torchrun_hpc.options.values import PORTS_END
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import same_host
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.host.network import Interface
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

# Below Linux's ephemeral ports (32768 and up), which any program may be given.
PORTS = range(20000, 29000)

LOOPBACK = "127.0.0.1"

# torch's defaults: run.py and c10d_rendezvous_backend.py
STATIC_PORT = 29500
C10D_PORT = 29400

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

# How many ports a coordinator tries; and how many more, to say that it cannot start.
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
        setting: What the user typed; ``None`` if the host was derived.
        ports: The ports of the launch, by its id.
        notice_ports: Those on which a coordinator tells that it found none to use.
    """

    host: str
    plain: str
    port: int
    node: int | None
    setting: Setting | None
    ports: tuple[int, ...]
    notice_ports: tuple[int, ...]


def port_of(launch_id: str) -> int:
    """Derive the port of a launch from its id; the same on all nodes."""
    digest = hashlib.sha256(launch_id.encode()).digest()
    return PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]


def ports_of(launch_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Derive the ports of a launch: its own, and those to try if that is taken.

    The second ones are those on which a coordinator tells that it found none to use.
    """
    numbers = range(1, _TRIES + _NOTICES)
    names = [launch_id, *(f"{launch_id} {number}" for number in numbers)]
    ports = tuple(dict.fromkeys(map(port_of, names)))
    return ports[:_TRIES], ports[_TRIES:]


def explicit_endpoint(
    options: Options, host: str, port: int
) -> tuple[str, int, Setting | None]:
    """Return host and port as typed, and what the host came from.

    Args:
        options: What the user set.
        host: The host if none was typed; then it came from nothing.
        port: The port if none was typed.
    """
    port = port if options.master_port is None else options.master_port
    typed = options.endpoint
    if typed is None:
        return host, port, None
    port = port if typed.port is None else typed.port
    return typed.host, port, options.endpoint_setting


def endpoint_of(
    inputs: Inputs, job: Job, exported: tuple[str, int, Setting] | None = None
) -> Endpoint:
    """Return where the nodes are to meet: a function of names.

    That is what the user passed, otherwise the scheduler's first node, otherwise
    ``MASTER_ADDR``, otherwise what the launcher itself shows.

    Args:
        inputs: What the plan is made from.
        job: The job of ``inputs``.
        exported: What the user has exported, for a task that is a worker.

    Raises:
        LaunchError: The port is one that nobody knows, or there is no host.
    """
    options, ports = inputs.options, ports_of(job.launch_id)
    # The only node of a launch is this one, also where the launcher does not name it.
    first = job.nodes[0] or (job.hostname if len(job.nodes) == 1 else "")
    host, port, setting = exported or explicit_endpoint(options, first, ports[0][0])
    if setting is None and not (host and job.nodelist_is_shared):
        master, port, setting = _exported_host(inputs, port, job)
        host = master or host
    host = host or _shown_by_launcher(inputs, job)
    if port == 0:
        is_typed = options.endpoint is not None and options.endpoint.port == 0
        raise LaunchError(
            "HPC051",
            f"{setting if is_typed else options['master_port']}: port 0 is another "
            "port at every start, which the other nodes could not know. Leave it out, "
            f"or type one: --rdzv_endpoint={join_endpoint(host, C10D_PORT)}",
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
    return Endpoint(fast, host, port, node, setting, *ports)


def _exported_host(
    inputs: Inputs, port: int, job: Job
) -> tuple[str, int, Setting | None]:
    """Read ``MASTER_ADDR`` and ``MASTER_PORT`` for agents that are told no names.

    A user hands them to mpirun. Elsewhere they are left alone: hooks of containers
    export old ones. A port that not all nodes may have is left alone, too.
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
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < PORTS_END:
        raise LaunchError(
            "HPC129",
            f"{source}={text} is not a port: set one from 1 to 65535, or unset it",
            everywhere=True,
        )
    return int(text)


def _shown_by_launcher(inputs: Inputs, job: Job) -> str:
    """Return the machine where the launcher runs, which node 0 has to check.

    Of several addresses it is the one in the network of this node's own address for
    the job. That network is the one that gloo will use.

    Raises:
        LaunchError: The launcher does not show any, or it is not clear which one.
    """
    if not job.head_candidates:
        raise LaunchError(
            "HPC038",
            f"{job.scheduler} tells {count(len(job.nodes), 'node')} their ranks, but "
            f"no names ({job.provenance['nodes']}), so that they cannot meet. Tell "
            f"them where node 0 is: {head_hint(inputs, job, 'HOST')}",
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
            f"{job.launcher.name} runs at {' and '.join(map(str, near))}, and the name "
            f"of this node, {job.own_name}, does not tell which of these networks the "
            f"job uses. {network_hint(job)}",
        )
    return str((found or near)[0])


def network_hint(job: Job, interface: Interface | None = None) -> str:
    """Return how to name the network if a launcher shows several, otherwise nothing.

    Args:
        job: The job.
        interface: The one that has this node's address for the job.
    """
    if sum(map(is_number, job.head_candidates)) <= 1:
        return ""
    name = interface.name if interface else "INTERFACE"
    return f"Name the network: {job.launcher.network_hint.format(interface=name)}"


def head_hint(inputs: Inputs, job: Job, host: str) -> str:
    """Return how to tell a launcher's tasks where node 0 is."""
    is_direct = inputs.mode.is_direct
    option = f"--rdzv_endpoint={host}:{port_of(job.launch_id)}"
    if job.nodes[0] and not is_direct:
        return option
    variable = f"export {MASTER_ADDR}={host}"
    if option_of := job.launcher.forward_option:
        variable = f"{job.launcher.name} {option_of} {MASTER_ADDR}={host} …"
    return variable if is_direct else f"{variable}   (or {option})"


def check_first_is_known(job: Job, endpoint: Endpoint, option: str) -> None:
    """Refuse a store on rank 0 where only rank 0 knows its node.

    Args:
        job: The job.
        endpoint: The endpoint by name.
        option: What tells all nodes where rank 0 is, up to its name.

    Raises:
        LaunchError: The user has not typed it either.
    """
    if job.is_ranked or endpoint.setting:
        return
    first = job.own_name if job.task.rank == 0 else "HOST"
    raise LaunchError(
        "HPC141",
        f"tasks are in an order of your own ({job.provenance['order']}), which "
        f"{job.launcher.name} tells none of them, so that only rank 0 itself knows "
        f"that it is on {first}. Tell the others: {option}{first}",
        everywhere=True,
    )


# --- what the user has exported, in direct mode ---------------------------------------


def exported_endpoint(
    inputs: Inputs, job: Job
) -> tuple[tuple[str, int, Setting] | None, tuple[Message, ...]]:
    """Read ``MASTER_ADDR`` and ``MASTER_PORT`` for tasks that are workers.

    In a script without a launcher they are how a user says where rank 0 is. But hooks
    of containers export them too, for another step.

    Returns:
        Host, port and source of the endpoint, or ``None``; a note on one that does not
        count.

    Raises:
        LaunchError: The port is none.
    """
    address = inputs.environ.get(MASTER_ADDR, "")
    port = inputs.free_port or port_of(job.launch_id)
    exported_port = inputs.environ.get(MASTER_PORT, "")
    if exported_port == inputs.promise.hook_port or not job.nodelist_is_shared:
        exported_port = ""  # the same for all steps of a job; or not on all nodes
    if address and not _may_be_first_node(inputs, job, address):
        first = job.nodes[0] or "this one"
        text = (
            f"{MASTER_ADDR}={address} is not node 0 of this step, {first}, and is "
            "replaced"
        )
        return None, (Message("HPC078", text),)
    if exported_port:
        port = port_number(exported_port, MASTER_PORT)
    if not address and not exported_port:
        return None, ()
    source = MASTER_ADDR if address else MASTER_PORT
    if not address:
        address = LOOPBACK if inputs.mode is Mode.DIRECT_ONE_NODE else job.nodes[0]
    if not address or (source == MASTER_PORT and not job.is_ranked):
        return None, ()  # only the launcher knows where rank 0 is
    setting = Setting(join_endpoint(address, port), source)
    return (address, port, setting), ()


def _may_be_first_node(inputs: Inputs, job: Job, address: str) -> bool:
    first = job.nodes[0]
    if inputs.mode is Mode.DIRECT_ONE_NODE:
        return inputs.network.local_address(address) is not None
    if job.head_candidates or not first:
        return True  # nobody else knows; node 0 will see
    firsts = (first,) if job.is_ranked else job.nodes  # rank 0 will see
    names = (name for node in firsts for name in (node, inputs.rewrite(node)))
    if any(_is_named(address, name) for name in names):
        return True
    # Only the node itself knows that of a number; rank 0 will see.
    return bool(is_number(address) and inputs.network.addresses_of(address))


def _is_named(address: str, node: str) -> bool:
    """Return whether an address may be a node's: its name, or one made of it.

    ``n9i`` and ``n9-ib0`` are common names of a node n9 on its other networks.
    """
    label = re.escape(node.partition(".")[0])
    is_made_of_it = re.fullmatch(rf"{label}([^0-9].*)?", address) is not None
    return same_host(address, node) or is_made_of_it


# --- what several plans need ----------------------------------------------------------


def check_resolves(inputs: Inputs, host: str, setting: Setting | None) -> None:
    """Check that an explicit host has an address here.

    Raises:
        LaunchError: It has none.
    """
    if not inputs.network.resolve(host):
        raise LaunchError(
            "HPC067",
            f"{setting} does not resolve here. Type a name or an address that does: "
            "HOST:PORT",
        )


def may_join(inputs: Inputs) -> bool:
    """Return whether another agent of this machine may have the port.

    As in torch's c10d, unless the user says who is the host.
    """
    is_typed = "rdzv_endpoint" in inputs.options
    return (
        inputs.options.is_c10d
        and is_typed
        and (inputs.options.rdzv_conf.is_host is None)
    )


def hosts_of(job: Job) -> tuple[str, ...]:
    """Return the names of the nodes by rank, empty where it is not known."""
    names = enumerate(job.nodes if job.is_ranked else ("",) * len(job.nodes))
    return tuple(
        name or (job.own_name if rank == job.node_rank else "") for rank, name in names
    )
