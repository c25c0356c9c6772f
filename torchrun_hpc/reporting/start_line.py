"""The lines of a healthy start, which node 0 prints: no message, so without a code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc import __version__
from torchrun_hpc.errors import count, split_copied, to_copy
from torchrun_hpc.planning.messages import NO_SCHEDULER
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan


def start_line(plan: LaunchPlan) -> str:
    """Describe the launch in one line. Lines to copy, of notes, follow on their own."""
    where, title = plan.meeting, plan.messages.title
    is_alone = where.nodes == 1 and title == NO_SCHEDULER
    if is_alone and not plan.mode.is_direct:
        parts = [f"{count(plan.workers.number, 'worker')} on this machine"]
    else:
        parts = [_shape(plan), title]
    if where.endpoint and (where.nodes > 1 or where.may_grow):
        is_known = where.is_ours or plan.mode.is_direct
        what = "meeting" if is_known else f"{where.backend} rendezvous"
        over = f" over {where.interface}" if where.interface else ""
        parts.append(f"{what} at {where.endpoint}{over}")
    if where.site:
        parts.append(f"site {where.site.value}")
    copied = ""
    for note in plan.messages.notes:
        text, lines = split_copied(note.text)
        parts.append(f"note[{note.code}]: {text}")
        copied += to_copy("\n".join(lines))
    return f"torchrun_hpc {__version__}: {'; '.join(parts)}{copied}"


def joined_line(plan: LaunchPlan, nodes: int, workers: int, seconds: float) -> str:
    """Return the line that the nodes have joined, and how long that took."""
    every = plan.meeting.active
    who = f"all {every}" if nodes == every else f"{nodes} of {every}"
    started = f"{count(workers, 'worker')} started"
    return f"{PREFIX}{who} nodes joined after {seconds:.1f} s, {started}"


def _shape(plan: LaunchPlan) -> str:
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
    return f"{nodes}, {workers}" + (" here" if where.nodes > 1 else "")
