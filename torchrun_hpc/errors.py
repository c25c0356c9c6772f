"""Messages to the user, exit codes, and values with their source.

``messages.toml`` explains the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# Exit codes: torchrun's, and the shell's for signals.
FAILED = 1  # the job
WRONG_USE = 2  # of the environment or the command line
KILLED = 128  # plus the number of the signal
INTERRUPTED = 130  # by SIGINT


@dataclass(frozen=True)
class Message:
    """A text for the user, and its code: ``HPC`` and three digits.

    The text ends with `to_copy` if there is a line to copy.
    """

    code: str
    text: str

    def __str__(self) -> str:
        """Return code and text on one line."""
        return f"{self.code} {on_one_line(self.text)}"


_COPIED = "\n    "


def to_copy(lines: str) -> str:
    """Return the end of a message: a line to copy, or several to choose from."""
    return "".join(_COPIED + line for line in lines.splitlines())


def split_copied(text: str) -> tuple[str, list[str]]:
    """Split a message into its text, and the lines to copy."""
    first, *lines = text.split(_COPIED)
    return first, lines


def on_one_line(text: str) -> str:
    """Return a message on one line, for a place that has only one."""
    first, lines = split_copied(text)
    return " ".join(filter(None, (first, "   # or: ".join(lines))))


class LaunchError(Exception):
    """A fault that the user can correct; its text is the whole message.

    Args:
        code: ``HPC`` and three digits.
        message: What is wrong, with values and their source, and what to do.
        everywhere: Whether all tasks find the same fault; then only one reports it.
        others_know: Whether the other nodes already know about the fault, or cannot be
            told.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        everywhere: bool = False,
        others_know: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.everywhere = everywhere
        self.others_know = others_know


class EmbeddedLaunchError(LaunchError, ValueError):
    """A `LaunchError` in a calling program; a ``ValueError``, like torch's.

    Its text begins with the code, because a traceback shows only the text.
    """

    def __str__(self) -> str:
        """Return code and text."""
        return f"{self.code} {super().__str__()}"


def near(wanted: str, names: Iterable[str]) -> str:
    """Return a did-you-mean question for an unknown name; empty if none is near."""
    import difflib  # noqa: PLC0415 - slow to import

    guesses = difflib.get_close_matches(wanted, [*names], n=1)
    return f"Did you mean {guesses[0]}?" if guesses else ""


def choices(wanted: str, names: Collection[str]) -> str:
    """List the names to choose from, after a guess at the wanted one."""
    guess = near(wanted.lower(), names)
    return f"{guess} There are: {', '.join(names)}".strip()


def shortened(text: str, most: int) -> str:
    """Return a text for a message; after ``most`` characters, it ends with ``...``."""
    return text if len(text) <= most else f"{text[:most]}..."


def count(number: int, noun: str) -> str:
    """Write a number and what it counts: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A value and its source: an option, a variable, or a rule."""

    value: Any
    source: str

    def __str__(self) -> str:
        """Write it as the user did: ``--nnodes=4``; of a flag, only the name."""
        return self.source if self.value is True else f"{self.source}={self.value}"
