"""Preloading: a node imports torch once, and its workers are forks of that process.

`plan` decides whether a node preloads. `starter` splits a `fork_server` off the agent,
before the agent has threads. `requests` is the protocol between both. `imports` checks
that forks are possible. `worker` and `hidden` do in a fork what an exec would do.
`recorder` answers the agent's questions. `read_ahead` makes the import itself faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def keep(thing: object) -> None:
    """Prevent a thing from ever being freed, even at the interpreter's end."""
    import ctypes  # noqa: PLC0415 - only forks need it

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class SplitOff(BaseException):
    """Raised in the fork server's process, to leave the launcher's frames.

    `torchrun_hpc.main.main` continues with ``serve``, so there is almost no frame below
    the script's.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
