"""A worker ends when its agent ends, even if that is killed.

The workers are in sessions of their own, so they outlive an agent that could not end
them: killed by SIGKILL, or for want of memory. Slurm with cgroups cleans up behind it;
ssh, PBS and mpirun may not, and the next job finds the GPUs taken.

What a worker itself has started does not end with it. Workers of a DataLoader look
after their parent and end within seconds; a program that a shell has started lives on,
unless the shell became it with ``exec``. The kernel clears the setting for a process
that changes its user or gains capabilities, as the set-user-ID starters of containers
do. For workers that are functions of a program, not commands, torch sets it by itself,
to SIGINT.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace, takes, wrap
from torchrun_hpc.worker.parent import end_with_parent

TARGET = "SubprocessHandler._popen"
REASON = "workers live on if it is killed (pytorch#76287)"
IS_FOR = capabilities.EVERY

_torch: Any = api
_MODULE, _POPEN = "subprocess", "Popen"


def fits() -> bool:
    """Check that the workers are started here, and that nothing is run before them."""
    handler, home = _torch.SubprocessHandler, _home()
    return (
        sys.platform == "linux"
        and takes(handler, "_popen", "self", "args", "env")
        and capabilities.uses(handler._popen, _POPEN)
        and (has(home, _POPEN) or getattr(home, _MODULE) is subprocess)
        and "preexec_fn" not in str(handler._popen.__code__.co_consts)
    )


def apply(*_: object) -> None:
    """Let each worker ask the kernel for its end."""
    home = _home()
    if has(home, _POPEN):  # as in newer ones
        wrap(home, _POPEN, _popen)
    else:
        popen = functools.partial(_popen, subprocess.Popen)
        replace(home, _MODULE, SimpleNamespace(**{**vars(subprocess), _POPEN: popen}))


def _popen(original: Any, *args: Any, **options: Any) -> Any:
    return original(*args, preexec_fn=end_with_parent(os.getpid()), **options)


def _home() -> Any:
    return sys.modules[_torch.SubprocessHandler.__module__]
