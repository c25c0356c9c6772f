"""A value and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: an option, a variable, a rule."""

    value: Any
    source: str

    def __str__(self) -> str:
        """Write it as the user did: ``--nnodes=4``, a flag by its name alone."""
        return self.source if self.value is True else f"{self.source}={self.value}"
