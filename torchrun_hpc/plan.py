"""What will be launched: a pure function of job, site, network and typed options.

Precedence for each value: command line, ``PET_*``, derived. Only what is unset is
filled in, with two exceptions: an endpoint host that is the plain name of one of the
job's nodes is rewritten to its name on the fast network, and a node rank that c10d
ignores is taken back.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc import endpoints, rdzvconf, resources, variables
from torchrun_hpc.errors import LaunchError, Message, choices, count
from torchrun_hpc.inputs import C10D, SCHEDULER, STATIC, Inputs, Value
from torchrun_hpc.job import Job, Start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.network import Address

# Seconds. Torch's 60 and 600 are too short for a container that is pulled, or a
# Python that is imported from a busy file system, on hundreds of nodes.
READ_TIMEOUT = 600
JOIN_TIMEOUT = 900

# torch's defaults: run.py and c10d_rendezvous_backend.py
STATIC_PORT = 29500
C10D_PORT = 29400

LOOPBACK = "127.0.0.1"

# Bytes of --rdzv-id: torch names a folder by it, with nine more, and 255 are allowed.
LONGEST_ID = 246

NO_SCHEDULER = "no scheduler"

# What an agent, or direct mode, sets for a worker.
RUN_ID, RANK = "TORCHELASTIC_RUN_ID", "RANK"

# How many node names a message quotes.
_SHOWN = 3


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is decided before torch takes over.

    Attributes:
        title: What was started by whom, for the start line.
        shape: How many nodes and tasks there are, for the same, where all are known.
        nodes: Number of nodes of the world.
        fewest: With how many it starts if no more come; 0 if that is ``nodes``.
        hosts: Their names in the scheduler's order; empty without a scheduler.
        node_rank: Rank of this node.
        workers: Number of workers on this node.
        speaks: Whether this process reports what is the same on all nodes.
        ordered: Whether nodes are to be ranked by ``node_rank``.
        elastic: Whether agents may join that this launch does not start.
        may_join: Whether the port of a rendezvous that is to be hosted here may be
            taken by another agent of this machine, which is then the host.
        identity: Names this launch and no other; empty without a scheduler.
        backend: Kind of the rendezvous: ``scheduler`` is ours, the others are torch's.
        endpoint: Where the nodes meet, for a person.
        reach: Address or name to connect to; empty if torch is to find out.
        ports: Where the head may be, in the order in which it tries them.
        head: Rank of the node that hosts the rendezvous; ``None`` if only that node
            knows.
        is_head: Whether that is this one.
        site: Name of the computing centre whose rules are used, and why it is that.
        interface: Where gloo will be, for a person; empty if that is left to it.
        address: This node's address for the job, as a number; ``None`` if unknown.
        listen: Address and port on which this process hosts the rendezvous; ``None``
            if it does not, or if any address will do.
        options: Options of torchrun to set, by their name in its parser.
        environment: Environment variables to set.
        notes: What was corrected, the same on all nodes.
        advice: What is probably not meant; as good as the same on all nodes.
        suspicion: What is probably wrong if the nodes do not meet.
        warnings: What is wrong on this node, and was worked around.
        fail_together: With what one task that fails ends all, see `Launcher`.
    """

    title: str
    nodes: int
    node_rank: int
    workers: int
    speaks: bool
    endpoint: str
    shape: str = ""
    fewest: int = 0
    identity: str = ""
    backend: str = C10D
    reach: str = ""
    ports: tuple[int, ...] = ()
    head: int | None = None
    is_head: bool = False
    hosts: tuple[str, ...] = ()
    site: Value | None = None
    interface: str = ""
    ordered: bool = False
    elastic: bool = False
    may_join: bool = False
    address: str | None = None
    listen: tuple[str, int] | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    environment: Mapping[str, Value] = field(default_factory=dict)
    notes: tuple[Message, ...] = ()
    advice: tuple[Message, ...] = ()
    suspicion: str = ""
    warnings: tuple[Message, ...] = ()
    fail_together: str = ""

    def reports_wait_for(self, node: int | None) -> bool:
        """Say whether this node is the one that says that another one is late.

        It is the first of the others: node 0 does not wait for itself.

        Args:
            node: Rank of the node that is waited for; ``None`` where it is not known
                to all: one of the first two is another one.
        """
        if node is None:
            return self.node_rank in (0, 1)
        return self.node_rank == (0 if node else 1)


