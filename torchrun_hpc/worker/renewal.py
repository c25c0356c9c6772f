"""Variables that a module would read in this worker, if it were imported there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import Message
from torchrun_hpc.planning.network_env import CPP_LOG_LEVEL
from torchrun_hpc.planning.resources import OMP
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers.process import environment
from torchrun_hpc.worker.read_at_import import is_read

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MKL = "MKL_NUM_THREADS"
_LOGS = "TORCH_LOGS"

# The launcher can set these for the workers after the import: torch reads them again.
READ_AGAIN = (OMP, CPP_LOG_LEVEL)

_INIT_LOGGING = "_ZN3c1011initLoggingEv"  # c10::initLogging(), c10/util/Logging.h

# NumPy and its OpenBLAS read variables that begin so.
_OF_NUMPY = ("GOTO_", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_")


class Renewal:
    """Lets modules read their variables again when they appear.

    ``before`` are the variables at the import. Those at the script's start are the
    launcher's: it has compared them.
    """

    def __init__(self, before: Mapping[str, str]) -> None:
        self._before = before
        self._start = dict(environment())

    def __call__(self, shown: Collection[str]) -> None:
        """Renew the state of ``shown`` modules; warn of what they cannot read again."""
        before, now = self._before, environment()
        modules: dict[str, Any] = sys.modules
        read = filter(is_read, {*before, *now})
        changed = {name for name in read if before.get(name) != now.get(name)}
        if "numpy.random" in shown:
            modules["numpy.random"].seed()
        if "torch" in shown:
            torch = modules["torch"]
            torch.default_generator.seed()  # no GPU has a generator yet
            # The script may have configured loggers that torch's import configures.
            changed = {n for n in changed | {_LOGS} if not _is_read_again(torch, n)}
        else:
            changed = {name for name in changed if name.startswith(_OF_NUMPY)}
        late = sorted(n for n in changed if self._start.get(n) != now.get(n))
        if late and now.get("RANK") == "0":
            text = f"{', '.join(late)} changed after the launcher's import of PyTorch. "
            text += "Export variables in the job script, or pass --hpc-preload=none"
            console.write(Message("HPC249", text), "warning")


def read_log_level() -> None:
    """Let torch's C++ code read ``TORCH_CPP_LOG_LEVEL`` again, to print less."""
    library = Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libc10.so"
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(str(library)), _INIT_LOGGING)()


def _is_read_again(torch: Any, name: str) -> bool:
    """Let torch read a variable again; return whether it could."""
    try:
        if name in (OMP, _MKL):
            # MKL's variable counts. It takes no more threads than CPUs.
            number = int(environment().get(_MKL) or environment().get(OMP, ""))
            torch.set_num_threads(min(number, len(os.sched_getaffinity(0))))
        elif name in (_LOGS, "TORCH_LOGS_OUT"):
            torch._logging._internal._init_logs()  # noqa: SLF001
        elif name == CPP_LOG_LEVEL:
            read_log_level()
        elif name == "TORCH_DISTRIBUTED_DEBUG":
            torch.distributed.set_debug_level_from_env()
        elif name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
            (newer or torch.cuda.memory._set_allocator_settings)(environment()[name])  # noqa: SLF001
        else:
            return False
    except Exception:  # noqa: BLE001 - another release of torch, or a wrong value
        return False
    return True
