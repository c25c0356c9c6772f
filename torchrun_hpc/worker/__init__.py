"""Code that runs in the process of a worker, or for it.

With ``--hpc-preload`` a fork server (`fork_server`), which splits off from the agent
right after the import, starts the workers. `requests` is the protocol between agent and
fork server. `process` and `script` do in a fork what exec would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SplitOff(BaseException):
    """Raised in the fork server's process, to leave the launcher's frames.

    `torchrun_hpc.main.main` catches it and continues with ``serve``, so that almost no
    frame is below a worker's script.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
