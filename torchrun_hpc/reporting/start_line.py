"""The one line that a clean start prints, on node 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message, count

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan


def start_line(plan: LaunchPlan) -> Message:
    """Describe in one line what is about to start."""
    where = plan.meeting
    parts = [_shape(plan), plan.messages.title]
    if where.endpoint:
        address = where.listen[0] if where.listen else ""
        number = f" ({address})" if address not in where.endpoint else ""
        is_direct = plan.mode.is_direct
        what = "each task a worker" if is_direct else f"{where.backend} rendezvous"
        parts.append(f"{what} at {where.endpoint}{number}")
    if where.interface:
        parts.append(f"interface {where.interface}")
    if where.site:
        parts.append(f"site {where.site.value}")
    notes = map(str, plan.messages.notes)
    return Message("HPC001", "; ".join([", ".join(parts), *notes]))


def _shape(plan: LaunchPlan) -> str:
    """Write the nodes, and the workers or tasks, as far as they are known yet."""
    where, own = plan.meeting, plan.workers
    nodes, workers = count(where.active, "node"), count(own.number, "worker")
    if where.spares.number:
        nodes += f" and {count(where.spares.number, 'spare')}"
    if own.size:
        is_even = own.size == own.number * where.nodes
        tasks = count(own.number if is_even else own.size, "task")
        return f"{nodes} x {tasks}" if is_even else f"{nodes}, {tasks}"
    if 0 < where.fewest < where.active:
        nodes = f"{where.fewest} to {nodes}"
    return f"{nodes}, {workers}" + (" on this one" if where.nodes > 1 else "")
