"""A process that ends when its parent ends, even if that is killed.

The agent may also look at its stack, where Linux allows that to ancestors only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # for a process and its children, under Yama's mode 1


def end_with_parent(parent: int, agent: int = 0) -> Callable[[], None]:
    """Return a function that lets the process that calls it end with its parent.

    It may be called between fork and exec: no library is loaded then.

    Args:
        parent: Number of the process that forks it.
        agent: Number of the agent's process, if it is another one.
    """
    prctl = ctypes.CDLL(None).prctl

    def end_with_it() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_PTRACER, agent or parent, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before this
            os._exit(1)

    return end_with_it
