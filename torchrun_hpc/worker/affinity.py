"""The CPUs of a worker, by ``sched_setaffinity(2)``."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import console

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchrun_hpc.planning.workers import Share

# The CPUs to which an import has bound a thread of this process; empty if none has.
chosen_by_import: set[int] = set()


def set_cpus(cpus: Iterable[int]) -> None:
    """Give this thread these CPUs, unless the kernel has taken them meanwhile."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


@contextlib.contextmanager
def restored_after_import() -> Iterator[None]:
    """Give this thread its CPUs again after an import, unless that fails.

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
    """Bind this thread for a moment: a process started meanwhile stays there."""
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
