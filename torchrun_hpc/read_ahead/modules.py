"""The reader: it follows imports through bytecode, and reads the files that it finds.

It runs no module, and looks for files exactly as an import does. What was read stays in
the kernel's cache.
"""

from __future__ import annotations

import dis
import functools
import marshal
import os
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import PathFinder
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.read_ahead import libraries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_HEADER = 16  # bytes before the bytecode in its file

_IMPORT, _NAME = dis.opmap["IMPORT_NAME"], dis.opmap["LOAD_NAME"]
_CONSTANT, _NUMBER = dis.opmap["LOAD_CONST"], dis.opmap.get("LOAD_SMALL_INT")

_threads = ThreadPoolExecutor(16)  # more did not help (measured, 2 ms per request)


def serve(names: int) -> None:
    """Read the modules whose names arrive, one per line.

    Only one process of a user on this node does so.
    """
    with socket.socket(socket.AF_UNIX) as lock, open(names) as lines:  # noqa: PTH123
        lock.bind(f"\0torchrun_hpc read-ahead {os.getuid()}")
        for line in lines:
            _ask(line.strip())


@functools.cache
def _ask(module: str) -> Future[list[str] | None]:
    """Read a module after its package; the result is where its own modules are."""
    package = module.rpartition(".")[0]
    return _threads.submit(_read, module, _ask(package) if package else None)


def _read(module: str, package: Future[list[str] | None] | None) -> list[str] | None:
    folders = package.result() if package else None
    if package and not folders:
        return None
    found = PathFinder.find_spec(module, folders)
    if found is None or not found.origin:
        return None
    inner = found.submodule_search_locations
    if module in sys.modules:
        return inner
    if not found.cached:
        for library in libraries.needed(found.origin):
            _read_library(library)
        return None
    data = Path(found.cached).read_bytes()
    if data.startswith(MAGIC_NUMBER):
        code = marshal.loads(data[_HEADER:])  # noqa: S302 - the import trusts it
        for name in imports(code, module if inner else module.rpartition(".")[0]):
            _ask(name)
    return inner


@functools.cache
def _read_library(path: str) -> None:
    _threads.submit(libraries.read, path)


def imports(code: CodeType, package: str) -> Iterator[str]:
    """Find what a module's code imports when it runs, except for type checkers.

    Some names are those of variables. ``package`` is for relative imports.
    """
    steps, constants = code.co_code, [0, ()]
    longer = skipped = 0
    is_for_types = False
    for at in range(0, len(steps), 2):
        operation, argument = steps[at], steps[at + 1] | longer
        longer = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if at < skipped:
            continue
        if operation == _CONSTANT:
            constants.append(code.co_consts[argument])
        elif operation == _NUMBER:
            constants.append(argument)
        elif operation == _IMPORT:
            level, names = constants[-2:]
            start = package.split(".")[: 1 - level or None] if level else []
            base = ".".join(filter(None, [*start, code.co_names[argument]]))
            yield base
            yield from (f"{base}.{name}" for name in names or ())
        elif operation == _NAME:
            is_for_types = code.co_names[argument] == "TYPE_CHECKING"
        elif is_for_types and "IF_FALSE" in dis.opname[operation]:
            skipped = 2 * argument + (at + 2 if operation in dis.hasjrel else 0)
