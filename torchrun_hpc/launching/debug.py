"""``--hpc-debug``: torch's log from every node, with host and rank on each line.

Torch's C++ code writes to stderr until the process ends. So a separate process adds the
prefix.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torchrun_hpc import environment, programs
from torchrun_hpc.planning import network_env
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers import process

if TYPE_CHECKING:
    import subprocess

_STDERR = 2

_copier: subprocess.Popen[bytes] | None = None


def switch_on(host: str, rank: int | None) -> None:
    """Set the unset variables, and prefix each line of stderr with this node."""
    global _copier  # noqa: PLW0603 - a process has one stderr
    if _copier is not None:
        return
    environment.update(network_env.debugging(process.environment()))
    node = "" if rank is None else f" node {rank}"
    streams.flush(sys.stderr)
    prefix = f"{host.partition('.')[0]}{node}: "
    # It ends with the last writer.
    _copier = programs.start(
        "write_prefix", prefix, stdin=programs.PIPE, stdout=_STDERR
    )
    if _copier.stdin is not None:
        os.dup2(_copier.stdin.fileno(), _STDERR)
        _copier.stdin.close()
