"""The start of a script or a module, exactly as the interpreter does it."""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import TYPE_CHECKING, Any

from torchrun_hpc.failures.last_words import LAUNCHER

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODULE = "-m"
_NO_SUCH_FILE = 2  # exit code


def _search_path(words: Sequence[str]) -> list[str]:
    """Return what Python puts first in ``sys.path`` for a script or ``-m MODULE``."""
    has_main = words[0] != _MODULE and _has_main(words[0])
    return [folder(words)] if has_main or not _is_safe_path() else []


def folder(words: Sequence[str]) -> str:
    """Return the folder, or archive, of a script's own modules."""
    if words[0] == _MODULE:
        return os.getcwd()  # noqa: PTH109
    if _has_main(words[0]):
        return _absolute(words[0])
    return os.path.dirname(os.path.realpath(words[0]))  # noqa: PTH120


def _is_safe_path() -> bool:
    """Return whether Python adds only archives to ``sys.path``; since Python 3.11."""
    return bool(getattr(sys.flags, "safe_path", False))


def prepare(words: Sequence[str]) -> None:
    """Set ``sys.path`` and ``sys.argv`` for the imports and for `run`."""
    sys.path[: 0 if _is_safe_path() else 1] = _search_path(words)
    sys.argv = list(words[1:] if words[0] == _MODULE else words)


def run(words: Sequence[str]) -> None:
    """Run the script in ``words``; return, or raise what ends the interpreter."""
    main = _new_main()
    # The interpreter calls the same function, so it is in tracebacks.
    run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined] # noqa: SLF001
    try:
        if words[0] == _MODULE:
            sys.argv[0] = _MODULE
            run_module(words[1])
        elif _has_main(words[0]):
            run_module("__main__", alter_argv=False)
        else:
            exec(_code_of(words[0], main), vars(main))  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _has_main(name: str) -> bool:
    """Return whether Python can import from this path: a folder or an archive."""
    return pkgutil.get_importer(_absolute(name)) is not None


def _absolute(name: str) -> str:
    """Return an absolute path as Python builds it, otherwise unchanged."""
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


def _new_main() -> Any:
    """Replace ``__main__`` by a new module, like the one at Python's start."""
    main: Any = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__builtins__ = builtins
    # The second name is multiprocessing's, by which its processes send objects.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


def _code_of(name: str, main: Any) -> types.CodeType:
    """Return the code of a file, and set its attributes in ``__main__``."""
    path = _absolute(name)
    main.__file__ = path
    if sys.version_info < (3, 15):
        main.__cached__ = None
    if path.endswith(".pyc"):
        main.__loader__ = SourcelessFileLoader("__main__", path)
        code: types.CodeType = main.__loader__.get_code("__main__")
        return code
    main.__loader__ = SourceFileLoader("__main__", path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            source = file.read()
    except OSError as error:
        text = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {text}\n")
        sys.exit(_NO_SUCH_FILE)
    return compile(source, path, "exec", dont_inherit=True)


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return an exception's traceback without the launcher's frames."""
    shown = error.__traceback__
    while shown is not None and LAUNCHER in shown.tb_frame.f_code.co_filename:
        shown = shown.tb_next
    return shown


def _hide_own_frames(error: BaseException) -> None:
    """Let the interpreter show an exception without the launcher's frames."""
    hook, shown = sys.excepthook, traceback_of(error)

    def show(kind: Any, value: BaseException, _traceback: Any) -> None:
        hook(kind, value.with_traceback(shown), shown)

    sys.excepthook = show
