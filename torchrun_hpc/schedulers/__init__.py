"""Who started this process: one file per scheduler, asked in the order of `SOURCES`.

A source is a function ``detect(environ, hostname, *, terminal, pid)``. It returns
``None`` when its variables are not there, and raises `LaunchError` when they are there
but contradict each other or cannot be read. It is a pure function: no network, no
printing, no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import slurm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.job import Job

SOURCES = (slurm.detect,)


def detect(
    environ: Mapping[str, str],
    hostname: str,
    *,
    terminal: bool = False,
    pid: int | None = None,
) -> Job | None:
    """Ask every source in order; the first that knows this process wins.

    Args:
        environ: Environment of this process.
        hostname: Name of this machine, with or without a domain.
        terminal: Whether standard input is a terminal.
        pid: Number of this process.

    Raises:
        LaunchError: The variables of a source are contradictory or unreadable.
    """
    for source in SOURCES:
        job = source(environ, hostname, terminal=terminal, pid=pid)
        if job is not None:
            return job
    return None


def is_first_task(environ: Mapping[str, str]) -> bool:
    """Say whether this process reports what all tasks find; also if that is unclear."""
    return not slurm.is_later_task(environ)
