"""Environment variables, read with messages that a person can use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

# How much of a variable a message quotes.
_SHOWN = 200


class Variables:
    """The variables of one launcher or scheduler.

    Args:
        environ: Environment of the process. An empty variable counts as unset.
        source: Whose they are, as a person writes it.
        family: What their names have in common.
    """

    def __init__(self, environ: Mapping[str, str], source: str, family: str) -> None:
        self.environ = environ
        self._source = source
        self._family = family

    def first(self, *names: str) -> str:
        """Return the first of the variables that is set, or an empty text."""
        return next(filter(None, map(self.environ.get, names)), "")

    def name(self, *names: str) -> str:
        """Return the name of the first of the variables that is set.

        Raises:
            LaunchError: None is.
        """
        name = next(filter(self.environ.get, names), "")
        if name:
            return name
        raise LaunchError(
            "HPC020",
            f"{names[0]} is not set, although other variables say that {self._source} "
            "started this process: a container or a wrapper has dropped it, or the "
            f"others are of another job. Let all {self._family} variables through, "
            "unset them, or type --standalone for one node",
            everywhere=True,
        )

    def shown(self, *names: str) -> str:
        """Write the first of the variables that is set, as a message quotes it."""
        name = next(filter(self.environ.get, names), names[0])
        value = self.first(name)
        short = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return f"{name}={short!r}"

    def integer(self, *names: str) -> int:
        """Return the first of the variables that is set, as a whole number.

        Raises:
            LaunchError: None is set, or it is not a number.
        """
        name = self.name(*names)
        value = self.environ[name]
        if not re.fullmatch("[0-9]{1,9}", value):
            text = f"{self.shown(name)} is not a whole number"
            raise LaunchError("HPC021", text, everywhere=True)
        return int(value)

    def integer_or_zero(self, *names: str) -> int:
        """Return the first of the variables that is set as a number, 0 if none is."""
        return self.integer(*names) if self.first(*names) else 0
