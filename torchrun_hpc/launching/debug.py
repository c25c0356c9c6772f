"""``--hpc-debug``: what torch logs, on every node, with host and rank on each line.

Torch reads its variables when it is imported, and its C++ writes past Python, up to
the end of the process. So where an option asks for it, the program starts once more
with `SWITCH` set, and all that it and its workers write to stderr goes through a
process that names them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import MutableMapping

# The option's variable, by torchrun's rule, and its value where this module set it:
# that is not for the workers.
SWITCH = "PET_HPC_DEBUG"
_AGAIN = "2"

# Each of these sets a level of its own, so that their common parent has no say.
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.distributed_c10d",
    "torchrun_hpc.rendezvous.client",
)

VARIABLES = {
    "TORCH_LOGS": ",".join(f"+{module}" for module in _MODULES),
    # Not DETAIL: that is no logging, it checks each collective in a process group of
    # its own, and jobs hang (pytorch#129672) or, DDP on gloo in torch 2.13, crash.
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    # For --tee, which is set where neither it nor --redirects is typed.
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
}

_STDERR = 2
_COPY = """
import os, sys
for line in sys.stdin.buffer:
    try:
        os.write(1, os.fsencode(sys.argv[1]) + line)
    except OSError:
        pass  # those who write here are not to end of it
"""

_copier: subprocess.Popen[bytes] | None = None


def is_wanted(environ: MutableMapping[str, str]) -> bool:
    """Say whether the environment asks for it, before torch is imported."""
    return environ.get(SWITCH, "0") not in {"", "0"}


def switch_on(environ: MutableMapping[str, str], host: str, rank: int | None) -> None:
    """Set the variables that are not set, and name this node on each line.

    Args:
        environ: Environment of this process; changed.
        host: Name of this machine.
        rank: Rank of this node; ``None`` if it is not known.
    """
    global _copier  # noqa: PLW0603 - a process has one stderr
    if _copier is not None:
        return
    if environ.get(SWITCH) == _AGAIN:
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


def start_again(environ: MutableMapping[str, str]) -> None:
    """Replace this process by the same one that logs from its beginning."""
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**environ, SWITCH: _AGAIN})  # noqa: S606


def is_on() -> bool:
    """Say whether this process has been switched on."""
    return _copier is not None
