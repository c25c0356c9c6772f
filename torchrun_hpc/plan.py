"""What will be launched: a pure function of job, site, network and typed options.

Precedence for each value: command line, ``PET_*``, derived. Only what is unset is
filled in, with one exception: an endpoint host that is the plain name of one of the
job's nodes is rewritten to its name on the fast network.

What must be equal on all nodes (names, ranks, identity, port) comes from inputs that
are equal on all nodes. What belongs to this node (addresses, interfaces) does not.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.job import Job, Start
from torchrun_hpc.network import names_match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.network import Address, Interface, Network
    from torchrun_hpc.sites import Site

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
OMP = "OMP_NUM_THREADS"

# Below Linux's ephemeral ports (32768 and up), which any program may be given.
PORTS = range(20000, 29000)

# Seconds. Torch's 60 and 600 are too short for a container that is pulled, or a
# Python that is imported from a busy file system, on hundreds of nodes.
READ_TIMEOUT = 600
JOIN_TIMEOUT = 900

STATIC = "static"
C10D = "c10d"


@dataclass(frozen=True)
class Value:
    """A value and where it came from: an option, a variable, a rule."""

    value: Any
    source: str

    def __str__(self) -> str:
        """Show it as it was typed: ``--nnodes=4``."""
        return f"{self.source}={self.value}"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is decided before torch takes over.

    Attributes:
        nodes: Names of the nodes in rank order; one is a world of its own.
        node_rank: Index of this node in ``nodes``.
        workers: Number of workers on this node.
        speaks: Whether this process reports what is the same on all nodes.
        ordered: Whether ranks of nodes are to follow ``nodes``.
        title: What was started by whom, for the start line.
        endpoint: Where the nodes meet, for the start line.
        address: This node's address for the job, as a number; ``None`` if unknown.
        interface: Name of the interface that has it.
        listen: Address and port on which this process will host the rendezvous;
            ``None`` if it will not.
        options: Options of torchrun to set, by their name in its parser.
        environment: Environment variables to set.
        notes: What was corrected, the same on all nodes.
        warnings: What is wrong on this node, and was worked around.
    """

    nodes: tuple[str, ...]
    node_rank: int
    workers: int
    speaks: bool
    ordered: bool = False
    title: str = ""
    endpoint: str = ""
    address: str | None = None
    interface: str | None = None
    listen: tuple[str, int] | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    environment: Mapping[str, Value] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """What a plan is made from.

    Attributes:
        job: What the scheduler says; ``None`` without one.
        site: The computing centre; ``None`` if unknown or switched off.
        network: This node's network.
        options: What the user typed, or set by ``PET_*``, by torchrun's names.
        environ: Environment of this process.
        workers: Number of workers on this node.
        command: The command as typed, for messages.
    """

    job: Job | None
    site: Site | None
    network: Network
    options: Mapping[str, Value]
    environ: Mapping[str, str]
    workers: int
    command: str

    def typed(self, name: str) -> Any:
        """Return what was typed for an option, ``None`` if nothing."""
        option = self.options.get(name)
        return None if option is None else option.value


