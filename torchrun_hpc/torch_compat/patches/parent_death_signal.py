"""A worker ends when its agent ends, even if that is killed.

The workers are in sessions of their own, so they outlive an agent that could not end
them: killed by SIGKILL, or for want of memory. Slurm with cgroups cleans up behind it;
ssh, PBS and mpirun may not, and the next job finds the GPUs taken.

What a worker itself has started is not tied to it. Workers of a DataLoader look after
their parent and end within seconds; a program that a shell has started lives on,
unless the shell became it with ``exec``. The kernel unties what changes its user or
gains capabilities, as the set-user-ID starters of containers do. Workers that are
functions of a program, not commands, torch ties by itself, with SIGINT.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = "SubprocessHandler._popen"
REASON = "workers live on if it is killed (pytorch#76287)"
IS_FOR = capabilities.EVERY

_torch: Any = api
_MODULE, _POPEN = "subprocess", "Popen"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fits() -> bool:
    """Check that the workers are started here, and that nothing is run before them."""
    start = _torch.SubprocessHandler._popen
    code = start.__code__
    home = _home()
    return (
        sys.platform == "linux"
        and list(inspect.signature(start).parameters) == ["self", "args", "env"]
        and _POPEN in code.co_names
        and (has(home, _POPEN) or getattr(home, _MODULE) is subprocess)
        and "preexec_fn" not in str(code.co_consts)
    )


def apply(_plan: object) -> None:
    """Let each worker ask the kernel for its end."""
    home = _home()
    by_name = has(home, _POPEN)  # as in newer ones
    original: Any = getattr(home, _POPEN) if by_name else subprocess.Popen
    # Bound here: between fork and exec there is no loading of libraries.
    prctl = ctypes.CDLL(None).prctl

    @functools.wraps(original)
    def popen(*args: Any, **options: Any) -> Any:
        return original(*args, preexec_fn=_tie(prctl, os.getpid()), **options)

    if by_name:
        replace(home, _POPEN, popen)
    else:
        names = {**vars(subprocess), _POPEN: popen}
        replace(home, _MODULE, SimpleNamespace(**names))


def _home() -> Any:
    """Return the module in which workers are started."""
    return sys.modules[_torch.SubprocessHandler.__module__]


def _tie(prctl: Callable[..., int], agent: int) -> Callable[[], None]:
    """Return what a worker does before it becomes the script."""

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it has ended before this
            os._exit(1)

    return tie