def make_plan(q: Inputs) -> LaunchPlan:
    """Decide everything that can be decided before the nodes have met.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    made = _make_plan(q)
    rdzvconf.check(q.options.get("rdzv_conf"), made.backend)
    if made.backend == C10D:
        environment = {**made.environment, **variables.of_release(q)}
        made = replace(made, environment=environment)
    if not q.typed("hpc_debug"):
        return made
    options = {**made.options}
    if not {"tee", "redirects"}.intersection(q.options):
        # The workers' stderr, with the rank on each line.
        options["tee"] = Value("2", "--hpc-debug")
    environment = {**made.environment, **variables.debugging(q.environ)}
    return replace(made, options=options, environment=environment)


def _make_plan(q: Inputs) -> LaunchPlan:
    variables.check_gloo(q.environ, q.network)
    _check_rendezvous(q)
    low, high = node_range(q.options)
    if one_node_is_typed(q.options):
        return _one_node(q)
    if q.job is None:
        return _one_node(q) if high == 1 else _as_typed(q, high)
    problem = refusal(q.job, q.command)
    if problem is not None:
        raise problem
    if q.job.has_several_tasks:
        raise several_tasks(q.job, q.command, q.options.get("nproc_per_node"))
    if len(q.job.nodes) == high == 1:
        return _one_node(q)
    _check_nnodes(q, q.job, low, high)
    where = {"rdzv_endpoint", "master_addr", "master_port"}
    if not where.intersection(q.options):  # it would have the same ports
        problem = nested(q.environ, q.job.identity)
    if problem is not None:
        raise problem
    return _many_nodes(q, q.job)


def meeting_place(q: Inputs) -> LaunchPlan | None:
    """Return a plan that is right about where the nodes meet, and nothing else.

    Returns:
        It; ``None`` if they are not several nodes with an agent on each.

    Raises:
        LaunchError: That cannot be known.
    """
    if (
        q.job is None
        or q.job.has_several_tasks
        or len(q.job.nodes) == 1
        or one_node_is_typed(q.options)
    ):
        return None
    return _many_nodes(q, q.job)


def refusal(job: Job, command: str) -> LaunchError | None:
    """Return why a job cannot be launched from here, unless for one node only.

    Args:
        job: What the scheduler says.
        command: The command as typed, for the srun line in the message.
    """
    line = job.line(command)
    nodes = count(len(job.nodes), "node")
    if job.start is Start.ALLOCATION_SHELL:
        more = ",…" if len(job.nodes) > _SHOWN else ""
        return LaunchError(
            "HPC060",
            f"this shell is not on the job's {nodes} "
            f"({','.join(job.nodes[:_SHOWN])}{more} by {job.sources['nodes']}). "
            f"Type: {line}",
            everywhere=True,
        )
    if job.start is Start.BATCH_SCRIPT and len(job.nodes) > 1:
        return LaunchError(
            "HPC061",
            f"started in the batch script of a job of {nodes} "
            f"({job.sources['nodes']}): that runs on the first node only, and would "
            f"wait for the others. Type: {line}   "
            "(or --standalone for this node alone)",
            everywhere=True,
        )
    return None


def nested(environ: Mapping[str, str], run_id: str) -> LaunchError | None:
    """Return why a worker of a launch cannot launch for all its nodes once more.

    The variables of a worker alone prove nothing: sbatch hands them on to another job.

    Args:
        environ: Environment of this process.
        run_id: Rendezvous id of the launch that this one would meet.
    """
    if not environ.get(RANK) or environ.get(RUN_ID) != run_id:
        return None
    return LaunchError(
        "HPC164",
        f"this was started inside worker {environ[RANK]} of the same launch "
        f"({RUN_ID}={run_id}), and would be one more of its agents or workers. For "
        "workers on this node alone type --standalone; else take one of the two "
        "launchers out",
        others_know=True,  # its agents are at work
    )


def outside() -> LaunchError:
    """Return why a process on none of the job's nodes cannot launch."""
    return LaunchError("HPC068", "this process is not on one of the job's nodes")


