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

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.errors import LaunchError, Message, choices, count
from torchrun_hpc.network import join_endpoint
from torchrun_hpc.planning import endpoints, network_env, resources
from torchrun_hpc.planning.inputs import C10D, SCHEDULER, STATIC, Inputs
from torchrun_hpc.schedulers.job import Job, LaunchContext
from torchrun_hpc.setting import Setting

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
        is_reporter: Whether this process reports what is the same on all nodes.
        ordered: Whether nodes are to be ranked by ``node_rank``.
        elastic: Whether agents may join that this launch does not start.
        may_join: Whether the port of a rendezvous that is to be hosted here may be
            taken by another agent of this machine, which is then the host.
        launch_id: Names this launch and no other; empty without a scheduler.
        backend: Kind of the rendezvous: ``scheduler`` is ours, the others are torch's.
        endpoint: Where the nodes meet, for a person.
        connect_host: Address or name to connect to; empty if torch is to find out.
        ports: Where the head may be, in the order in which it tries them.
        head: Rank of the node that hosts the rendezvous; ``None`` if only that node
            knows.
        is_coordinator: Whether that is this one.
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
    is_reporter: bool
    endpoint: str
    shape: str = ""
    fewest: int = 0
    launch_id: str = ""
    backend: str = C10D
    connect_host: str = ""
    ports: tuple[int, ...] = ()
    head: int | None = None
    is_coordinator: bool = False
    hosts: tuple[str, ...] = ()
    site: Setting | None = None
    interface: str = ""
    ordered: bool = False
    elastic: bool = False
    may_join: bool = False
    address: str | None = None
    listen: tuple[str, int] | None = None
    options: Mapping[str, Setting] = field(default_factory=dict)
    environment: Mapping[str, Setting] = field(default_factory=dict)
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


