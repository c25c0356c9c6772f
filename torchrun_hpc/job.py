"""What the launcher of this process says about the job, whichever launcher it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Start(Enum):
    """How this process was started inside the job."""

    STEP = "step"  # once per task, by the scheduler's own launcher
    BATCH_SCRIPT = "batch script"  # once, on the job's first node
    INTERACTIVE_STEP = "interactive step"  # a shell on one of the job's nodes
    ALLOCATION_SHELL = "allocation shell"  # a shell outside the job's nodes


@dataclass(frozen=True)
class Job:
    """A job, seen from one of its processes.

    Attributes:
        scheduler: Name of the source, as a person writes it (``Slurm``).
        identity: Names this launch and no other: job, array element, step, restart,
            for example ``123456_7.0-r1``. Characters ``[A-Za-z0-9._-]``. The same
            text on all nodes.
        start: How this process was started.
        nodes: The scheduler's node names in rank order. In a step, the step's nodes;
            in an interactive step, only this one; elsewhere, the job's.
        node_rank: Index of this node in ``nodes``; ``None`` outside of them.
        tasks_per_node: Number of tasks on each of ``nodes``. Outside a step, where
            tasks have not been started, 1 each.
        task_rank: Rank of this task in the step, from 0; 0 outside a step.
        allocated_nodes: Number of nodes of the whole job, of which ``nodes`` may be
            a part.
        sources: For each field the variable that it came from.
    """

    scheduler: str
    identity: str
    start: Start
    nodes: tuple[str, ...]
    node_rank: int | None
    tasks_per_node: tuple[int, ...]
    task_rank: int
    allocated_nodes: int
    sources: Mapping[str, str]
