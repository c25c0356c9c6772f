"""Everything that a person reads. It goes to stderr: stdout belongs to the script."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from torchrun_hpc.variables import GLOO

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

PREFIX = "torchrun_hpc: "

# Seconds after which a wait is reported, for the first time and again.
FIRST_REPORT = 10.0
NEXT_REPORT = 60.0


def line(text: str, stream: TextIO) -> None:
    """Write one line, in one piece: other nodes write to the same terminal."""
    stream.write(f"{PREFIX}{text}\n")
    stream.flush()


def start_line(plan: LaunchPlan) -> str:
    """Say in one line what is about to start."""
    parts = [
        f"{_count(plan.nodes, 'node')} x {_count(plan.workers, 'worker')}",
        plan.title,
    ]
    if plan.endpoint:
        address = plan.listen[0] if plan.listen else ""
        number = f" ({address})" if address not in plan.endpoint else ""
        parts.append(f"rendezvous at {plan.endpoint}{number}")
    interface = plan.environment.get(GLOO)
    if interface:
        parts.append(f"interface {interface.value}")
    return "; ".join([", ".join(parts), *plan.notes])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
