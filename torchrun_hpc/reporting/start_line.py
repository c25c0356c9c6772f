"""The lines that node 0 prints at a start: no messages, so without codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc import __version__
from torchrun_hpc.errors import count, split_copied, to_copy
from torchrun_hpc.planning.messages import NO_SCHEDULER
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan


def start_line(plan: LaunchPlan) -> str:
    """Describe the launch in one line; then come the notes' lines to copy."""
    meeting, title = plan.meeting, plan.messages.title
    is_alone = meeting.nodes == 1 and title == NO_SCHEDULER
    if is_alone and not plan.mode.is_direct:
        parts = [f"{count(plan.workers.number, 'worker')} on this machine"]
    else:
        parts = [_shape(plan), title]
    if meeting.endpoint and (meeting.nodes > 1 or meeting.may_grow):
        is_default = meeting.is_ours or plan.mode.is_direct
        what = "meeting" if is_default else f"{meeting.backend} rendezvous"
        over = f" over {meeting.interface}" if meeting.interface else ""
        parts.append(f"{what} at {meeting.endpoint}{over}")
    if meeting.site:
        parts.append(f"site {meeting.site.value}")
    copied = ""
    for note in plan.messages.notes:
        text, lines = split_copied(note.text)
        parts.append(f"note[{note.code}]: {text}")
        copied += to_copy("\n".join(lines))
    return f"torchrun_hpc {__version__}: {'; '.join(parts)}{copied}"


def joined_line(plan: LaunchPlan, nodes: int, workers: int, seconds: float) -> str:
    """Return the line about how many nodes have joined, and how long that took."""
    every = plan.meeting.active
    who = f"all {every}" if nodes == every else f"{nodes} of {every}"
    started = f"{count(workers, 'worker')} started"
    return f"{PREFIX}{who} nodes joined after {seconds:.1f} s, {started}"


def _shape(plan: LaunchPlan) -> str:
    meeting, workers = plan.meeting, plan.workers
    nodes = count(meeting.active, "node")
    if meeting.spares.number:
        nodes += f" and {count(meeting.spares.number, 'spare')}"
    if workers.size == workers.number * meeting.nodes:
        return f"{nodes} x {count(workers.number, 'task')}"
    if workers.size:
        return f"{nodes}, {count(workers.size, 'task')}"
    if 0 < meeting.fewest < meeting.active:
        nodes = f"{meeting.fewest} to {nodes}"
    on_node = " here" if meeting.nodes > 1 else ""
    return f"{nodes}, {count(workers.number, 'worker')}{on_node}"
