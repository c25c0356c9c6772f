"""Preloaded modules that a script has not imported yet.

After an exec, a script does not find them in `sys.modules`, and their loggers do not
exist. So a fork hides both until the script imports such a module.
"""

from __future__ import annotations

import copy
import logging
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from torchrun_hpc.worker import keep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
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

    ``hidden`` are packages. Those in ``apart`` were imported with torch, so each
    appears alone. Any other shows all, and the loggers. ``appeared`` is called with the
    names of what has appeared.
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
        keep(self._modules)  # a script that never imports them frees none at its end
        self._specs = {n: getattr(self._modules[n], "__spec__", None) for n in names}
        self._named = logging.Logger.manager.loggerDict
        names = [n for n in self._named if not {n, _package_of(n)} & _KEPT_LOGGERS]
        self._loggers = {name: self._named.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """Find a hidden module, which a script may ask for without an import.

        Another thread may show it meanwhile. A reload runs its code again.
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
        self._hidden -= {*shown}  # last: an import that is interrupted repeats

    def _show_loggers(self) -> None:
        """Show the loggers again; those that the script has made keep its values."""
        for name, logger in self._loggers.items():
            if isinstance(logger, logging.PlaceHolder):
                continue  # logging makes them when it needs them
            is_of_script = isinstance(self._named.get(name), logging.Logger)
            present = logging.getLogger(name)
            if not is_of_script:
                context: dict[str, Any] = {"parent": present.parent, "_cache": {}}
                vars(present).update(vars(logger) | context)
            # Modules refer to one object, and the script perhaps to the other.
            logger.__dict__ = present.__dict__
            self._named[name] = logger
