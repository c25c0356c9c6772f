"""Messages on stderr, which node writes them, and a command's output on stdout."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.errors import WRONG_USE, LaunchError, Message, split_copied
from torchrun_hpc.reporting import streams
from torchrun_hpc.wire import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


PREFIX = "torchrun_hpc: "
DETAIL = f"{PREFIX}    "  # before a line that belongs to the previous one

_LONGEST = 2**16  # characters of a line: the names of thousands of nodes


# Functions that get each message and its kind. Stderr then gets nothing. The doctor's
# launch passes its messages to the doctor in this way.
listeners: list[Callable[[Message, str], None]] = []


def write(
    message: Message, kind: str = "note", details: Sequence[str] = (), host: str = ""
) -> None:
    """Write an ``error``, ``warning`` or ``note`` to stderr: ``error[HPC125]: ...``.

    ``host`` names the node if the message is about one node only.
    """
    for listener in listeners:
        with contextlib.suppress(OSError):  # nothing is raised, as by `write_text`
            listener(message, kind)
    text = f"on {host}: {message.text}" if host else message.text
    write_text(f"{PREFIX}{kind}[{message.code}]: {text}", details)


def refuse(error: LaunchError) -> int:
    """Write the error of a command that starts nothing, and return its exit code."""
    write(Message(error.code, str(error)), "error")
    return WRONG_USE


def write_text(text: str, details: Sequence[str] = ()) -> None:
    """Write a line to stderr, with its lines to copy, and details. Raise nothing.

    This is one write, because nodes share a terminal. Control characters are replaced,
    because parts can come from the network.
    """
    if listeners:
        return
    line, copied = split_copied(text)
    lines = (line, *(f"    {each}" for each in copied), *details)
    written = (printable(each, _LONGEST) for each in lines)
    streams.write("".join(f"{line}\n" for line in written), sys.stderr)


def output(text: str) -> None:
    """Write to stdout; raise `LaunchError` if there is none, or it is full."""
    if sys.stdout is None:
        text = "standard output is closed. Remove >&- from the command"
        raise LaunchError("HPC101", text)
    try:
        # Names of files and centres can have characters that the encoding lacks.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Python must not try to write the rest again at exit.
        streams.discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # as with | head
            text = f"cannot print to standard output: {error.strerror}"
            text += ". Print to another place: > FILE"
            raise LaunchError("HPC101", text) from None


# --- the reporter ---------------------------------------------------------------------


def is_reporter(rank: int, absent: Collection[int] = ()) -> bool:
    """Return whether this node or task reports for all; the ``absent`` ones cannot."""
    return rank == next(r for r in itertools.count() if r not in absent)


def reports_wait_for(rank: int, node: int | None) -> bool:
    """Return whether this node reports its wait for another node.

    If not all nodes know it (``None``), the first two report.
    """
    return rank in (0, 1) if node is None else is_reporter(rank, {node})
