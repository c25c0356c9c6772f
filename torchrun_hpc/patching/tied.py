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
import importlib
import inspect
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc.patching.replacing import has, replace

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULE = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)
_POPEN = "Popen"

TARGET = f"{_MODULE}.{_POPEN}"
REASON = "workers live on if it is killed (pytorch#76287)"
RELEASES = ">=2.9"  # up to 2.8 it is called subprocess.Popen there

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fits() -> bool:
    """Check that the workers are started here, and that nothing is run before them."""
    module = importlib.import_module(_MODULE)
    handler = module.SubprocessHandler
    code = handler._popen.__code__
    return (
        sys.platform == "linux"
        and has(module, _POPEN)
        and list(inspect.signature(handler._popen).parameters)
        == ["self", "args", "env"]
        and _POPEN in code.co_names
        and "preexec_fn" not in str(code.co_consts)
    )


def apply(_plan: object) -> None:
    """Let each worker ask the kernel for its end."""
    module = importlib.import_module(_MODULE)
    original = getattr(module, _POPEN)
    # Bound here: between fork and exec there is no loading of libraries.
    prctl = ctypes.CDLL(None).prctl

    @functools.wraps(original)
    def popen(*args: Any, **options: Any) -> Any:
        return original(*args, preexec_fn=_tie(prctl, os.getpid()), **options)

    replace(module, _POPEN, popen)


def _tie(prctl: Callable[..., int], agent: int) -> Callable[[], None]:
    """Return what a worker does before it becomes the script."""

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:  # it has ended before this
            os._exit(1)

    return tie
