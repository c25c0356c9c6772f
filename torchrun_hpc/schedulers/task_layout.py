"""The layout of a launch: this task, all tasks, and the nodes."""

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
    """The launcher's placement of the tasks; fields that it does not set are ``None``.

    Attributes:
        provenance: The variable of ``tasks``, ``task``, and other fields. Without an
            entry, ``local_rank`` and ``local_size`` have that of ``tasks``.
        head_candidates: Place of node 0 if probable: a name, or addresses of one
            machine.
        nodelist_is_shared: Whether all nodes have the scheduler's variables. If not,
            values that must be equal on all nodes do not depend on them.
    """

    task: Task
    provenance: Mapping[str, str]
    nodes: int | None = None
    most_nodes: int | None = None
    node_rank: int | None = None
    nodes_before: int | None = None  # maximum number of nodes before this one
    instance: str = ""  # unique name of this launch in its job
    head_candidates: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # for each node, if the tasks have exchanged them
    pmi_is_open: bool = False  # ``head_candidates`` came from rank 0 by PMI
    nodelist_is_shared: bool = True


def read_layout(
    variables: Variables, names: Sequence[str], sources: Mapping[str, str], **known: Any
) -> TaskLayout:
    """Return the layout in the launcher's variables.

    ``names`` are the variables of rank, size, local rank, and local sizes, of which the
    first set one counts. ``sources`` is the provenance of ``known``.
    """
    rank, size, local_rank, *local_size = names
    read = variables.integer
    provenance = {"tasks": size, "task": rank, "local_rank": local_rank}
    provenance["local_size"] = variables.name(*local_size)
    task = Task(read(rank), read(size), read(local_rank), read(*local_size))
    return TaskLayout(task, {**provenance, **sources}, **known)


def with_exchanged(layout: TaskLayout, process: Process) -> TaskLayout:
    """Add the facts that tasks exchange by PMI; they replace the variables."""
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
        if local_size != task.local_size:  # one host, counted as several nodes
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
