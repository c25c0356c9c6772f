"""Code that runs in the process of a worker, or for it.

With ``--hpc-preload`` a `fork_server`, which splits off from the agent, starts the
workers. `process` and `script` do in a fork what exec would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SplitOff(BaseException):
    """Raised in the fork server's process, to leave the launcher's frames.

    `torchrun_hpc.main.main` continues with ``serve``, so a script has almost no frame
    below.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self.serve = serve
