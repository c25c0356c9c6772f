"""A process that ends when its parent ends, even if that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> Callable[[], None]:
    """Return a function that lets the process that calls it end with its parent.

    It may be called between fork and exec: no library is loaded then.

    Args:
        parent: Number of the process that forks it.
    """
    prctl = ctypes.CDLL(None).prctl

    def end_with_it() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before this
            os._exit(1)

    return end_with_it
