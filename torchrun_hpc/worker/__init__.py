"""Code that runs in the process of a worker, or for it.

With preloading, a `fork_server`, which splits off from the agent, starts the
workers. `process` and `script` do in a fork what exec would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def keep(thing: object) -> None:
    """Let nothing free a thing, even at the interpreter's end."""
    import ctypes  # noqa: PLC0415 - only forks need it

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class SplitOff(BaseException):
    """Raised in the fork server's process, to leave the launcher's frames.

    `torchrun_hpc.main.main` continues with ``serve``, so a script has almost no frame
    below.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
