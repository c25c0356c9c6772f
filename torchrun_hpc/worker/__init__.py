"""What runs in, or for, the process of a worker.

With ``--hpc-preload`` a fork server (`fork_server`) starts the workers: a process that
has split off from the agent right after the import. `requests` is what the agent tells
it, and hears from it; `process` and `script` are what a worker does in the place of
exec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SplitOff(BaseException):
    """Raised in the fork server's process, to leave all that the launcher has begun.

    `torchrun_hpc.main.main` catches it, and goes on with ``serve``. So there is next to
    nothing below the frame of a worker's script.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
