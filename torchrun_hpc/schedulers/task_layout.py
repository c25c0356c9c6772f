"""Ranks from the launcher of this process, hosts and job from the scheduler.

mpirun and its like run inside a job of Slurm, PBS or LSF, or in none. They know which
process is which; where the nodes are, the scheduler knows better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.allocation import as_launch_id
from torchrun_hpc.schedulers.job import (
    BY_NAME,
    Job,
    LaunchContext,
    Launcher,
    Task,
    node_index,
    same_host,
)
from torchrun_hpc.schedulers.pmi import MOST_TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.schedulers.allocation import Allocation
    from torchrun_hpc.schedulers.process import Process

# Where nobody but the user knows the hosts, he has told them to his launcher.
HOST_FILE = "HOSTFILE"


@dataclass(frozen=True)
class TaskLayout:
    """What a launcher tells a task about its place.

    Attributes:
        name: Name of the launcher, as a person writes it.
        launcher: What a person types.
        task: This process among the others.
        provenance: For ``tasks``, ``task``, and what else there is, the variable.
        nodes: Number of nodes, if the launcher says.
        most_nodes: Number of nodes that there are at most.
        node_rank: Rank of this node, if the launcher says.
        nodes_before: Number of nodes that are in front of this one at most.
        instance: Names this launch among others in the same job.
        head: Where node 0 may be: a name, or addresses of one machine.
        hosts: For each node its host name, if the tasks have told each other.
        pmi_is_open: Whether ``head`` is what rank 0 itself has said.
        forwards: Whether every node has the variables of the scheduler. If not, what
            must be the same on all nodes is not made of them.
    """

    name: str
    launcher: Launcher
    task: Task
    provenance: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    most_nodes: int | None = None
    node_rank: int | None = None
    nodes_before: int | None = None
    instance: str = ""
    head: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    pmi_is_open: bool = False
    forwards: bool = True


def job_of(
    place: TaskLayout,
    allocation: Allocation | None,
    hostname: str,
    command: str = "COMMAND",
) -> Job:
    """Describe the job of a task.

    Args:
        place: What its launcher says.
        allocation: What the scheduler says, if there is one.
        hostname: Name of this machine.
        command: The command as typed, for a message.

    Raises:
        LaunchError: The ranks contradict each other, or leave open how many nodes
            there are.
    """
    known = allocation.nodes if allocation else ()
    index = node_index(hostname, known)
    _check(place, place.nodes)
    host_file = ""
    if place.launcher.hosts:
        host_file = allocation.host_file if allocation else HOST_FILE
    line = place.launcher.once_on_each("NODES", command, host_file)
    nodes = _nodes(place, len(known), index, line)
    _check(place, nodes)
    rank_source = place.provenance.get("node_rank", place.provenance["task"])
    if place.node_rank is not None:
        node_rank = place.node_rank
    elif index is not None and index < nodes and place.task.size > nodes:
        node_rank, rank_source = index, BY_NAME
    else:
        node_rank = _usual_node_rank(place, nodes)
    names = known[:nodes] if len(known) >= nodes else ("",) * nodes
    names = _spelled(place.hosts, known) or names
    if place.pmi_is_open and names[0] and not same_host(names[0], place.head[0]):
        names = (place.head[0], *("",) * (nodes - 1))  # on a part of the job
    provenance = {"nodes": place.provenance["tasks"], **place.provenance}
    provenance["node_rank"] = rank_source
    provenance |= allocation.provenance if allocation and known else {}
    launch_id, provenance["launch_id"] = _launch_id(place, allocation)
    name = f"{place.name} in {allocation.scheduler}" if allocation else place.name
    return Job(
        scheduler=name,
        launch_id=launch_id,
        start=LaunchContext.STEP,
        launcher=place.launcher,
        nodes=names,
        node_rank=node_rank,
        task=place.task,
        allocated_nodes=max(len(known), nodes),
        provenance=provenance,
        head_candidates=place.head or tuple(filter(None, names[:1])),
        hostname=hostname,
        nodelist_is_shared=place.forwards,
        pmi_is_open=place.pmi_is_open,
        host_file=host_file,
    )


def _spelled(hosts: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the scheduler's names of the hosts that a launcher has really taken.

    Args:
        hosts: Their own names, in the order of the launch.
        known: Those of the scheduler, which may have more hosts, in another order.

    Returns:
        For each host its name; empty if it is not clear for one of them.
    """
    labels = {node.partition(".")[0]: node for node in known}
    names = [labels.get(host.partition(".")[0], "") for host in hosts]
    found = all(map(same_host, names, hosts)) and len(set(names)) == len(names)
    return tuple(names) if found else ()


