"""A value and its source.

All rooms use this class, so its module imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A value and its source: an option, a variable, or a rule."""

    value: Any
    source: str

    def __str__(self) -> str:
        """Write it as the user did: ``--nnodes=4``; of a flag, only the name."""
        return self.source if self.value is True else f"{self.source}={self.value}"
