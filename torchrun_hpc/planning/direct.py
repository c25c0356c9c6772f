"""The meeting in direct mode: each worker gets the variables of an agent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host.network import join_endpoint
from torchrun_hpc.options.values import DIRECT
from torchrun_hpc.planning import head_node, messages, network_env
from torchrun_hpc.planning.head_node import LOOPBACK, MASTER_ADDR, MASTER_PORT
from torchrun_hpc.planning.meeting import Meeting, key_file
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

# torchrun's defaults
_ROLE = "default"
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def meet_on_one_node(inputs: Inputs) -> Meeting:
    """Return where the tasks of a step on one node meet."""
    job = inputs.the_job
    port = inputs.free_port or head_node.port_of(job.launch_id)
    source = "alone" if inputs.free_port else "one node"
    exported, notes = head_node.exported_endpoint(inputs, job)
    host, port, _ = exported or (LOOPBACK, port, None)
    where = Meeting(
        DIRECT, endpoint=join_endpoint(host, port), connect_host=host, ports=(port,)
    )
    return _completed(inputs, job, replace(where, notes=notes), source)


def meet_on_several(inputs: Inputs) -> Meeting:
    """Return where the tasks of a step on several nodes meet."""
    job = inputs.the_job
    node_rank, index = messages.place_of(job)
    exported, notes = head_node.exported_endpoint(inputs, job)
    endpoint = head_node.endpoint_of(inputs, job, exported)
    head_node.check_first_is_known(job, endpoint, f"export {MASTER_ADDR}=")
    here = head_node.local_endpoint(inputs, job, index, endpoint)
    if not here.connect_host:
        raise head_node.unreachable(inputs, job, endpoint, here)
    if job.task.rank == 0 and messages.is_foreign(inputs, here.connect_host):
        but = "The other tasks would look for rank 0 there. To correct this"
        fault = messages.foreign(inputs, here.host, but)
        raise LaunchError(fault.code, fault.text)
    name = head_node.hosts_of(job)[node_rank]
    where = Meeting(
        DIRECT,
        key=key_file(inputs),
        site=inputs.site_setting,
        endpoint=str(here),
        connect_host=here.connect_host,
        ports=(here.port,),
        environment=network_env.network(inputs, here.local_address),
        notes=notes,
        advice=() if job.task.rank else network_env.advice(inputs),
        # All tasks of a node find the same problem. Its first one reports it.
        warnings=() if job.task.local_rank else messages.warnings(inputs, here, name),
    )
    source = head_node.source_of(inputs, job, endpoint, here)
    return _completed(inputs, job, where, source)


def _completed(inputs: Inputs, job: Job, where: Meeting, source: str) -> Meeting:
    if problem := messages.nested(inputs.environ, job.launch_id):
        raise problem
    node_rank, _ = messages.place_of(job)
    environment = {**where.environment, **_agents_variables(inputs, job, where, source)}
    hosts, is_first = head_node.hosts_of(job), job.task.rank == 0
    # A free port was chosen a moment ago, so it needs no check.
    listens = is_first and not inputs.free_port
    return replace(
        where,
        launch_id=job.launch_id,
        nodes=len(job.nodes),
        node_rank=node_rank,
        report_rank=job.task.rank,
        hosts=hosts,
        fast_hosts=tuple(map(inputs.rewrite, hosts)),
        local_address=where.connect_host if is_first else None,
        listen=(where.connect_host, where.ports[0]) if listens else None,
        interface=network_env.interface_name(inputs.environ, environment),
        environment=environment,
    )


def _agents_variables(
    inputs: Inputs, job: Job, where: Meeting, source: str
) -> dict[str, Setting]:
    """Return the variables of torchrun's agent: LocalElasticAgent._start_workers."""
    task, provenance = job.task, job.provenance
    size, rank = provenance.get("tasks", ""), provenance.get("task", "")
    local_rank = (task.local_rank, provenance.get("local_rank", rank))
    if inputs.options.virtual_local_rank:
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
        MASTER_ADDR: (where.connect_host, source),
        MASTER_PORT: (where.ports[0], source),
        messages.RUN_ID: (job.launch_id, provenance.get("launch_id", "")),
        "TORCHELASTIC_RESTART_COUNT": (0, "no agent"),
        "TORCHELASTIC_MAX_RESTARTS": (0, "no agent"),
    }
    if not inputs.environ.get(_ASYNC_ERRORS):
        found[_ASYNC_ERRORS] = (1, "as torchrun")
    return {name: Setting(str(value), by) for name, (value, by) in found.items()}
