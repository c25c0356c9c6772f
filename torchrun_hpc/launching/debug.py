"""``--hpc-debug``: what torch logs, on every node, with host and rank on each line.

Torch reads its variables when it is imported, and its C++ code writes to the file
descriptor of stderr up to the end of the process. So if the option is given on the
command line, the program starts once more with `SWITCH` set. All that it and its
workers write to stderr goes through a process that puts the node in front of each line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.planning.debug_env import VARIABLES
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

# The option's variable, by torchrun's rule. If this module has set it, its value is
# `_STARTED_AGAIN`, and the workers do not inherit it.
SWITCH = "PET_HPC_DEBUG"
_STARTED_AGAIN = "2"

_STDERR = 2
_COPY = """
import os, sys
for line in sys.stdin.buffer:
    try:
        os.write(1, os.fsencode(sys.argv[1]) + line)
    except OSError:
        pass  # a writer must not die of SIGPIPE
"""

_copier: subprocess.Popen[bytes] | None = None


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the environment asks for it, before torch is imported."""
    return environ.get(SWITCH, "0") not in {"", "0"}


def switch_on(environ: MutableMapping[str, str], host: str, rank: int | None) -> None:
    """Set the variables that are not set, and write this node in front of each line.

    Args:
        environ: Environment of this process; changed.
        host: Name of this machine.
        rank: Rank of this node; ``None`` if it is not known.
    """
    global _copier  # noqa: PLW0603 - a process has one stderr
    if _copier is not None:
        return
    if environ.get(SWITCH) == _STARTED_AGAIN:
        del environ[SWITCH]
    for name, value in VARIABLES.items():
        if not environ.get(name):
            environ[name] = value
    node = "" if rank is None else f" node {rank}"
    streams.flush(sys.stderr)
    # In a session of its own: Ctrl-C is not for it, it ends with the last writer.
    _copier = subprocess.Popen(  # noqa: S603
        [sys.executable, "-ISc", _COPY, f"{host.partition('.')[0]}{node}: "],
        stdin=subprocess.PIPE,
        stdout=_STDERR,
        start_new_session=True,
    )
    if _copier.stdin is not None:
        os.dup2(_copier.stdin.fileno(), _STDERR)
        _copier.stdin.close()


def start_again(environ: Mapping[str, str]) -> None:
    """Replace this process by the same command, which then logs from its beginning."""
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**environ, SWITCH: _STARTED_AGAIN})  # noqa: S606


def is_on() -> bool:
    """Return whether `switch_on` has been called in this process."""
    return _copier is not None
