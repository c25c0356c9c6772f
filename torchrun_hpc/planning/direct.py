"""The plan of direct mode: each task is a worker, and gets what an agent would set."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.planning import (
    endpoints,
    local_endpoint,
    messages,
    network_env,
    resources,
)
from torchrun_hpc.planning.endpoints import LOOPBACK, MASTER_ADDR, MASTER_PORT
from torchrun_hpc.planning.inputs import DIRECT
from torchrun_hpc.planning.launch_plan import LaunchPlan, Messages, Rendezvous, World
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

# torchrun's defaults
_ROLE = "default"
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class _WorkerEndpoint:
    """Where the workers of a step meet, and what follows from it."""

    host: str  # of rank 0, by its address or its name
    port: int
    endpoint: str  # the same for a person
    source: str  # of host and port
    site: Setting | None = None
    environment: Mapping[str, Setting] = field(default_factory=dict)
    notes: tuple[Message, ...] = ()
    warnings: tuple[Message, ...] = ()


def one_node_plan(inputs: Inputs) -> LaunchPlan:
    """Plan for a task of a step whose tasks are all on one node.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    job = inputs.the_job
    inputs, notes = _with_exported(inputs, job)
    port = inputs.free_port or endpoints.port_of(job.launch_id)
    host, port, _ = endpoints.explicit_endpoint(inputs, LOOPBACK, port)
    source = "alone" if inputs.free_port else "one node"
    where = _WorkerEndpoint(host, port, join_endpoint(host, port), source, notes=notes)
    return _plan(inputs, job, where)


def several_nodes_plan(inputs: Inputs) -> LaunchPlan:
    """Plan for a task of a step on several nodes.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    job = inputs.the_job
    if job.node_rank is None or job.index is None:
        raise messages.outside()
    inputs, notes = _with_exported(inputs, job)
    endpoint = endpoints.endpoint_of(inputs, job)
    endpoints.check_first_is_known(job, endpoint, f"export {MASTER_ADDR}=")
    here = local_endpoint.local_endpoint(inputs, job, job.index, endpoint)
    if not here.connect_host:
        raise local_endpoint.unreachable(inputs, job, endpoint, here)
    if job.task.rank == 0 and messages.is_foreign(inputs, here.connect_host):
        own = [str(a.ip) for i in inputs.network.interfaces for a in i.addresses]
        raise LaunchError(
            "HPC135",
            f"rank 0 is to be reached at {here.connect_host} ({here}), which no "
            f"interface of this node has: there are {', '.join(own)}. A container with "
            "a network of its own has to use the host's",
        )
    name = endpoints.hosts_of(job)[job.node_rank]
    where = _WorkerEndpoint(
        host=here.connect_host,
        port=here.port,
        endpoint=str(here),
        source=local_endpoint.source_of(inputs, job, endpoint, here),
        site=inputs.site_setting,
        environment=network_env.network(inputs, here.local_address),
        notes=notes,
        warnings=messages.warnings(inputs, here, name),
    )
    return _plan(inputs, job, where)


def _with_exported(inputs: Inputs, job: Job) -> tuple[Inputs, tuple[Message, ...]]:
    """Take the endpoint that the user has exported for one that was typed."""
    exported, notes = endpoints.exported_endpoint(inputs, job)
    if exported is None:
        return inputs, notes
    options = {**inputs.options, "rdzv_endpoint": exported}
    return replace(inputs, options=options), notes


def _plan(inputs: Inputs, job: Job, where: _WorkerEndpoint) -> LaunchPlan:
    task = job.task
    problem = messages.nested(inputs.environ, job.launch_id)
    if problem is not None:
        raise problem
    if job.node_rank is None:
        raise messages.outside()
    environment = {**where.environment, **_agents_variables(inputs, job, where)}
    is_first = task.rank == 0
    hosts = endpoints.hosts_of(job)
    return LaunchPlan(
        mode=inputs.mode,
        launch_id=job.launch_id,
        world=World(
            nodes=len(job.nodes),
            node_rank=job.node_rank,
            workers=task.local_size,
            report_rank=task.rank,
            hosts=hosts,
            fast_hosts=tuple(map(inputs.rewrite, hosts)),
            size=task.size,
        ),
        rendezvous=Rendezvous(
            backend=DIRECT,
            endpoint=where.endpoint,
            connect_host=where.host,
            ports=(where.port,),
            local_address=where.host if is_first else None,
            # A port that was free a moment ago needs no second look.
            listen=(where.host, where.port)
            if is_first and not inputs.free_port
            else None,
        ),
        site=where.site,
        interface=network_env.interface_name(inputs.environ, environment),
        environment=environment,
        messages=Messages(
            title=messages.title(inputs, len(job.nodes)),
            notes=(
                *where.notes,
                *messages.unused(inputs, "direct mode", ("hpc_rendezvous",)),
            ),
            advice=resources.task_advice(inputs, job),
            # The tasks of a node find the same: its first one reports it.
            warnings=where.warnings if task.local_rank == 0 else (),
        ),
    )


def _agents_variables(
    inputs: Inputs, job: Job, where: _WorkerEndpoint
) -> dict[str, Setting]:
    """Return what torchrun's agent sets: LocalElasticAgent._start_workers."""
    task, provenance = job.task, job.provenance
    size, rank = provenance.get("tasks", ""), provenance.get("task", "")
    local_rank = (task.local_rank, provenance.get("local_rank", rank))
    virtual = inputs.explicit("virtual_local_rank")
    if virtual:
        local_rank = (0, "--virtual-local-rank")
    found = {
        "RANK": (task.rank, rank),
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": (task.size, size),
        "LOCAL_WORLD_SIZE": (task.local_size, provenance.get("local_size", size)),
        "GROUP_RANK": (job.node_rank, provenance.get("node_rank", "")),
        "GROUP_WORLD_SIZE": (len(job.nodes), provenance.get("nodes", "")),
        "ROLE_RANK": (task.rank, rank),
        "ROLE_WORLD_SIZE": (task.size, size),
        "ROLE_NAME": (_ROLE, "default"),
        MASTER_ADDR: (where.host, where.source),
        MASTER_PORT: (where.port, where.source),
        messages.RUN_ID: (job.launch_id, provenance.get("launch_id", "")),
        "TORCHELASTIC_RESTART_COUNT": (0, "no agent"),
        "TORCHELASTIC_MAX_RESTARTS": (0, "no agent"),
    }
    if not inputs.environ.get(_ASYNC_ERRORS):
        found[_ASYNC_ERRORS] = (1, "as torchrun")
    threads = resources.worker_threads(inputs)  # of one worker
    gpu = resources.own_gpu(inputs, job) if virtual else {}
    settings = {k: Setting(str(v), source) for k, (v, source) in found.items()}
    return settings | threads | gpu
