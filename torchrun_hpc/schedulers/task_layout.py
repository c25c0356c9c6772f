"""Which task this is, among how many, on which node: as its launcher says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.schedulers.process import Process
    from torchrun_hpc.schedulers.variables import Variables


@dataclass(frozen=True)
class TaskLayout:
    """The places of this task and the others, as a launcher chose them.

    Attributes:
        task: This process among the others.
        provenance: For ``tasks``, ``task``, and what else there is, the variable;
            without one for ``local_rank`` or ``local_size`` it is that of all tasks.
        nodes: Number of nodes, if the launcher says.
        most_nodes: Number of nodes that there are at most.
        node_rank: Rank of this node, if the launcher says.
        nodes_before: Largest possible number of nodes before this one.
        instance: Names this launch among others in the same job.
        head_candidates: Where node 0 may be: one name, or addresses of one machine.
        hosts: For each node its host name, if the tasks have told each other.
        pmi_is_open: Whether ``head_candidates`` is what rank 0 has told by PMI.
        nodelist_is_shared: Whether every node has the variables of the scheduler. If
            not, what must be the same on all nodes does not depend on them.
    """

    task: Task
    provenance: Mapping[str, str]
    nodes: int | None = None
    most_nodes: int | None = None
    node_rank: int | None = None
    nodes_before: int | None = None
    instance: str = ""
    head_candidates: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    pmi_is_open: bool = False
    nodelist_is_shared: bool = True


def read_layout(
    variables: Variables, names: Sequence[str], sources: Mapping[str, str], **known: Any
) -> TaskLayout:
    """Return the layout that variables describe.

    Args:
        variables: The launcher's.
        names: Those of rank, size, local rank and local size; of the last, the first
            that is set.
        sources: The provenance of what else is known.
        known: The other fields of the layout.

    Raises:
        LaunchError: One is not set, or is not a number.
    """
    rank, size, local_rank, *local_size = names
    read = variables.integer
    provenance = {"tasks": size, "task": rank, "local_rank": local_rank}
    provenance["local_size"] = variables.name(*local_size)
    task = Task(read(rank), read(size), read(local_rank), read(*local_size))
    return TaskLayout(task, {**provenance, **sources}, **known)


def with_exchanged(layout: TaskLayout, process: Process) -> TaskLayout:
    """Add what the tasks can tell each other: it goes before the variables."""
    exchanged = process.exchange(process.environ)
    if exchanged is None:
        return layout
    changes: dict[str, Any] = {}
    provenance = {**layout.provenance, "head": "PMI"}
    if not layout.instance:
        changes["instance"] = exchanged.instance
        provenance["launch_id"] = "PMI"
    task, nodes = layout.task, exchanged.node_of_rank
    if task.rank < len(nodes):
        node = nodes[task.rank]
        local_size = nodes.count(node)
        if local_size != task.local_size:  # what the launcher took for several nodes
            local_rank = nodes[: task.rank].count(node)
            task = replace(task, local_rank=local_rank, local_size=local_size)
        changes["task"], changes["hosts"] = task, exchanged.hosts
        changes["nodes"], changes["node_rank"] = len(set(nodes)), node
        provenance |= dict.fromkeys(("node_rank", "local_rank", "local_size"), "PMI")
    return replace(
        layout,
        head_candidates=(exchanged.first_host,),
        pmi_is_open=True,
        provenance=provenance,
        **changes,
    )
