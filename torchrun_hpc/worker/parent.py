"""A process that ends when its parent ends, even if that is killed.

The agent can also read its stack on systems where Linux allows this only to ancestors.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

from torchrun_hpc.worker.affinity import set_cpus

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # for a process and its children, under Yama's mode 1


def end_with_parent(parent: int, agent: int = 0) -> Callable[[], None]:
    """Return a function that lets the calling process end with its parent.

    It loads no library, so it can be called between fork and exec. ``agent`` is 0 if it
    is the parent. The process gets the CPUs of this thread again: in a fork, OpenMP
    libraries of Intel and LLVM have changed them (``__kmp_atfork_child``).
    """
    prctl, cpus = ctypes.CDLL(None).prctl, os.sched_getaffinity(0)

    def end_with_it() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_PTRACER, agent or parent, 0, 0, 0)
        set_cpus(cpus)
        if os.getppid() != parent:  # it has ended before this
            os._exit(1)

    return end_with_it