def _check(place: TaskLayout, nodes: int | None) -> None:
    task = place.task
    if not (
        task.rank < task.size <= MOST_TASKS
        and task.local_rank < task.local_size <= task.size
        and task.local_rank <= task.rank
        and (place.node_rank or 0) <= task.rank
        and (nodes is None or (place.node_rank or 0) < nodes <= task.size)
    ):
        raise LaunchError(
            "HPC033",
            f"{place.name} says that this is task {task.rank} of {task.size}, and "
            f"{task.local_rank} of {task.local_size} on this node "
            f"({place.provenance['task']}, {place.provenance['tasks']}), which cannot be. "
            "The variables may have been left over: start this with "
            f"{place.launcher.name}, or unset them",
        )


def _nodes(place: TaskLayout, known: int, index: int | None, line: str) -> int:
    """Return the number of nodes, the same on each of them.

    Args:
        place: What the launcher says.
        known: Number of nodes that the scheduler names, 0 if none.
        index: Place of this node among them; a launch takes the first ones.
        line: How to start one task on each node, for a message.

    Raises:
        LaunchError: Tasks are uneven, and nothing says on how many nodes.
    """
    task = place.task
    if place.nodes is not None:
        return place.nodes
    most = min(filter(None, (place.most_nodes, known, task.size)))
    before = place.nodes_before if place.node_rank is None else place.node_rank
    if before is not None and before < task.rank:
        most = min(most, max(task.size - 1, 1))  # a node in front has several tasks
    nodes, rest = divmod(task.size, task.local_size)
    least = (place.node_rank or index or 0) + 1
    if rest == 0 and min(least, most) <= nodes <= most:
        return nodes
    if most < task.size:
        return most
    raise LaunchError(
        "HPC034",
        f"{place.name} started {task.local_size} of {task.size} tasks on this node "
        f"({place.provenance['tasks']}), so not as many on each, and says nowhere on how "
        f"many nodes. Start as many on each node, or type: {line}",
    )


def _usual_node_rank(place: TaskLayout, nodes: int) -> int:
    """Return the rank of a node as launchers place tasks: in blocks, or in turn."""
    task = place.task
    if task.size == nodes:
        return task.rank
    if task.size != nodes * task.local_size and place.nodes_before is not None:
        return min(place.nodes_before, nodes - 1)
    in_turn = (
        task.rank % task.local_size != task.local_rank
        and task.rank // nodes == task.local_rank
    )
    placed = task.rank % nodes if in_turn else task.rank // task.local_size
    return min(placed, nodes - 1)


def _launch_id(place: TaskLayout, allocation: Allocation | None) -> tuple[str, str]:
    """Return the identity of this launch, and what it came from."""
    parts = [(place.instance, place.provenance.get("launch_id", ""))]
    if allocation and place.forwards:
        parts.insert(0, (allocation.launch_id, allocation.provenance["launch_id"]))
    known = [(text, source) for text, source in parts if text]
    text = ".".join(text for text, _ in known) or place.launcher.name
    return as_launch_id(text), ", ".join(source for _, source in known)


def with_exchanged(place: TaskLayout, process: Process) -> TaskLayout:
    """Add what the tasks can tell each other."""
    said = process.exchange(process.environ)
    if said is None:
        return place
    changes: dict[str, Any] = {}
    provenance = {**place.provenance, "head": "PMI", "launch_id": "PMI"}
    task = place.task
    if task.rank < len(said.node_of_rank):
        node = said.node_of_rank[task.rank]
        local_size = said.node_of_rank.count(node)
        if local_size != task.local_size:  # what the launcher took for several nodes
            local_rank = said.node_of_rank[: task.rank].count(node)
            task = replace(task, local_rank=local_rank, local_size=local_size)
        changes["task"], changes["hosts"] = task, said.hosts
        changes["nodes"], changes["node_rank"] = len(set(said.node_of_rank)), node
        provenance["node_rank"] = "PMI"
    return replace(
        place,
        instance=said.instance,
        head=(said.head,),
        pmi_is_open=True,
        provenance=provenance,
        **changes,
    )
