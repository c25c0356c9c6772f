"""``--hpc-debug``: what torch logs, on every node, with host and rank on each line.

Torch reads its variables when it is imported, and C++ writes past Python: so the
program starts once more with the variables set, and all that it and its workers write
to stderr goes through a pipe that names them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each of these sets a level of its own, so that their common parent has no say.
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.distributed_c10d",
)

VARIABLES = {
    "TORCH_LOGS": ",".join(f"+{module}" for module in _MODULES),
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    # With --tee, which is set where neither it nor --redirects is typed.
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
}

_STDERR = 2
_DRAIN_S = 2.0


def unset(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set; what the user has set stays."""
    return {k: v for k, v in VARIABLES.items() if not environ.get(k)}


def start_again(environ: Mapping[str, str]) -> None:
    """Replace this process by the same one with another environment."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environ))  # noqa: S606


def put_in_front(prefix: str) -> None:
    """Begin each line of stderr, of this process and its children, with a prefix."""
    terminal = os.dup(_STDERR)
    source, sink = os.pipe()
    sys.stderr.flush()
    os.dup2(sink, _STDERR)
    os.close(sink)
    copier = threading.Thread(
        target=_copy, args=(source, terminal, prefix.encode()), daemon=True
    )
    copier.start()
    # After the interpreter has printed its last traceback.
    atexit.register(_end, terminal, copier)


def _copy(source: int, terminal: int, prefix: bytes) -> None:
    with open(source, "rb") as lines, contextlib.suppress(OSError):
        for line in lines:
            os.write(terminal, prefix + line)


def _end(terminal: int, copier: threading.Thread) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os.dup2(terminal, _STDERR)
    copier.join(_DRAIN_S)
