"""Preloaded modules that a script has not imported yet.

After an exec, a script does not find them in `sys.modules`, and their loggers do not
exist. So a fork hides both until the script imports such a module. The module then
reads variables again that have changed since its import.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import Message
from torchrun_hpc.preload import keep
from torchrun_hpc.preload.plan import is_read
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers.process import environment
from torchrun_hpc.variables import (
    ALLOCATOR,
    CPP_LOG_LEVEL,
    DISTRIBUTED_DEBUG,
    MKL,
    OMP,
    RANK,
    TORCH_LOGS,
    TORCH_LOGS_OUT,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType


# Python's own modules stay. The last one is multiprocessing's name of the script.
_OF_PYTHON = {*sys.stdlib_module_names, "__mp_main__"}

# The launcher imports this module before torch.
_KEPT_LOGGERS = _OF_PYTHON | {*logging.Logger.manager.loggerDict}


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def packages() -> set[str]:
    """Return the top-level names of imported modules, without Python's own."""
    return {*map(_package_of, sys.modules)} - _OF_PYTHON


class HiddenModules:
    """Finds and loads hidden modules, as a part of Python's import system.

    ``hidden`` are packages. Those in ``apart`` were imported by torch, and each appears
    alone. Any other package shows all modules, and the loggers.
    ``appeared`` is called with the names of modules that have appeared.
    """

    def __init__(
        self,
        hidden: Collection[str],
        apart: Collection[str],
        appeared: Callable[[Collection[str]], None],
    ) -> None:
        self._apart = apart
        self._appeared = appeared
        names = [name for name in sys.modules if _package_of(name) in hidden]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._hidden = {*names}
        keep(self._modules)  # if no script imports them, none is freed at the end
        self._specs = {n: getattr(self._modules[n], "__spec__", None) for n in names}
        self._named = logging.Logger.manager.loggerDict
        names = [n for n in self._named if not {n, _package_of(n)} & _KEPT_LOGGERS]
        self._loggers = {name: self._named.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """Find a hidden module, even if the script only looks for it.

        Another thread may show it meanwhile. A reload runs the module's code again.
        """
        is_shown = sys.modules.get(name) is self._modules.get(name, self)
        if name not in self._hidden and (target or not is_shown):
            return None
        spec = copy.copy(self._specs[name]) or ModuleSpec(name, None)
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that exists."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Show a module and all that belongs to it; run nothing a second time."""
        module.__spec__ = self._specs[module.__name__]
        package = _package_of(module.__name__)
        is_alone = package in self._apart
        shown = [n for n in self._modules if not is_alone or _package_of(n) == package]
        shown = [name for name in shown if name in self._hidden]
        for name in shown:
            sys.modules.setdefault(name, self._modules[name])
        if not is_alone:
            self._show_loggers()
        self._appeared(shown)
        self._hidden -= {*shown}  # last, because an interrupted import is repeated

    def _show_loggers(self) -> None:
        """Show the loggers again; those made by the script keep their settings."""
        for name, logger in self._loggers.items():
            if isinstance(logger, logging.PlaceHolder):
                continue  # logging makes a new one when it needs it
            is_of_script = isinstance(self._named.get(name), logging.Logger)
            present = logging.getLogger(name)
            if not is_of_script:
                context: dict[str, Any] = {"parent": present.parent, "_cache": {}}
                vars(present).update(vars(logger) | context)
            # Modules refer to one object, and the script perhaps to the other.
            logger.__dict__ = present.__dict__
            self._named[name] = logger


# --- variables that a module reads when it appears ------------------------------------

# The launcher can set these for the workers after the import: torch reads them again.
READ_AGAIN = (OMP, CPP_LOG_LEVEL)

_INIT_LOGGING = "_ZN3c1011initLoggingEv"  # c10::initLogging(), c10/util/Logging.h

# NumPy and its OpenBLAS read variables that begin so.
_OF_NUMPY = ("GOTO_", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_")


class Renewal:
    """Lets modules read their variables again when they appear.

    ``before`` are the variables at the import. The launcher has compared them with
    those at the script's start, so only later changes cause a warning.
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
            changed.add(TORCH_LOGS)
            changed = {n for n in changed if not _is_read_again(torch, n)}
        else:
            changed = {name for name in changed if name.startswith(_OF_NUMPY)}
        late = sorted(n for n in changed if self._start.get(n) != now.get(n))
        if late and now.get(RANK) == "0":
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
        if name in (OMP, MKL):
            # MKL's variable counts. It takes no more threads than CPUs.
            number = int(environment().get(MKL) or environment().get(OMP, ""))
            torch.set_num_threads(min(number, len(os.sched_getaffinity(0))))
        elif name in (TORCH_LOGS, TORCH_LOGS_OUT):
            torch._logging._internal._init_logs()  # noqa: SLF001
        elif name == CPP_LOG_LEVEL:
            read_log_level()
        elif name == DISTRIBUTED_DEBUG:
            torch.distributed.set_debug_level_from_env()
        elif name in ALLOCATOR:
            newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
            (newer or torch.cuda.memory._set_allocator_settings)(environment()[name])  # noqa: SLF001
        else:
            return False
    except Exception:  # noqa: BLE001 - another release of torch, or a wrong value
        return False
    return True
