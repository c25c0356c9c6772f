"""Preloaded modules that a script has not imported yet.

After an exec, a script does not find them in `sys.modules`, and their loggers do not
exist. So a fork hides both until the script imports such a module.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import ModuleType

TORCH = "torch"

# Python's own modules stay. The last one is multiprocessing's name of the script.
_OF_PYTHON = {*sys.stdlib_module_names, "__mp_main__"}


def _loggers() -> dict[str, logging.Logger | logging.PlaceHolder]:
    return logging.Logger.manager.loggerDict


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def packages() -> set[str]:
    """Return the top-level names of imported modules, without Python's own."""
    return {*map(_package_of, sys.modules)} - _OF_PYTHON


class HiddenModules:
    """Finds and loads hidden modules, as a part of Python's import system.

    ``hidden`` are packages. Those in ``apart`` do not import torch, so each appears
    alone. Any other shows all, and the loggers. ``appeared`` is called with the names
    of what has appeared.
    """

    def __init__(
        self,
        hidden: Collection[str],
        apart: Collection[str],
        appeared: Callable[..., None],
    ) -> None:
        self._apart = apart
        self._appeared = appeared
        names = [name for name in sys.modules if _package_of(name) in hidden]
        self._modules = {name: sys.modules.pop(name) for name in names}
        names = [name for name in _loggers() if _package_of(name) not in _OF_PYTHON]
        self._loggers = {name: _loggers().pop(name) for name in names}
        # The interpreter's end frees no modules that the script has not imported.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._modules))
        self._path: list[Any] = sys.meta_path
        self._path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Find a hidden module. A script may ask for it without an import."""
        module = self._modules.get(name)
        if module is None:
            return None
        true = getattr(module, "__spec__", None)
        found = copy.copy(true) or ModuleSpec(name, None)
        found.loader, found.loader_state = self, true
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that exists."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Show a module and all that belongs to it; run nothing a second time."""
        package = _package_of(module.__name__)
        module.__spec__ = module.__spec__ and module.__spec__.loader_state
        shown = [
            name
            for name in self._modules
            if package not in self._apart or _package_of(name) == package
        ]
        for name in shown:
            sys.modules.setdefault(name, self._modules[name])
        is_last = package not in self._apart
        has_own_loggers = is_last and self._show_loggers()
        self._appeared(shown, has_own_loggers=has_own_loggers)
        for name in shown:  # last: an exception may interrupt an import, and it repeats
            self._modules.pop(name, None)
        if not self._modules:
            self._path.remove(self)

    def _show_loggers(self) -> bool:
        """Show the loggers again; return whether the script has made any of them.

        Such loggers keep its values.
        """
        has_own = False
        for name, logger in self._loggers.items():
            if isinstance(logger, logging.PlaceHolder):
                continue  # logging makes them when it needs them
            is_of_script = isinstance(_loggers().get(name), logging.Logger)
            has_own = has_own or is_of_script
            present = logging.getLogger(name)
            if not is_of_script:
                parent = present.parent
                vars(present).update(vars(logger), parent=parent, _cache={})
            # Modules refer to one object, and the script perhaps to the other.
            logger.__dict__ = present.__dict__
            _loggers()[name] = logger
        return has_own
