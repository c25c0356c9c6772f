"""The one line that a clean start prints, on node 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message

if TYPE_CHECKING:
    from torchrun_hpc.planning.launch_plan import LaunchPlan


def start_line(plan: LaunchPlan) -> Message:
    """Describe in one line what is about to start."""
    where = plan.rendezvous
    parts = [plan.world.shape, plan.messages.title]
    if where.endpoint:
        address = where.listen[0] if where.listen else ""
        number = f" ({address})" if address not in where.endpoint else ""
        is_direct = plan.mode.is_direct
        what = "each task a worker" if is_direct else f"{where.backend} rendezvous"
        parts.append(f"{what} at {where.endpoint}{number}")
    if plan.interface:
        parts.append(f"interface {plan.interface}")
    if plan.site:
        parts.append(f"site {plan.site.value}")
    notes = map(str, plan.messages.notes)
    return Message("HPC001", "; ".join([", ".join(parts), *notes]))