def several_tasks(job: Job, command: str, typed: Value | None) -> LaunchError:
    """Return why several tasks on a node cannot start workers of their own.

    Args:
        job: What the launcher says.
        command: The command as typed, for the message.
        typed: The number of workers that was typed, if it was.
    """
    wanted = f"{typed}" if typed else "an agent"
    tasks = count(job.task.size, "task")
    return LaunchError(
        "HPC062",
        f"{job.launcher.name} started {tasks} on {count(len(job.nodes), 'node')} "
        f"({job.sources['tasks']}), and {wanted} on each would start more workers. "
        f"Start it once on each node: {job.line(command)}   (or let each task be a "
        "worker: leave --nproc_per_node out; or --standalone for one world per task)",
        everywhere=True,
    )


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
    # Spaces and a plus sign: torch's int() takes them too.
    number = r"\s*\+?([0-9]{1,9})\s*"
    match = re.fullmatch(f"{number}(?::{number})?", str(typed.value))
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 0 < low <= high:
        raise LaunchError(
            "HPC063",
            f"{typed} is not a number of nodes: type a number (4), or a range with "
            "the lower number first (2:4)",
            everywhere=True,
        )
    return low, high


# --- one node, or nothing to derive from ------------------------------------------


def _one_node(q: Inputs) -> LaunchPlan:
    """Plan a world of one node: torchrun --standalone, whatever the scheduler."""
    rule = "one node"
    standalone = q.typed("standalone")
    advice = resources.advice(q, 1)
    options: dict[str, Value] = {}
    if q.typed("node_rank") and (standalone or not _has_static_store(q)):
        text = (
            f"{q.options['node_rank']} is ignored, a world of one node has only node "
            "0. For several nodes type --nnodes"
        )
        advice = (Message("HPC151", text), *advice)
        options["node_rank"] = Value(0, rule)
    elif q.typed("node_rank"):
        raise LaunchError(
            "HPC064",
            f"{q.options['node_rank']}, but a world of one node has only node 0. Leave "
            "the option out",
        )
    if standalone and node_range(q.options)[0] > 1:
        raise LaunchError(
            "HPC065",
            f"{q.options['nnodes']} and --standalone, which is one node: leave one of "
            "them out",
            everywhere=True,
        )
    told = {"rdzv_endpoint", "master_addr", "master_port"}.intersection(q.options)
    listen = _one_node_listens(q) if told and not standalone else (LOOPBACK, 0)
    if standalone and "rdzv_backend" in q.options:  # whatever it is
        options["rdzv_backend"] = Value(C10D, "--standalone")
        options["rdzv_endpoint"] = Value("localhost:0", "--standalone")
    if not standalone and not q.is_static:
        options |= _one_node_rendezvous(q, is_host=bool(told and listen))
    # torch would publish getfqdn(), which need not resolve: pytorch#174513.
    address = LOOPBACK
    if "local_addr" in q.options:
        address = str(endpoints.typed_local_address(q))
    else:
        options["local_addr"] = Value(LOOPBACK, rule)
    if q.typed("nnodes") is None or node_range(q.options)[1] > 1:
        options["nnodes"] = Value("1", rule)  # nobody can join what is standalone
    return LaunchPlan(
        title=title_of(q, 1),
        nodes=1,
        node_rank=0,
        workers=q.workers,
        speaks=q.job is None or q.job.task.rank == 0,
        endpoint=q.typed("rdzv_endpoint") or "localhost",
        backend=C10D if standalone else q.backend,
        hosts=_this_host(q.job),
        address=address,
        listen=listen,
        options=options,
        environment=resources.worker_threads(q),
        notes=(
            *_range_note(q),
            *_interactive_note(q),
            *_unused(q, "a world of one node"),
        ),
        advice=advice,
    )


