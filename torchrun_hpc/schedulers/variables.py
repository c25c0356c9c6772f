"""Environment variables, and messages about wrong ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 200  # characters of a variable that a message quotes


def whole_number(text: str) -> int | None:
    """Read a number of at most nine digits; return ``None`` for another text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


class Variables:
    """The variables of one launcher or scheduler; an empty one counts as unset."""

    def __init__(self, environ: Mapping[str, str], source: str, family: str) -> None:
        self.environ = environ
        self._source = source
        self._family = family

    def first(self, *names: str) -> str:
        """Return the value of the first set variable, or an empty text."""
        return next(filter(None, map(self.environ.get, names)), "")

    def name(self, *names: str) -> str:
        """Return the name of the first set variable; it is an error if none is set."""
        name = next(filter(self.environ.get, names), "")
        if name:
            return name
        raise LaunchError(
            "HPC020",
            f"{names[0]} is not set, but other variables show that {self._source} "
            "started this process. A container or a wrapper has removed it, or the "
            "others come from another job. "
            f"Pass all {self._family} variables on, or unset them. "
            "For one node, pass --standalone",
            everywhere=True,
        )

    def shown(self, *names: str) -> str:
        """Write name and value of the first set variable, for a message."""
        name = next(filter(self.environ.get, names), names[0])
        value = self.first(name)
        short = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return f"{name}={short!r}"

    def integer(self, *names: str) -> int:
        """Return the first set variable as a whole number; refuse another text."""
        name = self.name(*names)
        number = whole_number(self.environ[name])
        if number is None:
            raise self.damaged(name, "is not a whole number")
        return number

    def damaged(self, name: str, problem: str) -> LaunchError:
        """Return the error about a changed variable."""
        text = f"{self.shown(name)} {problem}. Find what has changed it"
        return LaunchError("HPC021", text, everywhere=True)

    def integer_or_zero(self, *names: str) -> int:
        """Return the value of the first set variable as a number; 0 if none is set."""
        return self.integer(*names) if self.first(*names) else 0
