"""The one line that a clean start prints, on node 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, count
from torchrun_hpc.planning.inputs import DIRECT

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan


def start_line(plan: LaunchPlan) -> Message:
    """Describe in one line what is about to start."""
    parts = [plan.shape or _shape(plan), plan.title]
    if plan.endpoint:
        address = plan.listen[0] if plan.listen else ""
        number = f" ({address})" if address not in plan.endpoint else ""
        is_direct = plan.backend == DIRECT
        what = "each task a worker" if is_direct else f"{plan.backend} rendezvous"
        parts.append(f"{what} at {plan.endpoint}{number}")
    if plan.interface:
        parts.append(f"interface {plan.interface}")
    if plan.site:
        parts.append(f"site {plan.site.value}")
    return Message("HPC001", "; ".join([", ".join(parts), *map(str, plan.notes)]))


def _shape(plan: LaunchPlan) -> str:
    """Count the nodes, and the workers of this one: more is not known yet."""
    nodes, workers = count(plan.nodes, "node"), count(plan.workers, "worker")
    if 0 < plan.fewest < plan.nodes:
        nodes = f"{plan.fewest} to {nodes}"
    return f"{nodes}, {workers}" + (" on this one" if plan.nodes > 1 else "")
