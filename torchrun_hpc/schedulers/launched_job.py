"""The job of a task that mpirun or a similar launcher started.

If it runs inside a Slurm, PBS or LSF job, the scheduler names the nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, to_copy
from torchrun_hpc.schedulers import job
from torchrun_hpc.schedulers.detector import Allocation
from torchrun_hpc.schedulers.job import as_identifier
from torchrun_hpc.schedulers.pmi import MOST_TASKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.schedulers.detector import Detector, TaskLayout
    from torchrun_hpc.schedulers.process import Process

# Without a scheduler, only the user knows the host file.
NO_SCHEDULER = Allocation("", "", (), {}, host_file="HOSTFILE")


def launched_job(
    detector: Detector, layout: TaskLayout, allocation: Allocation, process: Process
) -> job.Job:
    """Describe the job of a task; refuse contradictory ranks, or an unclear size."""
    launcher, listed = detector.launcher, allocation.nodes
    index = job.node_index(process.hostname, listed)
    _check_ranks(detector, layout, layout.nodes)
    host_file = allocation.host_file if launcher.host_file_option else ""
    if launcher.forward_option and allocation.launch_id and host_file:
        variable = allocation.provenance["launch_id"].partition(",")[0]
        host_file += f" {launcher.forward_option} {variable}"
    line = launcher.once_per_node("NODES", process.command, host_file)
    nodes = _number_of_nodes(detector, layout, len(listed), index, line)
    _check_ranks(detector, layout, nodes)
    rank_source = layout.provenance.get("node_rank", layout.provenance["task"])
    if layout.node_rank is not None:
        node_rank = layout.node_rank
    elif index is not None and index < nodes and layout.task.size > nodes:
        node_rank, rank_source = index, job.BY_NAME
    else:
        node_rank = _usual_node_rank(layout, nodes)
    names = _names(layout, listed, nodes)
    launch_id, id_source = _launch_id(detector, layout, allocation)
    return job.Job(
        scheduler=" in ".join(filter(None, (detector.name, allocation.scheduler))),
        launch_id=launch_id,
        context=job.LaunchContext.STEP,
        launcher=launcher,
        nodes=names,
        node_rank=node_rank,
        task=layout.task,
        allocated_nodes=max(len(listed), nodes),
        provenance={
            "nodes": layout.provenance["tasks"],
            **layout.provenance,
            "node_rank": rank_source,
            **(allocation.provenance if listed else {}),
            "launch_id": id_source,
        },
        head_candidates=layout.head_candidates or tuple(filter(None, names[:1])),
        hostname=process.hostname,
        nodelist_is_shared=layout.nodelist_is_shared,
        pmi_is_open=layout.pmi_is_open,
        host_file=host_file,
        started_by=launcher,
        names_instance=bool(layout.instance),
    )


def _names(layout: TaskLayout, listed: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Return the nodes' names in rank order; an unknown name is empty.

    The tasks' host names may lack a domain, so the scheduler's ``listed`` names count.
    """
    labels = {node.partition(".")[0]: node for node in listed}
    names = tuple(labels.get(host.partition(".")[0], "") for host in layout.hosts)
    is_same = all(map(job.same_host, names, layout.hosts))
    if not (names and is_same and len({*names}) == len(names)):
        names = tuple(listed[:nodes]) if len(listed) >= nodes else ("",) * nodes
    if layout.pmi_is_open and names[0]:
        (head,) = layout.head_candidates
        if not job.same_host(names[0], head):  # this launch uses a part of the job
            unknown = [""] * (nodes - 1)
            return (head, *unknown)
    return names


def _check_ranks(detector: Detector, layout: TaskLayout, nodes: int | None) -> None:
    task = layout.task
    if not (
        task.rank < task.size <= MOST_TASKS
        and task.local_rank < task.local_size <= task.size
        and task.local_rank <= task.rank
        and (layout.node_rank or 0) <= task.rank
        and (nodes is None or (layout.node_rank or 0) < nodes <= task.size)
    ):
        raise LaunchError(
            "HPC033",
            f"{detector.name} says that this is task {task.rank} of {task.size}, and "
            f"{task.local_rank} of {task.local_size} on this node "
            f"({layout.provenance['task']}, {layout.provenance['tasks']}), which is "
            "impossible. The variables are probably stale. Start this with "
            f"{detector.launcher.name}, or unset them",
        )


def _number_of_nodes(
    detector: Detector, layout: TaskLayout, listed: int, index: int | None, line: str
) -> int:
    """Return how many nodes the launch uses: the first ones in the scheduler's list.

    ``index`` is this node's place in the list, and ``line`` a command for the message.
    """
    task = layout.task
    if layout.nodes is not None:
        return layout.nodes
    most = min(filter(None, (layout.most_nodes, listed, task.size)))
    before = layout.nodes_before if layout.node_rank is None else layout.node_rank
    if before is not None and before < task.rank:
        most = min(most, max(task.size - 1, 1))  # an earlier node has several tasks
    nodes, rest = divmod(task.size, task.local_size)
    least = (layout.node_rank or index or 0) + 1
    if rest == 0 and min(least, most) <= nodes <= most:
        return nodes
    if most < task.size:
        return most
    raise LaunchError(
        "HPC034",
        f"{detector.name} started {task.local_size} of {task.size} tasks on this node "
        f"({layout.provenance['tasks']}): nodes have different numbers of tasks, so "
        "the number of nodes is unknown. Start the same number on each node, or one "
        f"per node:{to_copy(line)}",
    )


def _usual_node_rank(layout: TaskLayout, nodes: int) -> int:
    """Return the node rank if tasks fill node after node, or go to nodes in turn."""
    task = layout.task
    if task.size == nodes:
        return task.rank
    if task.size != nodes * task.local_size and layout.nodes_before is not None:
        return min(layout.nodes_before, nodes - 1)
    in_turn = (
        task.rank % task.local_size != task.local_rank
        and task.rank // nodes == task.local_rank
    )
    node_rank = task.rank % nodes if in_turn else task.rank // task.local_size
    return min(node_rank, nodes - 1)


def _launch_id(
    detector: Detector, layout: TaskLayout, allocation: Allocation
) -> tuple[str, str]:
    """Return the launch id, and its variables."""
    parts, sources = [], []
    if allocation.launch_id and layout.nodelist_is_shared:
        parts.append(allocation.launch_id)
        sources.append(allocation.provenance["launch_id"])
    if layout.instance:
        parts.append(layout.instance)
        sources.append(layout.provenance.get("launch_id", ""))
    text = ".".join(parts) or detector.launcher.name
    return as_identifier(text), ", ".join(sources)
