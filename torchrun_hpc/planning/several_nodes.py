"""The plan of a step with an agent on each of several nodes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.commandline.options import WITHOUT_PATCHES
from torchrun_hpc.errors import LaunchError, Message, choices, count
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.planning import (
    endpoints,
    local_endpoint,
    messages,
    network_env,
    resources,
    spares,
)
from torchrun_hpc.planning.inputs import C10D, SCHEDULER, STATIC
from torchrun_hpc.planning.launch_plan import LaunchPlan, Messages, Rendezvous, World
from torchrun_hpc.planning.mode import node_range
from torchrun_hpc.schedulers.pbs import PBSDSH
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.planning.endpoints import Endpoint
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.local_endpoint import LocalEndpoint
    from torchrun_hpc.schedulers.job import Job

# Seconds. Torch's 60 and 600 are too short for a container that is pulled, or a
# Python that is imported from a busy file system, on hundreds of nodes.
READ_TIMEOUT = 600
JOIN_TIMEOUT = 900

# Options that the coordinator compares by themselves, or that may differ per node.
_NOT_IN_DIGEST = r" --(rdzv|hpc|node|local)[-_](id|spares|rank|addr)[= ]\S+"
_SHORT = 48  # characters of a command: its end has the script and its arguments


def checked_plan(inputs: Inputs) -> LaunchPlan:
    """Plan for the nodes of a step, if what was typed is right for them.

    Raises:
        LaunchError: It is not; or this is a worker of the same launch.
    """
    job = inputs.the_job
    is_possible = is_numbered(inputs) and not inputs.lacks("watch_workers")
    if spares.number(inputs) and not is_possible:
        raise spares.not_possible(inputs)
    _check_nnodes(inputs, job)
    where = {"rdzv_endpoint", "master_addr", "master_port"}
    if not where.intersection(inputs.options):  # it would have the same ports
        problem = messages.nested(inputs.environ, job.launch_id)
        if problem is not None:
            raise problem
    return plan(inputs)


def plan(inputs: Inputs) -> LaunchPlan:
    """Plan for the nodes of a step: where they meet is right in any case.

    Raises:
        LaunchError: Where they meet cannot be known.
    """
    job = inputs.the_job
    rank, index = job.node_rank, job.index
    if rank is None or index is None:
        raise messages.outside()
    endpoint = endpoints.endpoint_of(inputs, job)
    if inputs.is_static:
        endpoints.check_first_is_known(job, endpoint, "--master_addr=")
        _check_static(inputs, job, rank, endpoint)
    here = _local_endpoint(inputs, job, index, endpoint)
    conf = rdzv_conf.filled(
        inputs.options.get("rdzv_conf"),
        is_host=int(here.is_host),
        read_timeout=READ_TIMEOUT,
        join_timeout=JOIN_TIMEOUT,
    )
    own_env = network_env.network(inputs, here.local_address)
    environment = resources.worker_threads(inputs) | own_env
    hosts = endpoints.hosts_of(job)
    return LaunchPlan(
        mode=inputs.mode,
        launch_id=job.launch_id,
        started_by=job.started_by,
        started="" if job.names_instance else _started(inputs.command),
        world=World(
            nodes=len(job.nodes),
            node_rank=rank,
            workers=inputs.workers,
            report_rank=rank,
            hosts=hosts,
            fast_hosts=tuple(map(inputs.rewrite, hosts)),
            fewest=node_range(inputs.options)[0] if "nnodes" in inputs.options else 0,
            may_grow=_may_grow(inputs, job),
            spares=spares.number(inputs),
        ),
        rendezvous=_rendezvous(inputs, job, endpoint, here, conf),
        site=inputs.site_setting,
        interface=network_env.interface_name(inputs.environ, environment),
        options=_options(inputs, job, endpoint, here, conf),
        environment=environment,
        messages=Messages(
            title=messages.title(inputs, len(job.nodes)),
            notes=_notes(inputs, endpoint, here) + messages.interactive_note(inputs),
            advice=resources.advice(inputs, len(job.nodes)) + spares.advice(inputs),
            warnings=messages.warnings(inputs, here, hosts[rank]),
            hint=_hint(inputs, job),
            network_hint=endpoints.network_hint(
                job, inputs.network.owner(here.local_address)
            ),
        ),
    )


def _started(command: str) -> str:
    """Return the end of a command, and a digest of the whole command."""
    command = re.sub(_NOT_IN_DIGEST, "", command)
    digest = hashlib.sha256(command.encode(errors="replace")).hexdigest()
    return f"{command[-_SHORT:]} [{digest[:8]}]" if command else ""


def _may_grow(inputs: Inputs, job: Job) -> bool:
    return node_range(inputs.options)[1] > len(job.nodes)


def _local_endpoint(
    inputs: Inputs, job: Job, index: int, endpoint: Endpoint
) -> LocalEndpoint:
    """Look at the endpoint from this node, and check that the nodes can meet there."""
    here = local_endpoint.local_endpoint(inputs, job, index, endpoint)
    if _may_grow(inputs, job) and len(job.nodes) == 1 and endpoint.node is None:
        # Somebody else's, unless it is an address of this node.
        is_host = inputs.network.own_address(here.host) is not None
        here = replace(here, is_host=is_host)
    if (inputs.is_static or inputs.is_c10d) and not here.connect_host:
        raise local_endpoint.unreachable(inputs, job, endpoint, here)
    if inputs.is_static and here.is_host != (job.node_rank == 0):
        first = endpoints.hosts_of(job)[0]
        raise LaunchError(
            "HPC069",
            f"{endpoint.setting} is not an address of node 0"
            f"{', ' if first else ''}{first}, which hosts the static rendezvous. Leave "
            "the option out, or type --rdzv_backend=c10d",
        )
    return here


def _rendezvous(
    inputs: Inputs,
    job: Job,
    endpoint: Endpoint,
    here: LocalEndpoint,
    conf: Mapping[str, str],
) -> Rendezvous:
    meets_here = inputs.is_static or inputs.is_c10d
    is_host = here.is_host
    if inputs.is_c10d:
        is_host = conf["is_host"].lower() in rdzv_conf.TRUE
    is_coordinator = meets_here and is_host
    # A host that is known by another name elsewhere must take what comes.
    address = None
    if is_coordinator and not here.used_plain_name:
        address = inputs.network.own_address(here.connect_host)
    local_address = here.local_address
    return Rendezvous(
        backend=SCHEDULER if is_numbered(inputs) else inputs.backend,
        endpoint=str(here) if meets_here else inputs.explicit("rdzv_endpoint") or "",
        connect_host=here.connect_host,
        ports=_ports(inputs, job, here),
        notice_ports=endpoints.notice_ports(job.launch_id),
        coordinator=endpoint.node if job.is_ranked else None,
        is_coordinator=is_coordinator,
        local_address=None if local_address is None else str(local_address),
        listen=(str(address), here.port) if address else None,
        may_join=_may_grow(inputs, job) and endpoints.may_join(inputs),
    )


def _options(
    inputs: Inputs,
    job: Job,
    endpoint: Endpoint,
    here: LocalEndpoint,
    conf: Mapping[str, str],
) -> dict[str, Setting]:
    """Return what a user would type for this job."""
    derived = {
        "nnodes": _nnodes(inputs, job),
        "rdzv_id": Setting(job.launch_id, job.provenance["launch_id"]),
        "rdzv_backend": Setting(STATIC if inputs.is_static else C10D, "default"),
        # Where no address is known, a name: torch's own choice need not resolve.
        "local_addr": Setting(
            str(here.local_address or here.name), "this node's address"
        ),
    }
    options = {k: v for k, v in derived.items() if k not in inputs.options}
    # Everything but static ignores it, and torch would warn that it does.
    node_rank = job.node_rank if inputs.is_static else 0
    source = job.provenance.get("node_rank", job.provenance["nodes"])
    options["node_rank"] = Setting(node_rank, source)
    if inputs.is_static or inputs.is_c10d:
        where = join_endpoint(here.connect_host, here.port)
        source = local_endpoint.source_of(inputs, job, endpoint, here)
        options["rdzv_endpoint"] = Setting(where, source)
    if inputs.is_c10d:
        setting = inputs.options.get("rdzv_conf")
        source = f"{setting.source} and defaults" if setting else "defaults"
        options["rdzv_conf"] = Setting(rdzv_conf.join(conf), source)
    return options


def _nnodes(inputs: Inputs, job: Job) -> Setting:
    """Return the number of nodes that have workers."""
    wait, source = spares.number(inputs), job.provenance["nodes"]
    if wait:
        source = f"{source} - {inputs.options['hpc_spares']}"
    return Setting(str(len(job.nodes) - wait), source)


def _ports(inputs: Inputs, job: Job, here: LocalEndpoint) -> tuple[int, ...]:
    """Return the ports that the coordinator tries: ours tries others, if none typed."""
    derived = endpoints.ports_of(job.launch_id)
    tries_all = is_numbered(inputs) and here.port == derived[0]
    return derived if tries_all else (here.port,)


def is_numbered(inputs: Inputs) -> bool:
    """Say whether the scheduler's numbers are all that is needed to meet.

    Torch's own c10d stays where nodes may come and go, and where its agents are torch's
    own: they leave without a word, which ours takes for a failure.
    """
    low, high = node_range(inputs.options)
    is_wanted = inputs.explicit("hpc_rendezvous") != C10D and not inputs.lacks("agent")
    return inputs.is_c10d and low == high and is_wanted


def meets_by_ours(plan: LaunchPlan, options: Mapping[str, Setting]) -> bool:
    """Return whether the nodes meet by our rendezvous: in a dry run, if they can.

    Args:
        plan: What is planned on this node.
        options: What the user set.
    """
    backend, conf = plan.rendezvous.backend, options.get("rdzv_conf")
    is_file = backend == C10D and rdzv_conf.uses_file(conf)
    can_meet = plan.world.nodes > 1 and plan.world.hosts and backend in {C10D, STATIC}
    is_dry = "hpc_dry_run" in options and bool(can_meet) and not is_file
    return backend == SCHEDULER or is_dry


def check_rendezvous(inputs: Inputs) -> None:
    """Check ``--hpc-rendezvous``.

    Raises:
        LaunchError: It is none of those that there are, or not possible here.
    """
    setting = inputs.options.get("hpc_rendezvous")
    if setting is None:
        return
    kinds = ("auto", SCHEDULER, C10D)
    if setting.value not in kinds:
        raise LaunchError(
            "HPC110",
            f"{setting}: {choices(str(setting.value), kinds)}",
            everywhere=True,
        )
    is_wanted = setting.value == SCHEDULER and inputs.job is not None
    if is_wanted and not is_numbered(inputs):
        names = (
            *("rdzv_backend", "nnodes", "rdzv_conf"),
            *("node_rank", "master_addr", "master_port"),
        )
        others = [str(inputs.options[name]) for name in names if name in inputs.options]
        if "agent" in inputs.without_patches:
            others.append(str(inputs.options[WITHOUT_PATCHES]))
        elif inputs.lacks("agent"):
            others.append("a torch whose agent has changed")
        raise LaunchError(
            "HPC126",
            f"{setting}, but it is for a fixed number of nodes, and stands in for "
            f"--rdzv_backend=c10d only: not with {', '.join(others)}. Leave one of "
            "them out",
            everywhere=True,
        )


def _check_nnodes(inputs: Inputs, job: Job) -> None:
    setting = inputs.options.get("nnodes")
    low, high = node_range(inputs.options)
    nodes = len(job.nodes)
    wait = spares.number(inputs)
    if setting is None or low <= nodes - wait <= high:
        return
    if wait:
        raise LaunchError(
            "HPC204",
            f"{setting}, but this was started on {count(nodes, 'node')}, and with "
            f"{inputs.options['hpc_spares']} the world has {nodes - wait}. Leave it "
            "out",
            everywhere=True,
        )
    wanted = min(high, job.allocated_nodes)
    fix = f"start it on {str(setting.value).replace(':', ' to ')} nodes"
    if wanted >= low and job.launcher.takes_number:
        fix = f"type: {job.once_per_node(inputs.command, nodes=wanted)}"
    raise LaunchError(
        "HPC070",
        f"{setting}, but this was started on {count(nodes, 'node')} "
        f"({job.provenance['nodes']}). Leave it out, or {fix}",
        everywhere=True,
    )


def _check_static(inputs: Inputs, job: Job, rank: int, endpoint: Endpoint) -> None:
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
    setting = inputs.options.get("node_rank")
    if setting is not None and setting.value != rank:
        raise LaunchError(
            "HPC071",
            f"{setting}, but this is node {rank} of the step "
            f"({job.provenance['node_rank']}), and the static rendezvous would wait "
            "for ever. Was it $SLURM_NODEID, expanded in the batch script, where it is "
            "0? Leave the option out",
        )
    if job.is_ranked and endpoint.node not in (None, 0):
        raise LaunchError(
            "HPC072",
            f"{endpoint.setting} is node {endpoint.node} of the step, but the static "
            f"rendezvous is hosted by node 0, {job.nodes[0]}. Leave the option out, or "
            "type --rdzv_backend=c10d",
            everywhere=True,
        )


def _notes(
    inputs: Inputs, endpoint: Endpoint, here: LocalEndpoint
) -> tuple[Message, ...]:
    notes = []
    if endpoint.setting and endpoint.plain != here.host and inputs.site:
        text = f"{endpoint.plain} rewritten to {here.host} (site {inputs.site.name})"
        notes.append(Message("HPC074", text))
    if not inputs.is_static and "node_rank" in inputs.options:
        text = (
            f"{inputs.options['node_rank']} is ignored, nodes are ranked as the "
            "scheduler numbers them"
        )
        notes.append(Message("HPC075", text))
    notes += network_env.notes(inputs, here.local_address)
    return tuple(notes)


def _hint(inputs: Inputs, job: Job) -> str:
    """Say what may help if the nodes do not meet."""
    if job.started_by == PBSDSH:
        return "pbsdsh ends no other task: see what these nodes have printed"
    if is_numbered(inputs) and not spares.number(inputs):
        return messages.fail_together(job.launcher)
    if inputs.is_static and "node_rank" in inputs.options:
        return f"is it {inputs.options['node_rank']} on every node?"
    return ""