def _range_note(q: Inputs) -> tuple[Message, ...]:
    if node_range(q.options)[1] == 1:
        return ()
    text = f"{q.options['nnodes']} is 1: nobody can join with --standalone"
    return (Message("HPC155", text),)


def _has_static_store(q: Inputs) -> bool:
    """Say whether torchrun takes its static rendezvous for one node, too."""
    return q.typed("rdzv_backend") == STATIC or (
        q.is_static and "master_port" in q.options
    )


def names_folder(run_id: str) -> bool:
    """Say whether torch can name its folder for logs by an id."""
    return "/" not in run_id and len(os.fsencode(run_id)) <= LONGEST_ID


def unused(q: Inputs, where: str, names: Sequence[str]) -> tuple[Message, ...]:
    """Name the options of ours that have no effect."""
    useless = [str(q.options[name]) for name in names if name in q.options]
    return tuple(
        Message("HPC077", f"{option} has no effect on {where}") for option in useless
    )


def _unused(q: Inputs, where: str) -> tuple[Message, ...]:
    """Name the options that only nodes of a job can follow."""
    site = ("hpc_site",) if q.site is not None else ()
    ours = ("hpc_rendezvous",) if q.typed("hpc_rendezvous") == SCHEDULER else ()
    return unused(q, where, site + ours)


def _this_host(job: Job | None) -> tuple[str, ...]:
    if job is None or job.node_rank is None:
        return ()
    return (job.own_name,)


def _one_node_rendezvous(q: Inputs, *, is_host: bool) -> dict[str, Value]:
    """Return the options of c10d on one node that were not typed."""
    rule = "one node"
    if q.job is None and not {"rdzv_backend", "rdzv_endpoint", "rdzv_id"} & set(
        q.options
    ):
        return {"standalone": Value(value=True, source=rule)}
    options = {"rdzv_backend": Value(C10D, rule)}
    if q.is_c10d:
        options["rdzv_endpoint"] = Value("localhost:0", rule)
    if q.job is not None:
        options["rdzv_id"] = Value(q.job.identity, q.job.sources["identity"])
    options = {k: v for k, v in options.items() if k not in q.options}
    if not names_folder(str(q.typed("rdzv_id") or "")):
        options["rdzv_id"] = Value("none", rule)  # torchrun takes one of its own
    if q.is_c10d and is_host:
        # torch does not know the node by the name of a second interface.
        conf = rdzvconf.filled(q.options.get("rdzv_conf"), is_host=1)
        options["rdzv_conf"] = Value(rdzvconf.join(conf), rule)
    return options


def _one_node_listens(q: Inputs) -> tuple[str, int] | None:
    """Return where a node listens that was told an endpoint, if it is its own."""
    port = STATIC_PORT if q.is_static else C10D_PORT
    host, port, typed = endpoints.typed_endpoint(q, LOOPBACK, port)
    if not q.is_static and not q.is_c10d:
        return None
    _check_resolves(q, host, typed)
    conf = rdzvconf.parse(q.options.get("rdzv_conf"))
    if q.is_c10d and conf.get("is_host", "1").lower() in rdzvconf.FALSE:
        return None
    own = q.network.local_address(host)
    return None if own is None else (str(own), port)


