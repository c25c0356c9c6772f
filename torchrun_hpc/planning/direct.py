"""The meeting in direct mode: each worker gets the variables of an agent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.options.values import DIRECT
from torchrun_hpc.planning import head_node, messages, network_env
from torchrun_hpc.planning.head_node import LOOPBACK, HeadNode
from torchrun_hpc.planning.meeting import (
    Meeting,
    key_file,
    meeting_of,
    place_of,
    with_environment,
)
from torchrun_hpc.variables import (
    ASYNC_ERRORS,
    GROUP_RANK,
    GROUP_WORLD_SIZE,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    MAX_RESTARTS,
    RANK,
    RESTART_COUNT,
    ROLE_NAME,
    ROLE_RANK,
    ROLE_WORLD_SIZE,
    RUN_ID,
    WORLD_SIZE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job

# torchrun's defaults
_ROLE = "default"


def meet_on_one_node(inputs: Inputs, job: Job) -> Meeting:
    """Return where the tasks of a step on one node meet."""
    head, notes = head_node.exported(inputs, job)
    if head is None:
        port = inputs.free_port or head_node.port_of(job.launch_id)
        head = HeadNode(LOOPBACK, port)
    source = "alone" if inputs.free_port else "one node"
    head = replace(head, connect_host=head.host)
    return replace(_meeting(inputs, job, head, source, {}), notes=notes)


def meet_on_several(inputs: Inputs, job: Job) -> Meeting:
    """Return where the tasks of a step on several nodes meet."""
    node_rank, _ = place_of(job)
    exported, notes = head_node.exported(inputs, job)
    by_name = head_node.by_name(inputs, job, exported)
    head_node.check_first_is_known(job, by_name, f"export {MASTER_ADDR}=")
    head = head_node.on_this_node(inputs, job, by_name)
    if not head.connect_host:
        raise head_node.unreachable(inputs, job, head)
    if job.task.rank == 0 and messages.is_foreign(inputs, head.connect_host):
        but = "The other tasks would look for rank 0 there. To correct this"
        fault = messages.foreign(inputs, head.host, but)
        raise LaunchError(fault.code, fault.text)
    source = head_node.source_of(inputs, job, head)
    network = network_env.network(inputs, head.local_address)
    meeting = _meeting(inputs, job, head, source, network)
    name = meeting.hosts[node_rank]
    return replace(
        meeting,
        key=key_file(inputs),
        site=inputs.site_setting,
        notes=notes,
        advice=() if job.task.rank else network_env.advice(inputs),
        # All tasks of a node find the same problem. Its first one reports it.
        warnings=() if job.task.local_rank else messages.warnings(inputs, head, name),
    )


def _meeting(
    inputs: Inputs,
    job: Job,
    head: HeadNode,
    source: str,
    network: Mapping[str, Setting],
) -> Meeting:
    """Return the meeting of a task; ``source`` is the source of host and port."""
    if problem := messages.nested(inputs.environ, job.launch_id):
        raise problem
    is_first = job.task.rank == 0
    # A free port was chosen a moment ago, so it needs no check.
    listens = is_first and not inputs.free_port
    meeting = replace(
        meeting_of(inputs, job, DIRECT),
        report_rank=job.task.rank,
        endpoint=str(head),
        connect_host=head.connect_host,
        ports=(head.port,),
        local_address=head.connect_host if is_first else None,
        listen=(head.connect_host, head.port) if listens else None,
    )
    variables = _agents_variables(inputs, job, head, source)
    return with_environment(inputs, meeting, {**network, **variables})


def _agents_variables(
    inputs: Inputs, job: Job, head: HeadNode, source: str
) -> dict[str, Setting]:
    """Return the variables of torchrun's agent: LocalElasticAgent._start_workers."""
    task, provenance = job.task, job.provenance
    size, rank = provenance.get("tasks", ""), provenance.get("task", "")
    local_rank = (task.local_rank, provenance.get("local_rank", rank))
    if inputs.options.virtual_local_rank:
        local_rank = (0, "--virtual-local-rank")
    variables = {
        RANK: (task.rank, rank),
        LOCAL_RANK: local_rank,
        WORLD_SIZE: (task.size, size),
        LOCAL_WORLD_SIZE: (task.local_size, provenance.get("local_size", size)),
        GROUP_RANK: (job.node_rank, provenance.get("node_rank", "")),
        GROUP_WORLD_SIZE: (len(job.nodes), provenance.get("nodes", "")),
        ROLE_RANK: (task.rank, rank),
        ROLE_WORLD_SIZE: (task.size, size),
        ROLE_NAME: (_ROLE, "default"),
        MASTER_ADDR: (head.connect_host, source),
        MASTER_PORT: (head.port, source),
        RUN_ID: (job.launch_id, provenance.get("launch_id", "")),
        RESTART_COUNT: (0, "no agent"),
        MAX_RESTARTS: (0, "no agent"),
    }
    if not inputs.environ.get(ASYNC_ERRORS):
        variables[ASYNC_ERRORS] = (1, "as torchrun")
    return {name: Setting(str(value), by) for name, (value, by) in variables.items()}
