"""How the process of the fork server leaves the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SplitOff(BaseException):
    """Raised in the new process, to leave all that the launcher has begun.

    `torchrun_hpc.main.main` catches it, and goes on with ``serve``. So there is next to
    nothing below the frame of a worker's script.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
