"""When a wait is reported; and, until its callers have changed, `console.write`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import output
from torchrun_hpc.reporting.start_line import start_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.errors import Message
    from torchrun_hpc.reporting.description import Description

__all__ = ["line", "output", "print_dry_run", "start_line"]

# Seconds after which a wait is reported, for the first time and again.
FIRST_REPORT = 10.0
NEXT_REPORT = 30.0
ALONE = 60.0  # by a node that does not speak for all


def line(message: Message, _stream: TextIO | None, kind: str = "") -> None:
    """Write one line to stderr."""
    console.write(message, kind)


def print_dry_run(
    form: str, nodes: Sequence[Description], missing: Sequence[str], limit: int
) -> None:
    """Print what would be done."""
    from torchrun_hpc.reporting import tables  # noqa: PLC0415 - slow to import

    tables.print_dry_run(form, nodes, missing, limit)