def _as_typed(q: Inputs, nodes: int) -> LaunchPlan:
    """Plan for several machines without a scheduler, on each of which it was typed.

    That is left to torchrun, but for two things: which machine hosts c10d is decided by
    the address of the endpoint, not by comparing names; and gloo and NCCL get the
    interface that has this machine's address for it.

    Raises:
        LaunchError: Nothing says where the nodes are to meet.
    """
    if not {"rdzv_endpoint", "master_addr"}.intersection(q.options):
        raise LaunchError(
            "HPC066",
            f"{q.options['nnodes']}, but no scheduler's variables are set and no head "
            "node was typed: every node would wait on its own. Start it with srun, or "
            "type on every node: --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT",
        )
    backend = q.typed("rdzv_backend") or STATIC  # torchrun's own default
    port = C10D_PORT if backend == C10D else STATIC_PORT
    host, port, typed = endpoints.typed_endpoint(q, LOOPBACK, port)
    own, is_host, options = None, True, {}
    if typed is not None:
        _check_resolves(q, host, typed)
        own = endpoints.address_near(q, host)
        is_host = q.network.local_address(host) is not None
        if backend == C10D:
            options = _typed_c10d(q, own, host)
    where = endpoints.join_endpoint(host, port)
    listen = q.network.own_address(host) if "rdzv_conf" in options else None
    environment = variables.network(replace(q, site=None), own)
    rank = q.typed("node_rank") or 0
    return LaunchPlan(
        title=title_of(q, nodes),
        nodes=nodes,
        fewest=node_range(q.options)[0],
        node_rank=rank,
        workers=q.workers,
        speaks=rank == 0 if backend == STATIC else is_host,
        endpoint=where if typed else q.typed("rdzv_endpoint"),
        backend=backend,
        elastic=True,
        may_join=_may_join(q),
        address=None if own is None else str(own),
        listen=(str(listen), port) if listen else None,
        interface=variables.interface_name(q.environ, environment),
        options=options,
        environment=resources.worker_threads(q) | environment,
        notes=_unused(q, "nodes that no scheduler has named"),
        advice=resources.advice(q, nodes),
        warnings=_foreign_master(backend, rank, typed, is_host=is_host),
    )


def _may_join(q: Inputs) -> bool:
    """Say whether who has the port may be another agent, at an endpoint of theirs.

    As in torch's c10d, unless the user says who is the host.
    """
    conf = rdzvconf.parse(q.options.get("rdzv_conf"))
    return q.is_c10d and "rdzv_endpoint" in q.options and "is_host" not in conf


def _foreign_master(
    backend: str, rank: int, typed: Value | None, *, is_host: bool
) -> tuple[Message, ...]:
    """Warn of a node 0 that is somewhere else."""
    if backend != STATIC or rank or is_host:
        return ()
    text = (
        f"{typed} is no address of this machine, but this is node 0, which hosts the "
        "static rendezvous. Type on each of the other machines: --node_rank=1, 2, ..."
    )
    return (Message("HPC137", text),)


def _typed_c10d(q: Inputs, own: Address | None, host: str) -> dict[str, Value]:
    """Return what torch gets wrong on a machine with several networks.

    It knows this machine by the addresses of its name. Only where that is not enough
    it is told: told, it would not join another agent of the same machine.
    """
    options = {}
    address = q.network.own_address(host)
    is_known = address in q.network.addresses_of(q.hostname)
    typed = q.options.get("rdzv_conf")
    if address is not None and not is_known and not rdzvconf.uses_file(typed):
        conf = rdzvconf.filled(typed, is_host=1)
        options["rdzv_conf"] = Value(rdzvconf.join(conf), "owner of the address")
    if own is not None and "local_addr" not in q.options:
        options["local_addr"] = Value(str(own), "this node's address")
    return options


def _check_resolves(q: Inputs, host: str, typed: Value | None) -> None:
    if not q.network.resolve(host):
        raise LaunchError(
            "HPC067",
            f"{typed} does not resolve here. Type a name or an address that does: "
            "HOST:PORT",
        )


def _interactive_note(q: Inputs) -> tuple[Message, ...]:
    if q.job is None or q.job.start is not Start.INTERACTIVE_STEP:
        return ()
    total = q.job.allocated_nodes
    if total == 1 or one_node_is_typed(q.options):
        return ()
    line = q.job.line(q.command, nodes=total)
    text = f"this is 1 of {total} nodes of the job; for all of them: {line}"
    return (Message("HPC073", text),)


# --- several nodes ----------------------------------------------------------------


