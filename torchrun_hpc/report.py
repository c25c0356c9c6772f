"""Everything that a person reads. It goes to stderr: stdout belongs to the script."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

PREFIX = "torchrun_hpc: "


def line(text: str, stream: TextIO) -> None:
    """Write one line, in one piece: other nodes write to the same terminal."""
    stream.write(f"{PREFIX}{text}\n")
    stream.flush()


def start_line(plan: LaunchPlan) -> str:
    """Say in one line what is about to start."""
    nodes = len(plan.nodes)
    parts = [f"{_count(nodes, 'node')} x {_count(plan.workers, 'worker')}"]
    if not plan.nodes:
        parts = [_count(plan.workers, "worker") + " here"]
    parts.append(plan.title)
    if plan.endpoint:
        address = plan.listen[0] if plan.listen else None
        number = f" ({address})" if address and address not in plan.endpoint else ""
        parts.append(f"rendezvous at {plan.endpoint}{number}")
    if plan.interface:
        parts.append(f"interface {plan.interface}")
    return "; ".join([", ".join(parts), *plan.notes])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