def make_plan(question: Question) -> LaunchPlan:
    """Decide everything that can be decided before the nodes have met.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    q = question
    low, high = node_range(q.options)
    if q.job is None:
        return _one_node(q) if high == 1 else _as_typed(q)
    if one_node_is_typed(q.options):
        return _one_node(q)
    problem = refusal(q.job, q.command)
    if problem is not None:
        raise problem
    if "nnodes" in q.options:
        _check_nnodes(q, low, high)
    elif len(q.job.nodes) == 1:
        return _one_node(q)
    return _many_nodes(q, q.job)


def refusal(job: Job, command: str) -> LaunchError | None:
    """Return why this job cannot be launched from here, unless for one node only.

    Args:
        job: What the scheduler says.
        command: The command as typed, for the srun line in the message.
    """
    line = _srun_line(job, command)
    nodes = f"{len(job.nodes)} node{'s' if len(job.nodes) > 1 else ''}"
    if job.start is Start.ALLOCATION_SHELL:
        return LaunchError(
            f"this shell is not on one of the job's {nodes} "
            f"({job.sources['nodes']}={','.join(job.nodes[:3])}"
            f"{',…' if len(job.nodes) > 3 else ''}). Type: {line}"  # noqa: PLR2004
        )
    if job.start is Start.BATCH_SCRIPT and len(job.nodes) > 1:
        return LaunchError(
            f"started in the batch script of a job of {nodes} "
            f"({job.sources['nodes']}), where it runs on the first node only and "
            f"would wait for the others. Type: {line}   "
            "(or --standalone for this node alone)"
        )
    if job.start is Start.STEP and max(job.tasks_per_node) > 1:
        counts = sorted(set(job.tasks_per_node))
        tasks = " or ".join(str(count) for count in counts)
        return LaunchError(
            f"srun started {tasks} tasks on a node ({job.sources['tasks_per_node']}), "
            "but torchrun_hpc is started once per node and starts the workers "
            f"itself. Type: {line}   (or --standalone for one world per task)",
            speak=job.task_rank == 0,
        )
    return None


def one_node_is_typed(options: Mapping[str, Value]) -> bool:
    """Say whether the user asked for a world of one node, whatever the scheduler."""
    standalone = options.get("standalone")
    if standalone is not None and standalone.value:
        return True
    return "nnodes" in options and node_range(options) == (1, 1)


def node_range(options: Mapping[str, Value]) -> tuple[int, int]:
    """Return the lowest and highest number of nodes that were typed; 1 by default.

    Raises:
        LaunchError: ``--nnodes`` is neither a number nor a range.
    """
    typed = options.get("nnodes")
    if typed is None:
        return 1, 1
    match = re.fullmatch("([0-9]{1,9})(?::([0-9]{1,9}))?", str(typed.value))
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 0 < low <= high:
        raise LaunchError(
            f"{typed} is not a number of nodes: type a number (4) or a range with "
            "the lower number first (2:4)"
        )
    return low, high


def port_of(identity: str) -> int:
    """Derive the port of a launch from its identity; the same on all nodes."""
    digest = hashlib.sha256(identity.encode()).digest()
    return PORTS[int.from_bytes(digest[:8], "big") % len(PORTS)]


# --- one node, or nothing to derive from ----------------------------------------


def _one_node(q: Question) -> LaunchPlan:
    """Plan a world of one node: torchrun --standalone, whatever the scheduler."""
    options: dict[str, Value] = {}
    rule = "one node"
    if "local_addr" not in q.options:
        # Otherwise torch publishes getfqdn(), which need not resolve: #174513.
        options["local_addr"] = Value("127.0.0.1", rule)
    untouched = not {"rdzv_backend", "rdzv_endpoint", "rdzv_id"}.intersection(q.options)
    if _is_static(q) or q.typed("standalone"):
        pass  # torchrun knows what to do
    elif q.job is None and untouched:
        options["standalone"] = Value(True, rule)  # noqa: FBT003 - it is the value
    else:
        if "rdzv_endpoint" not in q.options:
            options["rdzv_endpoint"] = Value("localhost:0", rule)
        elif q.typed("rdzv_backend") in (None, C10D):
            conf = _rdzv_conf(q)
            if conf.get("store_type") != "file":
                conf.setdefault("is_host", "1")
                options["rdzv_conf"] = Value(_join(conf), rule)
        if "rdzv_backend" not in q.options:
            options["rdzv_backend"] = Value(C10D, rule)
        if "rdzv_id" not in q.options and q.job is not None:
            options["rdzv_id"] = Value(q.job.identity, q.job.sources["identity"])
    if "nnodes" not in q.options:
        options["nnodes"] = Value("1", rule)
    notes: tuple[str, ...] = ()
    if q.job is not None and q.job.start is Start.INTERACTIVE_STEP:
        total = q.job.allocated_nodes
        if total > 1:
            line = _srun_line(q.job, q.command, nodes=total)
            notes = (f"1 of {total} nodes of the job; for all of them: {line}",)
    name = q.job.nodes[q.job.node_rank or 0] if q.job else "localhost"
    typed = "rdzv_endpoint" in q.options
    return LaunchPlan(
        nodes=(name,),
        node_rank=0,
        workers=q.workers,
        speaks=q.job is None or q.job.task_rank == 0,
        title=_title(q, 1),
        endpoint=str(q.typed("rdzv_endpoint") or "localhost"),
        address=None if typed else "127.0.0.1",
        options=options,
        environment=_environment(q, None, None),
        notes=notes,
    )


def _as_typed(q: Question) -> LaunchPlan:
    """Leave a launch on several nodes without a scheduler to torchrun."""
    return LaunchPlan(
        nodes=(),
        node_rank=int(q.typed("node_rank") or 0),
        workers=q.workers,
        speaks=True,
        title=_title(q, node_range(q.options)[1]),
        endpoint=str(q.typed("rdzv_endpoint") or q.typed("master_addr") or ""),
        environment=_environment(q, None, None),
    )


# --- several nodes ----------------------------------------------------------------


@dataclass(frozen=True)
class _Endpoint:
    """Where the nodes meet.

    Attributes:
        host: Name or number of the host, rewritten for the site.
        plain: The same before it was rewritten.
        port: Its port.
        node: Rank of the node that it names; ``None`` if it names none.
        typed: Whether the user typed the host.
    """

    host: str
    plain: str
    port: int
    node: int | None
    typed: bool


def _many_nodes(q: Question, job: Job) -> LaunchPlan:
    rank = _rank_of(job)
    warnings: list[str] = []
    endpoint = _endpoint(q, job)
    static = _is_static(q)
    if static:
        _check_static(q, job, endpoint)
    torch_store = static or (
        q.typed("rdzv_backend") in (None, C10D)
        and _rdzv_conf(q).get("store_type", "tcp") == "tcp"
    )

    host = _resolvable(q, endpoint.host, endpoint.plain, warnings)
    address = _own_address(q, job, endpoint, host, warnings)
    interface = q.network.owner(address)
    hosts_it = _hosts(q, job, endpoint, host)
    meeting = _meeting_address(q, host, address if endpoint.node == rank else None)
    if torch_store and meeting is None:
        raise _unresolvable(q, endpoint, host, job)

    options = {"nnodes": Value(str(len(job.nodes)), job.sources["nodes"])}
    options["rdzv_id"] = Value(job.identity, job.sources["identity"])
    if address is not None:
        name = interface.name if interface else "interface"
        options["local_addr"] = Value(str(address), name)
    options = {k: v for k, v in options.items() if k not in q.options}
    if torch_store:
        where = _join_endpoint(str(meeting), endpoint.port)
        options["rdzv_endpoint"] = Value(where, f"address of {host}")
    if static:
        options["rdzv_backend"] = Value(STATIC, "typed")
        options["node_rank"] = Value(rank, job.sources["node_rank"])
    else:
        # Ignored by everything but static; torch would warn that it is.
        options["node_rank"] = Value(0, "default")
        if "rdzv_backend" not in q.options:
            options["rdzv_backend"] = Value(C10D, "default")
        if torch_store:
            conf = _rdzv_conf(q)
            conf.setdefault("is_host", str(int(hosts_it)))
            conf.setdefault("read_timeout", str(READ_TIMEOUT))
            conf.setdefault("join_timeout", str(JOIN_TIMEOUT))
            hosts_it = conf["is_host"].lower() in _TRUE
            options["rdzv_conf"] = Value(_join(conf), "defaults")

    listens = torch_store and hosts_it and q.network.owner(meeting) is not None
    if address is None:
        warnings.append(
            f"no address of {job.nodes[rank]} is known that other nodes could reach: "
            f"{GLOO} and {NCCL} are not set, and torch listens on all interfaces"
        )
    return LaunchPlan(
        nodes=job.nodes,
        node_rank=rank,
        workers=q.workers,
        speaks=job.task_rank == 0,
        ordered=not static,
        title=_title(q, len(job.nodes)),
        endpoint=_join_endpoint(host, endpoint.port)
        if torch_store
        else str(q.typed("rdzv_endpoint")),
        address=None if address is None else str(address),
        interface=interface.name if interface else None,
        listen=(str(meeting), endpoint.port) if listens else None,
        options=options,
        environment=_environment(q, address, interface),
        notes=_notes(q, endpoint, static=static),
        warnings=tuple(warnings),
    )


def _rank_of(job: Job) -> int:
    if job.node_rank is None:  # refused before; a shell outside the job's nodes
        raise LaunchError("this process is not on one of the job's nodes")
    return job.node_rank


def _check_nnodes(q: Question, low: int, high: int) -> None:
    if q.job is None:
        return
    nodes = len(q.job.nodes)
    name = q.options["nnodes"]
    if low == high and low != nodes:
        raise LaunchError(
            f"{name}, but srun started this on {nodes} node{'s' * (nodes > 1)} "
            f"({q.job.sources['nodes']}). Leave the option out, or type: "
            f"{_srun_line(q.job, q.command, nodes=low)}",
            speak=q.job.task_rank == 0,
        )
    if low > nodes:
        raise LaunchError(
            f"{name} asks for at least {low} nodes, but srun started this on {nodes} "
            f"({q.job.sources['nodes']}): it would wait for ever. Type: "
            f"{_srun_line(q.job, q.command, nodes=high)}",
            speak=q.job.task_rank == 0,
        )


def _is_static(q: Question) -> bool:
    """Say whether torchrun itself would take its static rendezvous."""
    backend = q.typed("rdzv_backend")
    if backend is not None:
        return bool(backend == STATIC)
    return any(n in q.options for n in ("node_rank", "master_addr", "master_port"))


def _check_static(q: Question, job: Job, endpoint: _Endpoint) -> None:
    typed = q.options.get("node_rank")
    rank = _rank_of(job)
    if typed is not None and typed.value != rank:
        raise LaunchError(
            f"{typed}, but this is node {rank} of the step "
            f"({job.sources['node_rank']}), and the static rendezvous would wait for "
            "ever. A variable in it was probably expanded in the batch script, where "
            "$SLURM_NODEID is 0. Leave the option out"
        )
    if endpoint.node not in (None, 0):
        raise LaunchError(
            f"the endpoint {endpoint.plain} is node {endpoint.node} of the step, but "
            "the static rendezvous is hosted by node 0, "
            f"{job.nodes[0]}. Leave --master_addr out, or type --rdzv_backend=c10d",
            speak=job.task_rank == 0,
        )


def _endpoint(q: Question, job: Job) -> _Endpoint:
    """Say where the nodes meet: a function of names, the same on all nodes."""
    port = port_of(job.identity)
    typed = q.options.get("rdzv_endpoint")
    if typed is None or not typed.value:
        typed = q.options.get("master_addr")
        if "master_port" in q.options:
            port = int(q.typed("master_port"))
    if typed is None or not typed.value:
        plain = job.nodes[0]
        return _Endpoint(_rewrite(q, plain), plain, port, 0, typed=False)
    host, typed_port = _split_endpoint(typed, speak=job.task_rank == 0)
    port = port if typed_port is None else typed_port
    if port == 0:
        raise LaunchError(
            f"{typed}: port 0 means a different port on every start, and the other "
            f"nodes could not know it. Leave it out, or type one ({host}:29400)",
            speak=job.task_rank == 0,
        )
    node = None
    if not _is_number(host):
        for index, name in enumerate(job.nodes):
            if names_match((name, _rewrite(q, name)), host):
                node = index
                break
    fast = _rewrite(q, host) if node is not None else host
    return _Endpoint(fast, host, port, node, typed=True)


def _rewrite(q: Question, host: str) -> str:
    return host if q.site is None else q.site.rewrite(host)


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


def _own_address(
    q: Question, job: Job, endpoint: _Endpoint, host: str, warnings: list[str]
) -> Address | None:
    """Return the address under which the other nodes know this one.

    It is one that the node's name gives and an interface owns; else the one that the
    kernel would send from. Where the user typed an endpoint that is no node's name,
    it says which network is meant.
    """
    if "local_addr" in q.options:
        return q.network.own_address(str(q.typed("local_addr")))
    rank = _rank_of(job)
    if endpoint.node is None:
        for far in q.network.addresses_of(host):
            near = far if q.network.owner(far) else q.network.address_toward(far)
            if near is not None:
                return near
    plain = job.nodes[rank]
    fast = _rewrite(q, plain)
    if rank != endpoint.node:
        fast = _resolvable(q, fast, plain, warnings)
    elif host == endpoint.plain:
        fast = plain  # said already
    own = q.network.own_address(fast)
    if own is not None:
        return own
    other = job.nodes[1 if rank == 0 else 0]
    for name in dict.fromkeys((_rewrite(q, other), other)):
        for far in q.network.addresses_of(name):
            near = q.network.address_toward(far)
            if near is not None:
                return near
    return None


def _hosts(q: Question, job: Job, endpoint: _Endpoint, host: str) -> bool:
    """Say whether this node hosts the rendezvous.

    It is the node that the endpoint names, else the owner of its address, else
    node 0.
    """
    rank = _rank_of(job)
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
        for name in dict.fromkeys((_rewrite(q, node), node))
    )


def _meeting_address(
    q: Question, host: str, own: Address | None
) -> Address | str | None:
    """Return where to connect to: a number, so that torch asks no name server."""
    if own is not None:
        return own
    return next(
        iter(q.network.addresses_of(host)), None if not _is_number(host) else host
    )


def _unresolvable(
    q: Question, endpoint: _Endpoint, host: str, job: Job
) -> LaunchError:
    name = q.options.get("rdzv_endpoint") or q.options.get("master_addr")
    source = str(name) if name and endpoint.typed else job.sources["nodes"]
    found = ", ".join(str(address) for address in q.network.resolve(host))
    fault = f"gives only {found} here" if found else "does not resolve here"
    return LaunchError(
        f"the head node's name {host} ({source}) {fault}, on "
        f"{job.nodes[_rank_of(job)]}. Type a name or an address that every node can "
        f"reach: --rdzv_endpoint=HOST:{endpoint.port}",
        speak=not endpoint.typed or job.task_rank == 0,
    )


def _notes(q: Question, endpoint: _Endpoint, *, static: bool) -> tuple[str, ...]:
    notes = []
    if endpoint.typed and endpoint.host != endpoint.plain and q.site is not None:
        notes.append(
            f"endpoint {endpoint.plain} rewritten to {endpoint.host} "
            f"(site {q.site.name})"
        )
    if not static and "node_rank" in q.options:
        notes.append(
            f"{q.options['node_rank']} is ignored: nodes are ranked as the scheduler "
            "numbers them"
        )
    return tuple(notes)


# --- environment variables --------------------------------------------------------


def _environment(
    q: Question, address: Address | None, interface: Interface | None
) -> dict[str, Value]:
    _check_interface_names(q)
    environment = {}
    if q.workers > 1 and not q.environ.get(OMP):
        environment[OMP] = Value("1", "torchrun's default")
    if address is None or interface is None:
        return environment
    owner = f"{interface.name} has {address}"
    if not q.environ.get(GLOO):
        environment[GLOO] = Value(interface.name, owner)
    # NCCL takes ib* first, all of them, without being told.
    infiniband = any(i.up and i.name.startswith("ib") for i in q.network.interfaces)
    if not q.environ.get(NCCL) and not infiniband:
        rails = q.network.siblings(interface, address)
        names = ",".join(rail.name for rail in rails)
        environment[NCCL] = Value(f"={names}", owner)
    return environment


def _check_interface_names(q: Question) -> None:
    """Refuse what gloo would crash on: it knows exact names only.

    Raises:
        LaunchError: ``GLOO_SOCKET_IFNAME`` names what is not an interface here.
    """
    value = q.environ.get(GLOO, "")
    if len(value) <= 1:  # gloo ignores it
        return
    names = [interface.name for interface in q.network.interfaces]
    for part in value.split(","):
        if part and part not in names:
            alike = [n for n in names if n.startswith(part.strip().lstrip("^="))]
            hint = ",".join(alike) or "one of " + ", ".join(names)
            raise LaunchError(
                f"{GLOO}={value}: this node has no interface {part!r}. Gloo takes "
                "exact names only: no prefix, no ^, no =, no blanks (those are for "
                f"NCCL). Unset it, or set it to {hint}"
            )


# --- text -------------------------------------------------------------------------

_TRUE = ("1", "true", "t", "yes", "y")  # torch's RendezvousParameters.get_as_bool
_FALSE = ("0", "false", "f", "no", "n")


def _rdzv_conf(q: Question) -> dict[str, str]:
    """Read the typed ``--rdzv-conf``, as torch would.

    Raises:
        LaunchError: It is not of the form ``key=value,key=value``.
    """
    typed = q.options.get("rdzv_conf")
    conf: dict[str, str] = {}
    if typed is None:
        return conf
    for part in str(typed.value).split(","):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not part.strip():
            continue
        if not key or not equals or not value:
            raise LaunchError(
                f"{typed}: {part!r} is not of the form key=value. Type pairs with "
                "commas between them: join_timeout=900,read_timeout=600"
            )
        conf[key] = value
    for key, value in conf.items():
        if key == "is_host" and value.lower() not in _TRUE + _FALSE:
            raise LaunchError(f"{typed}: is_host={value} is neither true nor false")
        if key.endswith("timeout") and not re.fullmatch("[0-9]{1,9}", value):
            raise LaunchError(f"{typed}: {key}={value} is not a number of seconds")
    return conf


def _join(conf: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in conf.items())


def _split_endpoint(typed: Value, *, speak: bool) -> tuple[str, int | None]:
    """Split ``host``, ``host:port``, ``[address]:port``.

    Raises:
        LaunchError: It is none of these.
    """
    text = str(typed.value).strip()
    if _is_number(text):
        return text, None
    match = re.fullmatch(
        r"(?:\[(?P<number>[^\]]+)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]{1,5}))?", text
    )
    if match and (match["name"] or _is_number(match["number"])):
        port = None if match["port"] is None else int(match["port"])
        if port is None or port < 2**16:
            return match["name"] or match["number"], port
    raise LaunchError(
        f"{typed} is not an endpoint: type HOST:PORT (an IPv6 address in brackets, a "
        "port up to 65535)",
        speak=speak,
    )


def _join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _title(q: Question, nodes: int) -> str:
    if q.job is None:
        return "no scheduler"
    part = f" ({nodes} of {q.job.allocated_nodes} nodes)"
    return f"{q.job.scheduler} {q.job.identity}" + part * (
        nodes < q.job.allocated_nodes and q.job.start is Start.STEP
    )


def _srun_line(job: Job, command: str, *, nodes: int | None = None) -> str:
    return f"srun --nodes={nodes or len(job.nodes)} --ntasks-per-node=1 {command}"
