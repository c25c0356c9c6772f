"""A value and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A value and its source: an option, a variable, or a rule."""

    value: Any
    source: str

    def __str__(self) -> str:
        """Write it like the user: ``--nnodes=4``, or only the name of a flag."""
        return self.source if self.value is True else f"{self.source}={self.value}"