def make_plan(inputs: Inputs) -> LaunchPlan:
    """Decide everything that can be decided before the nodes have met.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    made = _make_plan(inputs)
    rdzv_conf.check(inputs.options.get("rdzv_conf"), made.backend)
    if made.backend == C10D:
        environment = {**made.environment, **network_env.of_release(inputs)}
        made = replace(made, environment=environment)
    if not inputs.explicit("hpc_debug"):
        return made
    options = {**made.options}
    if not {"tee", "redirects"}.intersection(inputs.options):
        # The workers' stderr, with the rank on each line.
        options["tee"] = Setting("2", "--hpc-debug")
    environment = {**made.environment, **network_env.debugging(inputs.environ)}
    return replace(made, options=options, environment=environment)


def _make_plan(inputs: Inputs) -> LaunchPlan:
    network_env.check_gloo(inputs.environ, inputs.network)
    _check_rendezvous(inputs)
    low, high = node_range(inputs.options)
    if asks_for_one_node(inputs.options):
        return _one_node(inputs)
    if inputs.job is None:
        return _one_node(inputs) if high == 1 else _as_explicit(inputs, high)
    problem = refusal(inputs.job, inputs.command)
    if problem is not None:
        raise problem
    if inputs.job.has_several_tasks:
        raise several_tasks(
            inputs.job, inputs.command, inputs.options.get("nproc_per_node")
        )
    if len(inputs.job.nodes) == high == 1:
        return _one_node(inputs)
    _check_nnodes(inputs, inputs.job, low, high)
    where = {"rdzv_endpoint", "master_addr", "master_port"}
    if not where.intersection(inputs.options):  # it would have the same ports
        problem = nested(inputs.environ, inputs.job.launch_id)
    if problem is not None:
        raise problem
    return _many_nodes(inputs, inputs.job)


def meeting_place(inputs: Inputs) -> LaunchPlan | None:
    """Return a plan that is right about where the nodes meet, and nothing else.

    Returns:
        It; ``None`` if they are not several nodes with an agent on each.

    Raises:
        LaunchError: That cannot be known.
    """
    if (
        inputs.job is None
        or inputs.job.has_several_tasks
        or len(inputs.job.nodes) == 1
        or asks_for_one_node(inputs.options)
    ):
        return None
    return _many_nodes(inputs, inputs.job)


def refusal(job: Job, command: str) -> LaunchError | None:
    """Return why a job cannot be launched from here, unless for one node only.

    Args:
        job: What the scheduler says.
        command: The command as typed, for the srun line in the message.
    """
    line = job.line(command)
    nodes = count(len(job.nodes), "node")
    if job.start is LaunchContext.ALLOCATION_SHELL:
        more = ",…" if len(job.nodes) > _SHOWN else ""
        return LaunchError(
            "HPC060",
            f"this shell is not on the job's {nodes} "
            f"({','.join(job.nodes[:_SHOWN])}{more} by {job.provenance['nodes']}). "
            f"Type: {line}",
            everywhere=True,
        )
    if job.start is LaunchContext.BATCH_SCRIPT and len(job.nodes) > 1:
        return LaunchError(
            "HPC061",
            f"started in the batch script of a job of {nodes} "
            f"({job.provenance['nodes']}): that runs on the first node only, and would "
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


def several_tasks(job: Job, command: str, explicit: Setting | None) -> LaunchError:
    """Return why several tasks on a node cannot start workers of their own.

    Args:
        job: What the launcher says.
        command: The command as typed, for the message.
        explicit: The number of workers that was typed, if it was.
    """
    wanted = f"{explicit}" if explicit else "an agent"
    tasks = count(job.task.size, "task")
    return LaunchError(
        "HPC062",
        f"{job.launcher.name} started {tasks} on {count(len(job.nodes), 'node')} "
        f"({job.provenance['tasks']}), and {wanted} on each would start more workers. "
        f"Start it once on each node: {job.line(command)}   (or let each task be a "
        "worker: leave --nproc_per_node out; or --standalone for one world per task)",
        everywhere=True,
    )


def asks_for_one_node(options: Mapping[str, Setting]) -> bool:
    """Say whether the user asked for a world of one node, whatever the scheduler."""
    standalone = options.get("standalone")
    if standalone is not None and standalone.value:
        return True
    return "nnodes" in options and node_range(options) == (1, 1)


def node_range(options: Mapping[str, Setting]) -> tuple[int, int]:
    """Return the lowest and highest number of nodes that were typed; 1 by default.

    Raises:
        LaunchError: ``--nnodes`` is neither a number nor a range.
    """
    explicit = options.get("nnodes")
    if explicit is None:
        return 1, 1
    # Spaces and a plus sign: torch's int() takes them too.
    number = r"\s*\+?([0-9]{1,9})\s*"
    match = re.fullmatch(f"{number}(?::{number})?", str(explicit.value))
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if not 0 < low <= high:
        raise LaunchError(
            "HPC063",
            f"{explicit} is not a number of nodes: type a number (4), or a range with "
            "the lower number first (2:4)",
            everywhere=True,
        )
    return low, high


# --- one node, or nothing to derive from ------------------------------------------


def _one_node(inputs: Inputs) -> LaunchPlan:
    """Plan a world of one node: torchrun --standalone, whatever the scheduler."""
    rule = "one node"
    standalone = inputs.explicit("standalone")
    advice = resources.advice(inputs, 1)
    options: dict[str, Setting] = {}
    if inputs.explicit("node_rank") and (standalone or not _has_static_store(inputs)):
        text = (
            f"{inputs.options['node_rank']} is ignored, a world of one node has only node "
            "0. For several nodes type --nnodes"
        )
        advice = (Message("HPC151", text), *advice)
        options["node_rank"] = Setting(0, rule)
    elif inputs.explicit("node_rank"):
        raise LaunchError(
            "HPC064",
            f"{inputs.options['node_rank']}, but a world of one node has only node 0. Leave "
            "the option out",
        )
    if standalone and node_range(inputs.options)[0] > 1:
        raise LaunchError(
            "HPC065",
            f"{inputs.options['nnodes']} and --standalone, which is one node: leave one of "
            "them out",
            everywhere=True,
        )
    told = {"rdzv_endpoint", "master_addr", "master_port"}.intersection(inputs.options)
    listen = _one_node_listens(inputs) if told and not standalone else (LOOPBACK, 0)
    if standalone and "rdzv_backend" in inputs.options:  # whatever it is
        options["rdzv_backend"] = Setting(C10D, "--standalone")
        options["rdzv_endpoint"] = Setting("localhost:0", "--standalone")
    if not standalone and not inputs.is_static:
        options |= _one_node_rendezvous(inputs, is_host=bool(told and listen))
    # torch would publish getfqdn(), which need not resolve: pytorch#174513.
    address = LOOPBACK
    if "local_addr" in inputs.options:
        address = str(endpoints.explicit_local_address(inputs))
    else:
        options["local_addr"] = Setting(LOOPBACK, rule)
    if inputs.explicit("nnodes") is None or node_range(inputs.options)[1] > 1:
        options["nnodes"] = Setting("1", rule)  # nobody can join what is standalone
    return LaunchPlan(
        title=title_of(inputs, 1),
        nodes=1,
        node_rank=0,
        workers=inputs.workers,
        is_reporter=inputs.job is None or inputs.job.task.rank == 0,
        endpoint=inputs.explicit("rdzv_endpoint") or "localhost",
        backend=C10D if standalone else inputs.backend,
        hosts=_this_host(inputs.job),
        address=address,
        listen=listen,
        options=options,
        environment=resources.worker_threads(inputs),
        notes=(
            *_range_note(inputs),
            *_interactive_note(inputs),
            *_unused(inputs, "a world of one node"),
        ),
        advice=advice,
    )


def _range_note(inputs: Inputs) -> tuple[Message, ...]:
    if node_range(inputs.options)[1] == 1:
        return ()
    text = f"{inputs.options['nnodes']} is 1: nobody can join with --standalone"
    return (Message("HPC155", text),)


def _has_static_store(inputs: Inputs) -> bool:
    """Say whether torchrun takes its static rendezvous for one node, too."""
    return inputs.explicit("rdzv_backend") == STATIC or (
        inputs.is_static and "master_port" in inputs.options
    )


def names_folder(run_id: str) -> bool:
    """Say whether torch can name its folder for logs by an id."""
    return "/" not in run_id and len(os.fsencode(run_id)) <= LONGEST_ID


def unused(inputs: Inputs, where: str, names: Sequence[str]) -> tuple[Message, ...]:
    """Name the options of ours that have no effect."""
    useless = [str(inputs.options[name]) for name in names if name in inputs.options]
    return tuple(
        Message("HPC077", f"{option} has no effect on {where}") for option in useless
    )


def _unused(inputs: Inputs, where: str) -> tuple[Message, ...]:
    """Name the options that only nodes of a job can follow."""
    site = ("hpc_site",) if inputs.site is not None else ()
    ours = ("hpc_rendezvous",) if inputs.explicit("hpc_rendezvous") == SCHEDULER else ()
    return unused(inputs, where, site + ours)


def _this_host(job: Job | None) -> tuple[str, ...]:
    if job is None or job.node_rank is None:
        return ()
    return (job.own_name,)


def _one_node_rendezvous(inputs: Inputs, *, is_host: bool) -> dict[str, Setting]:
    """Return the options of c10d on one node that were not typed."""
    rule = "one node"
    if inputs.job is None and not {"rdzv_backend", "rdzv_endpoint", "rdzv_id"} & set(
        inputs.options
    ):
        return {"standalone": Setting(value=True, source=rule)}
    options = {"rdzv_backend": Setting(C10D, rule)}
    if inputs.is_c10d:
        options["rdzv_endpoint"] = Setting("localhost:0", rule)
    if inputs.job is not None:
        options["rdzv_id"] = Setting(
            inputs.job.launch_id, inputs.job.provenance["launch_id"]
        )
    options = {k: v for k, v in options.items() if k not in inputs.options}
    if not names_folder(str(inputs.explicit("rdzv_id") or "")):
        options["rdzv_id"] = Setting("none", rule)  # torchrun takes one of its own
    if inputs.is_c10d and is_host:
        # torch does not know the node by the name of a second interface.
        conf = rdzv_conf.filled(inputs.options.get("rdzv_conf"), is_host=1)
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), rule)
    return options


def _one_node_listens(inputs: Inputs) -> tuple[str, int] | None:
    """Return where a node listens that was told an endpoint, if it is its own."""
    port = STATIC_PORT if inputs.is_static else C10D_PORT
    host, port, explicit = endpoints.explicit_endpoint(inputs, LOOPBACK, port)
    if not inputs.is_static and not inputs.is_c10d:
        return None
    _check_resolves(inputs, host, explicit)
    conf = rdzv_conf.parse(inputs.options.get("rdzv_conf"))
    if inputs.is_c10d and conf.get("is_host", "1").lower() in rdzv_conf.FALSE:
        return None
    own = inputs.network.local_address(host)
    return None if own is None else (str(own), port)


def _as_explicit(inputs: Inputs, nodes: int) -> LaunchPlan:
    """Plan for several machines without a scheduler, on each of which it was typed.

    That is left to torchrun, but for two things: which machine hosts c10d is decided by
    the address of the endpoint, not by comparing names; and gloo and NCCL get the
    interface that has this machine's address for it.

    Raises:
        LaunchError: Nothing says where the nodes are to meet.
    """
    if not {"rdzv_endpoint", "master_addr"}.intersection(inputs.options):
        raise LaunchError(
            "HPC066",
            f"{inputs.options['nnodes']}, but no scheduler's variables are set and no head "
            "node was typed: every node would wait on its own. Start it with srun, or "
            "type on every node: --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT",
        )
    backend = inputs.explicit("rdzv_backend") or STATIC  # torchrun's own default
    port = C10D_PORT if backend == C10D else STATIC_PORT
    host, port, explicit = endpoints.explicit_endpoint(inputs, LOOPBACK, port)
    own, is_host, options = None, True, {}
    if explicit is not None:
        _check_resolves(inputs, host, explicit)
        own = endpoints.address_near(inputs, host)
        is_host = inputs.network.local_address(host) is not None
        if backend == C10D:
            options = _explicit_c10d(inputs, own, host)
    where = join_endpoint(host, port)
    listen = inputs.network.own_address(host) if "rdzv_conf" in options else None
    environment = network_env.network(replace(inputs, site=None), own)
    rank = inputs.explicit("node_rank") or 0
    return LaunchPlan(
        title=title_of(inputs, nodes),
        nodes=nodes,
        fewest=node_range(inputs.options)[0],
        node_rank=rank,
        workers=inputs.workers,
        is_reporter=rank == 0 if backend == STATIC else is_host,
        endpoint=where if explicit else inputs.explicit("rdzv_endpoint"),
        backend=backend,
        elastic=True,
        may_join=_may_join(inputs),
        address=None if own is None else str(own),
        listen=(str(listen), port) if listen else None,
        interface=network_env.interface_name(inputs.environ, environment),
        options=options,
        environment=resources.worker_threads(inputs) | environment,
        notes=_unused(inputs, "nodes that no scheduler has named"),
        advice=resources.advice(inputs, nodes),
        warnings=_foreign_master(backend, rank, explicit, is_host=is_host),
    )


def _may_join(inputs: Inputs) -> bool:
    """Say whether who has the port may be another agent, at an endpoint of theirs.

    As in torch's c10d, unless the user says who is the host.
    """
    conf = rdzv_conf.parse(inputs.options.get("rdzv_conf"))
    return (
        inputs.is_c10d and "rdzv_endpoint" in inputs.options and "is_host" not in conf
    )


def _foreign_master(
    backend: str, rank: int, explicit: Setting | None, *, is_host: bool
) -> tuple[Message, ...]:
    """Warn of a node 0 that is somewhere else."""
    if backend != STATIC or rank or is_host:
        return ()
    text = (
        f"{explicit} is no address of this machine, but this is node 0, which hosts the "
        "static rendezvous. Type on each of the other machines: --node_rank=1, 2, ..."
    )
    return (Message("HPC137", text),)


def _explicit_c10d(
    inputs: Inputs, own: Address | None, host: str
) -> dict[str, Setting]:
    """Return what torch gets wrong on a machine with several networks.

    It knows this machine by the addresses of its name. Only where that is not enough
    it is told: told, it would not join another agent of the same machine.
    """
    options = {}
    address = inputs.network.own_address(host)
    is_known = address in inputs.network.addresses_of(inputs.hostname)
    explicit = inputs.options.get("rdzv_conf")
    if address is not None and not is_known and not rdzv_conf.uses_file(explicit):
        conf = rdzv_conf.filled(explicit, is_host=1)
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), "owner of the address")
    if own is not None and "local_addr" not in inputs.options:
        options["local_addr"] = Setting(str(own), "this node's address")
    return options


def _check_resolves(inputs: Inputs, host: str, explicit: Setting | None) -> None:
    if not inputs.network.resolve(host):
        raise LaunchError(
            "HPC067",
            f"{explicit} does not resolve here. Type a name or an address that does: "
            "HOST:PORT",
        )


def _interactive_note(inputs: Inputs) -> tuple[Message, ...]:
    if inputs.job is None or inputs.job.start is not LaunchContext.INTERACTIVE_STEP:
        return ()
    total = inputs.job.allocated_nodes
    if total == 1 or asks_for_one_node(inputs.options):
        return ()
    line = inputs.job.line(inputs.command, nodes=total)
    text = f"this is 1 of {total} nodes of the job; for all of them: {line}"
    return (Message("HPC073", text),)


# --- several nodes ----------------------------------------------------------------


def _many_nodes(inputs: Inputs, job: Job) -> LaunchPlan:
    rank, index = job.node_rank, job.index
    if rank is None or index is None:
        raise outside()
    elastic = node_range(inputs.options)[1] > len(job.nodes)
    endpoint = endpoints.endpoint_of(inputs, job)
    if inputs.is_static:
        endpoints.check_first_is_known(job, endpoint, "--master_addr=")
        _check_static(inputs, job, rank, endpoint)
    here = endpoints.view(inputs, job, index, endpoint)
    if elastic and len(job.nodes) == 1 and endpoint.node is None:
        # Somebody else's, unless it is an address of this node.
        here = replace(here, is_host=inputs.network.own_address(here.host) is not None)
    meets_here = inputs.is_static or inputs.is_c10d
    if meets_here and not here.connect_host:
        raise unreachable(inputs, job, endpoint, here)
    if inputs.is_static and here.is_host != (rank == 0):
        raise LaunchError(
            "HPC069",
            f"{endpoint.explicit} is not an address of node 0{_first_name(job)}, which "
            "hosts the static rendezvous. Leave the option out, or type "
            "--rdzv_backend=c10d",
        )
    conf = rdzv_conf.filled(
        inputs.options.get("rdzv_conf"),
        is_host=int(here.is_host),
        read_timeout=READ_TIMEOUT,
        join_timeout=JOIN_TIMEOUT,
    )
    is_host = here.is_host
    if inputs.is_c10d:
        is_host = conf["is_host"].lower() in rdzv_conf.TRUE
    is_coordinator = meets_here and is_host
    # A host that is known by another name elsewhere must take what comes.
    address = (
        inputs.network.own_address(here.connect_host)
        if not here.used_plain_name
        else None
    )
    derived = _job_options(inputs, job, here)
    options = {k: v for k, v in derived.items() if k not in inputs.options}
    # Everything but static ignores it, and torch would warn that it does.
    node_rank = rank if inputs.is_static else 0
    source = job.provenance.get("node_rank", job.provenance["nodes"])
    options["node_rank"] = Setting(node_rank, source)
    if meets_here:
        connect_host = join_endpoint(here.connect_host, here.port)
        source = endpoint_source(inputs, job, endpoint, here)
        options["rdzv_endpoint"] = Setting(connect_host, source)
    if inputs.is_c10d:
        explicit_conf = inputs.options.get("rdzv_conf")
        source = f"{explicit_conf.source} and defaults" if explicit_conf else "defaults"
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), source)
    environment = resources.worker_threads(inputs) | network_env.network(
        inputs, here.own
    )
    return LaunchPlan(
        title=title_of(inputs, len(job.nodes)),
        nodes=len(job.nodes),
        fewest=node_range(inputs.options)[0] if "nnodes" in inputs.options else 0,
        node_rank=rank,
        workers=inputs.workers,
        is_reporter=rank == 0,
        endpoint=str(here) if meets_here else inputs.explicit("rdzv_endpoint") or "",
        launch_id=job.launch_id,
        backend=SCHEDULER if _is_numbered(inputs) else inputs.backend,
        connect_host=here.connect_host,
        ports=_ports(inputs, job, here),
        head=endpoint.node if job.is_ranked else None,
        is_coordinator=is_coordinator,
        hosts=hosts_of(job),
        site=site_of(inputs),
        interface=network_env.interface_name(inputs.environ, environment),
        ordered=not inputs.is_static,
        elastic=elastic,
        may_join=elastic and _may_join(inputs),
        address=None if here.own is None else str(here.own),
        listen=(str(address), here.port) if is_coordinator and address else None,
        options=options,
        environment=environment,
        notes=_notes(inputs, endpoint, here) + _interactive_note(inputs),
        advice=resources.advice(inputs, len(job.nodes)),
        suspicion=_suspicion(inputs),
        warnings=warnings_of(inputs, job, rank, here),
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


def _job_options(
    inputs: Inputs, job: Job, here: endpoints.LocalEndpoint
) -> dict[str, Setting]:
    """Return what a user would type for this job, whatever the rendezvous."""
    return {
        "nnodes": Setting(str(len(job.nodes)), job.provenance["nodes"]),
        "rdzv_id": Setting(job.launch_id, job.provenance["launch_id"]),
        "rdzv_backend": Setting(STATIC if inputs.is_static else C10D, "default"),
        # Where no address is known, a name: torch's own choice need not resolve.
        "local_addr": Setting(str(here.own or here.name), "this node's address"),
    }


def _is_numbered(inputs: Inputs) -> bool:
    """Say whether the scheduler's numbers are all that is needed to meet.

    Torch's own c10d stays where nodes may come and go.
    """
    low, high = node_range(inputs.options)
    return inputs.is_c10d and low == high and inputs.explicit("hpc_rendezvous") != C10D


def _check_rendezvous(inputs: Inputs) -> None:
    explicit = inputs.options.get("hpc_rendezvous")
    if explicit is None:
        return
    kinds = ("auto", SCHEDULER, C10D)
    if explicit.value not in kinds:
        raise LaunchError(
            "HPC110",
            f"{explicit}: {choices(str(explicit.value), kinds)}",
            everywhere=True,
        )
    if (
        explicit.value == SCHEDULER
        and inputs.job is not None
        and not _is_numbered(inputs)
    ):
        names = (
            *("rdzv_backend", "nnodes", "rdzv_conf"),
            *("node_rank", "master_addr", "master_port"),
        )
        others = [str(inputs.options[name]) for name in names if name in inputs.options]
        raise LaunchError(
            "HPC126",
            f"{explicit}, but it is for a fixed number of nodes, and stands in for "
            f"--rdzv_backend=c10d only: not with {', '.join(others)}. Leave one of "
            "them out",
            everywhere=True,
        )


def _ports(inputs: Inputs, job: Job, here: endpoints.LocalEndpoint) -> tuple[int, ...]:
    """Return the ports that the head tries: ours tries others if none was typed."""
    derived = endpoints.ports_of(job.launch_id)
    tries_all = _is_numbered(inputs) and here.port == derived[0]
    return derived if tries_all else (here.port,)


def site_of(inputs: Inputs) -> Setting | None:
    """Return the name of the site, and why it is that."""
    if inputs.site is None:
        return None
    return Setting(inputs.site.name, f"{inputs.site.found_by} ({inputs.site.file})")


def endpoint_source(
    inputs: Inputs,
    job: Job,
    endpoint: endpoints.Endpoint,
    here: endpoints.LocalEndpoint,
) -> str:
    """Say how host and port came about."""
    explicit = endpoint.explicit
    parts = [str(explicit)]
    if explicit is None:
        parts = [f"first of {job.provenance['nodes']}"]
        if not job.nodes[0]:
            one = len(job.nodes) == 1
            parts = ["this node" if one else f"by {job.provenance['head']}"]
    if here.host != endpoint.plain and inputs.site:
        parts.append(f"{here.host} by site {inputs.site.name}")
    if here.connect_host != here.host:
        parts.append("its address")
    if endpoint.port == endpoints.port_of(job.launch_id):
        parts.append(f"port by hash of {job.launch_id}")
    return ", ".join(parts)


def _check_nnodes(inputs: Inputs, job: Job, low: int, high: int) -> None:
    explicit = inputs.options.get("nnodes")
    nodes = len(job.nodes)
    if explicit is None or low <= nodes <= high:
        return
    wanted = min(high, job.allocated_nodes)
    fix = f"start it on {str(explicit.value).replace(':', ' to ')} nodes"
    if wanted >= low and job.launcher.takes_number:
        fix = f"type: {job.line(inputs.command, nodes=wanted)}"
    raise LaunchError(
        "HPC070",
        f"{explicit}, but this was started on {count(nodes, 'node')} "
        f"({job.provenance['nodes']}). Leave the option out, or {fix}",
        everywhere=True,
    )


def _check_static(
    inputs: Inputs, job: Job, rank: int, endpoint: endpoints.Endpoint
) -> None:
    high = node_range(inputs.options)[1]
    if high > len(job.nodes):
        raise LaunchError(
            "HPC157",
            f"{inputs.options['nnodes']}, but the static rendezvous waits for "
            f"{count(high, 'node')}, and this was started on "
            f"{count(len(job.nodes), 'node')} ({job.provenance['nodes']}). Leave the "
            "option out, or type --rdzv_backend=c10d, which nodes may join",
            everywhere=True,
        )
    explicit = inputs.options.get("node_rank")
    if explicit is not None and explicit.value != rank:
        raise LaunchError(
            "HPC071",
            f"{explicit}, but this is node {rank} of the step "
            f"({job.provenance['node_rank']}), and the static rendezvous would wait for "
            "ever. Was it $SLURM_NODEID, expanded in the batch script, where it is 0? "
            "Leave the option out",
        )
    if job.is_ranked and endpoint.node not in (None, 0):
        raise LaunchError(
            "HPC072",
            f"{endpoint.explicit} is node {endpoint.node} of the step, but the static "
            f"rendezvous is hosted by node 0, {job.nodes[0]}. Leave the option out, or "
            "type --rdzv_backend=c10d",
            everywhere=True,
        )


def unreachable(
    inputs: Inputs,
    job: Job,
    endpoint: endpoints.Endpoint,
    here: endpoints.LocalEndpoint,
) -> LaunchError:
    """Return why this node cannot reach the head."""
    known = ", ".join(str(address) for address in inputs.network.resolve(here.host))
    fault = f"means only {known} here" if known else "does not resolve here"
    fix = f"--rdzv_endpoint=HOST:{here.port}"
    if job.has_several_tasks:
        fix = f"export {endpoints.MASTER_ADDR}=HOST"
    return LaunchError(
        "HPC059",
        f"the head node's name {here.host} ({endpoint.explicit or job.provenance['nodes']}) "
        f"{fault}. Type a name or an address that every node can reach: {fix}",
        # A typed name is wrong for all; a derived one perhaps for this node only. An
        # agent would find out which; a task that is a worker cannot.
        everywhere=endpoint.explicit is not None and not job.has_several_tasks,
    )


def _notes(
    inputs: Inputs, endpoint: endpoints.Endpoint, here: endpoints.LocalEndpoint
) -> tuple[Message, ...]:
    notes = []
    if endpoint.explicit and endpoint.plain != here.host and inputs.site:
        text = f"{endpoint.plain} rewritten to {here.host} (site {inputs.site.name})"
        notes.append(Message("HPC074", text))
    if not inputs.is_static and "node_rank" in inputs.options:
        text = (
            f"{inputs.options['node_rank']} is ignored, nodes are ranked as the scheduler "
            "numbers them"
        )
        notes.append(Message("HPC075", text))
    return tuple(notes)


def _suspicion(inputs: Inputs) -> str:
    """Say what is probably wrong if the nodes do not meet."""
    if inputs.is_static and "node_rank" in inputs.options:
        return f"is it {inputs.options['node_rank']} on every node?"
    return ""


def warnings_of(
    inputs: Inputs, job: Job, rank: int, here: endpoints.LocalEndpoint
) -> tuple[Message, ...]:
    """Return what is wrong on this node, and was worked around."""
    warnings = [*here.warnings, *network_env.warnings(inputs)]
    if here.own is None:
        text = (
            f"no address of {hosts_of(job)[rank]} is known that other nodes could "
            f"reach: no interface is derived for {network_env.GLOO} and "
            f"{network_env.NCCL}, and torch listens on all interfaces"
        )
        warnings.append(Message("HPC057", text))
    elif (interface := inputs.network.owner(here.own)) and not interface.up:
        text = (
            f"interface {interface.name}, which has {here.own}, is down: no other node "
            "can reach this one by it. Report it, and leave this node out until then"
        )
        warnings.append(Message("HPC165", text))
    elif "local_addr" not in inputs.options and is_foreign(inputs, here.name):
        known = ", ".join(map(str, inputs.network.addresses_of(here.name)))
        text = (
            f"{here.name} is {known}, which no interface of this node has. Others are "
            f"told {here.own}; if they cannot reach that, this is a container with a "
            "network of its own: let it use the host's"
        )
        warnings.append(Message("HPC136", text))
    return tuple(warnings)


def is_foreign(inputs: Inputs, host: str) -> bool:
    """Say whether a name of this node has addresses, but none of its interfaces'."""
    known = inputs.network.addresses_of(host)
    return bool(known) and not any(map(inputs.network.owner, known))


# --- text -------------------------------------------------------------------------


def title_of(inputs: Inputs, nodes: int) -> str:
    """Say what was started by whom, for the start line."""
    if inputs.job is None or inputs.job.scheduler == NO_SCHEDULER:
        return NO_SCHEDULER
    title = f"{inputs.job.scheduler} {inputs.job.launch_id}"
    if inputs.job.start is LaunchContext.STEP and nodes < inputs.job.allocated_nodes:
        title += f" ({nodes} of {count(inputs.job.allocated_nodes, 'node')})"
    return title
