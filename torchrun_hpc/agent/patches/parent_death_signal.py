"""A worker ends when its agent ends, even if that is killed.

Workers have their own sessions, so they outlive a killed agent. Slurm with cgroups
cleans up. ssh, PBS and mpirun sometimes do not, and the next job finds the GPUs taken.

A worker's own children do not end with it. DataLoader workers check their parent. A
program that a shell has started continues, unless the shell used ``exec``. The kernel
clears the setting for a process that changes its user or gains capabilities, as
set-user-ID container starters do. For workers that are Python functions, torch itself
sets SIGINT.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.agent.patches.replacing import has, replace, takes, wrap
from torchrun_hpc.host import capabilities
from torchrun_hpc.preload.affinity import end_with_parent

TARGET = "SubprocessHandler._popen"
REASON = "workers keep running if the agent is killed (pytorch#76287)"
IS_FOR = capabilities.EVERY

_torch: Any = api
_MODULE, _POPEN = "subprocess", "Popen"


def fits() -> bool:
    """Check that the workers are started here, and that no code runs before them."""
    handler, home = _torch.SubprocessHandler, _home()
    return (
        sys.platform == "linux"
        and takes(handler, "_popen", "self", "args", "env")
        and capabilities.uses(handler._popen, _POPEN)
        and (has(home, _POPEN) or getattr(home, _MODULE) is subprocess)
        and "preexec_fn" not in str(handler._popen.__code__.co_consts)
    )


def apply(*_: object) -> None:
    """Let each worker ask the kernel to end it with its parent."""
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