def _many_nodes(q: Inputs, job: Job) -> LaunchPlan:
    rank, index = job.node_rank, job.index
    if rank is None or index is None:
        raise outside()
    elastic = node_range(q.options)[1] > len(job.nodes)
    endpoint = endpoints.endpoint_of(q, job)
    if q.is_static:
        endpoints.check_first_is_known(job, endpoint, "--master_addr=")
        _check_static(q, job, rank, endpoint)
    here = endpoints.view(q, job, index, endpoint)
    if elastic and len(job.nodes) == 1 and endpoint.node is None:
        # Somebody else's, unless it is an address of this node.
        here = replace(here, is_host=q.network.own_address(here.host) is not None)
    meets_here = q.is_static or q.is_c10d
    if meets_here and not here.reach:
        raise unreachable(q, job, endpoint, here)
    if q.is_static and here.is_host != (rank == 0):
        raise LaunchError(
            "HPC069",
            f"{endpoint.typed} is not an address of node 0{_first_name(job)}, which "
            "hosts the static rendezvous. Leave the option out, or type "
            "--rdzv_backend=c10d",
        )
    conf = rdzvconf.filled(
        q.options.get("rdzv_conf"),
        is_host=int(here.is_host),
        read_timeout=READ_TIMEOUT,
        join_timeout=JOIN_TIMEOUT,
    )
    is_host = here.is_host
    if q.is_c10d:
        is_host = conf["is_host"].lower() in rdzvconf.TRUE
    is_head = meets_here and is_host
    # A host that is known by another name elsewhere must take what comes.
    address = q.network.own_address(here.reach) if not here.fell_back else None
    derived = _job_options(q, job, here)
    options = {k: v for k, v in derived.items() if k not in q.options}
    # Everything but static ignores it, and torch would warn that it does.
    node_rank = rank if q.is_static else 0
    source = job.sources.get("node_rank", job.sources["nodes"])
    options["node_rank"] = Value(node_rank, source)
    if meets_here:
        reach = endpoints.join_endpoint(here.reach, here.port)
        source = endpoint_source(q, job, endpoint, here)
        options["rdzv_endpoint"] = Value(reach, source)
    if q.is_c10d:
        typed_conf = q.options.get("rdzv_conf")
        source = f"{typed_conf.source} and defaults" if typed_conf else "defaults"
        options["rdzv_conf"] = Value(rdzvconf.join(conf), source)
    environment = resources.worker_threads(q) | variables.network(q, here.own)
    return LaunchPlan(
        title=title_of(q, len(job.nodes)),
        nodes=len(job.nodes),
        fewest=node_range(q.options)[0] if "nnodes" in q.options else 0,
        node_rank=rank,
        workers=q.workers,
        speaks=rank == 0,
        endpoint=str(here) if meets_here else q.typed("rdzv_endpoint") or "",
        identity=job.identity,
        backend=SCHEDULER if _is_numbered(q) else q.backend,
        reach=here.reach,
        ports=_ports(q, job, here),
        head=endpoint.node if job.is_ranked else None,
        is_head=is_head,
        hosts=hosts_of(job),
        site=site_of(q),
        interface=variables.interface_name(q.environ, environment),
        ordered=not q.is_static,
        elastic=elastic,
        may_join=elastic and _may_join(q),
        address=None if here.own is None else str(here.own),
        listen=(str(address), here.port) if is_head and address else None,
        options=options,
        environment=environment,
        notes=_notes(q, endpoint, here) + _interactive_note(q),
        advice=resources.advice(q, len(job.nodes)),
        suspicion=_suspicion(q),
        warnings=warnings_of(q, job, rank, here),
        fail_together=job.launcher.fail_together,
    )


def hosts_of(job: Job) -> tuple[str, ...]:
    """Return the names of the nodes by rank, empty where it is not known."""
    names = enumerate(job.nodes if job.is_ranked else ("",) * len(job.nodes))
    return tuple(
        name or (job.own_name if rank == job.node_rank else "") for rank, name in names
    )


def _first_name(job: Job) -> str:
    first = hosts_of(job)[0]
    return f", {first}" if first else ""


def _job_options(q: Inputs, job: Job, here: endpoints.View) -> dict[str, Value]:
    """Return what a user would type for this job, whatever the rendezvous."""
    return {
        "nnodes": Value(str(len(job.nodes)), job.sources["nodes"]),
        "rdzv_id": Value(job.identity, job.sources["identity"]),
        "rdzv_backend": Value(STATIC if q.is_static else C10D, "default"),
        # Where no address is known, a name: torch's own choice need not resolve.
        "local_addr": Value(str(here.own or here.name), "this node's address"),
    }


