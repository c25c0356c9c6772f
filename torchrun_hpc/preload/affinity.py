"""What ties a process to its CPUs, and to its parent.

See sched_setaffinity(2) and prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrun_hpc.planning.workers import Share


# The CPUs to which an import has bound a thread of this process.
chosen_by_import: set[int] = set()


def set_cpus(cpus: Iterable[int]) -> None:
    """Give this thread these CPUs, unless the kernel has taken them away."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def restored_after_import() -> Iterator[None]:
    """Give this thread its CPUs again after a successful import.

    OpenMP libraries can bind the thread that loads them: see ``gomp_init_affinity`` in
    GCC's ``libgomp/config/linux/affinity.c``.
    """
    before = os.sched_getaffinity(0)
    yield
    if (after := os.sched_getaffinity(0)) != before:
        chosen_by_import.update(after)
        set_cpus(before)


@contextlib.contextmanager
def bound(share: Share, worker: str) -> Iterator[None]:
    """Bind this thread for a moment: processes that it starts then remain bound."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, share.cpus)
    except OSError as error:  # all are offline, or no longer this job's
        text = f"{worker} on {socket.gethostname()} is not bound to CPUs "
        text += f"{share.cpu_list}: this job has none of them now ({error.strerror})"
        console.write(Message("HPC223", text), "warning")
    try:
        yield
    finally:
        set_cpus(before)


# --- the parent -----------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # for a process and its children, under Yama's mode 1


def end_with_parent(parent: int, agent: int = 0) -> Callable[[], None]:
    """Return a function that lets the calling process end with its parent.

    The function loads no library, so it can be called between fork and exec. ``agent``
    is 0 if the parent is the agent. The process gets the CPUs of this thread again: in
    a fork, Intel's and LLVM's OpenMP libraries change them (``__kmp_atfork_child``).
    """
    prctl, cpus = ctypes.CDLL(None).prctl, os.sched_getaffinity(0)

    def end_with_it() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(_PR_SET_PTRACER, agent or parent, 0, 0, 0)
        set_cpus(cpus)
        if os.getppid() != parent:  # it has ended before this
            os._exit(1)

    return end_with_it