def _is_numbered(q: Inputs) -> bool:
    """Say whether the scheduler's numbers are all that is needed to meet.

    Torch's own c10d stays where nodes may come and go.
    """
    low, high = node_range(q.options)
    return q.is_c10d and low == high and q.typed("hpc_rendezvous") != C10D


def _check_rendezvous(q: Inputs) -> None:
    typed = q.options.get("hpc_rendezvous")
    if typed is None:
        return
    kinds = ("auto", SCHEDULER, C10D)
    if typed.value not in kinds:
        raise LaunchError(
            "HPC110", f"{typed}: {choices(str(typed.value), kinds)}", everywhere=True
        )
    if typed.value == SCHEDULER and q.job is not None and not _is_numbered(q):
        names = (
            *("rdzv_backend", "nnodes", "rdzv_conf"),
            *("node_rank", "master_addr", "master_port"),
        )
        others = [str(q.options[name]) for name in names if name in q.options]
        raise LaunchError(
            "HPC126",
            f"{typed}, but it is for a fixed number of nodes, and stands in for "
            f"--rdzv_backend=c10d only: not with {', '.join(others)}. Leave one of "
            "them out",
            everywhere=True,
        )


def _ports(q: Inputs, job: Job, here: endpoints.View) -> tuple[int, ...]:
    """Return the ports that the head tries: ours tries others if none was typed."""
    derived = endpoints.ports_of(job.identity)
    tries_all = _is_numbered(q) and here.port == derived[0]
    return derived if tries_all else (here.port,)


def site_of(q: Inputs) -> Value | None:
    """Return the name of the site, and why it is that."""
    if q.site is None:
        return None
    return Value(q.site.name, f"{q.site.found_by} ({q.site.file})")


def endpoint_source(
    q: Inputs, job: Job, endpoint: endpoints.Endpoint, here: endpoints.View
) -> str:
    """Say how host and port came about."""
    typed = endpoint.typed
    parts = [str(typed)]
    if typed is None:
        parts = [f"first of {job.sources['nodes']}"]
        if not job.nodes[0]:
            one = len(job.nodes) == 1
            parts = ["this node" if one else f"by {job.sources['head']}"]
    if here.host != endpoint.plain and q.site:
        parts.append(f"{here.host} by site {q.site.name}")
    if here.reach != here.host:
        parts.append("its address")
    if endpoint.port == endpoints.port_of(job.identity):
        parts.append(f"port by hash of {job.identity}")
    return ", ".join(parts)


def _check_nnodes(q: Inputs, job: Job, low: int, high: int) -> None:
    typed = q.options.get("nnodes")
    nodes = len(job.nodes)
    if typed is None or low <= nodes <= high:
        return
    wanted = min(high, job.allocated_nodes)
    fix = f"start it on {str(typed.value).replace(':', ' to ')} nodes"
    if wanted >= low and job.launcher.takes_number:
        fix = f"type: {job.line(q.command, nodes=wanted)}"
    raise LaunchError(
        "HPC070",
        f"{typed}, but this was started on {count(nodes, 'node')} "
        f"({job.sources['nodes']}). Leave the option out, or {fix}",
        everywhere=True,
    )


def _check_static(q: Inputs, job: Job, rank: int, endpoint: endpoints.Endpoint) -> None:
    high = node_range(q.options)[1]
    if high > len(job.nodes):
        raise LaunchError(
            "HPC157",
            f"{q.options['nnodes']}, but the static rendezvous waits for "
            f"{count(high, 'node')}, and this was started on "
            f"{count(len(job.nodes), 'node')} ({job.sources['nodes']}). Leave the "
            "option out, or type --rdzv_backend=c10d, which nodes may join",
            everywhere=True,
        )
    typed = q.options.get("node_rank")
    if typed is not None and typed.value != rank:
        raise LaunchError(
            "HPC071",
            f"{typed}, but this is node {rank} of the step "
            f"({job.sources['node_rank']}), and the static rendezvous would wait for "
            "ever. Was it $SLURM_NODEID, expanded in the batch script, where it is 0? "
            "Leave the option out",
        )
    if job.is_ranked and endpoint.node not in (None, 0):
        raise LaunchError(
            "HPC072",
            f"{endpoint.typed} is node {endpoint.node} of the step, but the static "
            f"rendezvous is hosted by node 0, {job.nodes[0]}. Leave the option out, or "
            "type --rdzv_backend=c10d",
            everywhere=True,
        )


def unreachable(
    q: Inputs, job: Job, endpoint: endpoints.Endpoint, here: endpoints.View
) -> LaunchError:
    """Return why this node cannot reach the head."""
    known = ", ".join(str(address) for address in q.network.resolve(here.host))
    fault = f"means only {known} here" if known else "does not resolve here"
    fix = f"--rdzv_endpoint=HOST:{here.port}"
    if job.has_several_tasks:
        fix = f"export {endpoints.MASTER_ADDR}=HOST"
    return LaunchError(
        "HPC059",
        f"the head node's name {here.host} ({endpoint.typed or job.sources['nodes']}) "
        f"{fault}. Type a name or an address that every node can reach: {fix}",
        # A typed name is wrong for all; a derived one perhaps for this node only. An
        # agent would find out which; a task that is a worker cannot.
        everywhere=endpoint.typed is not None and not job.has_several_tasks,
    )


def _notes(
    q: Inputs, endpoint: endpoints.Endpoint, here: endpoints.View
) -> tuple[Message, ...]:
    notes = []
    if endpoint.typed and endpoint.plain != here.host and q.site:
        text = f"{endpoint.plain} rewritten to {here.host} (site {q.site.name})"
        notes.append(Message("HPC074", text))
    if not q.is_static and "node_rank" in q.options:
        text = (
            f"{q.options['node_rank']} is ignored, nodes are ranked as the scheduler "
            "numbers them"
        )
        notes.append(Message("HPC075", text))
    return tuple(notes)


def _suspicion(q: Inputs) -> str:
    """Say what is probably wrong if the nodes do not meet."""
    if q.is_static and "node_rank" in q.options:
        return f"is it {q.options['node_rank']} on every node?"
    return ""


def warnings_of(
    q: Inputs, job: Job, rank: int, here: endpoints.View
) -> tuple[Message, ...]:
    """Return what is wrong on this node, and was worked around."""
    warnings = [*here.warnings, *variables.warnings(q)]
    if here.own is None:
        text = (
            f"no address of {hosts_of(job)[rank]} is known that other nodes could "
            f"reach: no interface is derived for {variables.GLOO} and "
            f"{variables.NCCL}, and torch listens on all interfaces"
        )
        warnings.append(Message("HPC057", text))
    elif (interface := q.network.owner(here.own)) and not interface.up:
        text = (
            f"interface {interface.name}, which has {here.own}, is down: no other node "
            "can reach this one by it. Report it, and leave this node out until then"
        )
        warnings.append(Message("HPC165", text))
    elif "local_addr" not in q.options and is_foreign(q, here.name):
        known = ", ".join(map(str, q.network.addresses_of(here.name)))
        text = (
            f"{here.name} is {known}, which no interface of this node has. Others are "
            f"told {here.own}; if they cannot reach that, this is a container with a "
            "network of its own: let it use the host's"
        )
        warnings.append(Message("HPC136", text))
    return tuple(warnings)


def is_foreign(q: Inputs, host: str) -> bool:
    """Say whether a name of this node has addresses, but none of its interfaces'."""
    known = q.network.addresses_of(host)
    return bool(known) and not any(map(q.network.owner, known))


# --- text -------------------------------------------------------------------------


def title_of(q: Inputs, nodes: int) -> str:
    """Say what was started by whom, for the start line."""
    if q.job is None or q.job.scheduler == NO_SCHEDULER:
        return NO_SCHEDULER
    title = f"{q.job.scheduler} {q.job.identity}"
    if q.job.start is Start.STEP and nodes < q.job.allocated_nodes:
        title += f" ({nodes} of {count(q.job.allocated_nodes, 'node')})"
    return title
