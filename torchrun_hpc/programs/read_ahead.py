"""A reader of the files that imports will need, which fills the kernel's cache.

    read_ahead.py FOLDER...

The folders are those of the launcher's ``sys.path``. The modules' names arrive on
standard input, one per line. The program runs no module, but follows the imports in the
bytecode.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import PathFinder, SourcelessFileLoader
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

_LDD = ("env", "-u", "BASH_ENV", "ldd")  # ldd is a script, and bash runs BASH_ENV first

_PIECE = 2**17  # bytes of one request

# See elf(5): e_shoff and e_shnum; then sh_type, sh_flags, sh_offset and sh_size.
_HEADER, _SECTION = struct.Struct("<40xQ12xH2x"), struct.Struct("<4xIQ8xQQ24x")
_UNREAD = {8, 0x70000001}  # types: zeros (not in the file), tables for exceptions
_LOADED, _CODE = 2, 4  # flags: SHF_ALLOC, SHF_EXECINSTR

# Loading a library mostly runs the first part of its code. It reads little of other
# large sections, such as code for GPUs (measured, torch 2.14 for CUDA 13).
_MOST = 2**26  # bytes of a section

# Not in this program's `sys.path`, because libraries import modules at any time.
FOLDERS: list[str] = []

_threads = ThreadPoolExecutor(16)  # more did not help (measured, 2 ms per request)


@functools.cache
def read(module: str) -> Future[list[str] | None]:
    """Read a module after its package; the result has the folders of its submodules."""
    package = module.rpartition(".")[0]
    return _threads.submit(_read, module, read(package) if package else None)


def _read(module: str, package: Future[list[str] | None] | None) -> list[str] | None:
    folders = package.result() if package else FOLDERS
    spec = PathFinder.find_spec(module, folders) if folders else None
    if spec is None:
        return None
    inner = spec.submodule_search_locations
    if spec.cached:
        _threads.submit(_follow, spec.cached, module if inner else spec.parent or "")
    elif spec.origin:
        _threads.submit(_read_libraries, spec.origin)
    return inner


def _follow(path: str, package: str) -> None:
    code: Any = SourcelessFileLoader(package, path).get_code(package)
    for name in imports(code, package):
        read(name)


def _read_libraries(path: str) -> None:
    text = subprocess.check_output([*_LDD, path], stdin=subprocess.DEVNULL, text=True)  # noqa: S603
    for library in (path, *re.findall(r" => (/.+) \(", text)):
        _read_library(library)


def read_entry_points() -> None:
    """Read the entry points of all packages, as an import of torch does."""
    from importlib import metadata  # noqa: PLC0415 - slow

    for package in metadata.distributions(path=FOLDERS):
        package.read_text("entry_points.txt")


def imports(code: CodeType, package: str) -> Iterator[str]:
    """Yield the names that a module's code imports when it runs.

    Imports for type checkers do not count. Of ``from a import b``, ``a.b`` may be a
    variable. ``package`` is the base of relative imports.
    """
    # Disassembling is slow: end after the last import.
    end = 2 * code.co_code[::2].rfind(dis.opmap["IMPORT_NAME"]) + 2
    constants, skipped, is_for_types = [], 0, False
    for step in dis.get_instructions(code.replace(co_code=code.co_code[:end])):
        if step.offset < skipped:
            continue
        if step.opname in {"LOAD_CONST", "LOAD_SMALL_INT"}:
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, names = constants[-2:]
            base = resolve_name(level * "." + step.argval, package)
            yield base
            yield from (f"{base}.{name}" for name in names or ())
        elif step.opname in {"LOAD_NAME", "LOAD_ATTR"}:
            is_for_types = step.argval == "TYPE_CHECKING"
        elif is_for_types and "IF_FALSE" in step.opname:
            skipped = step.argval


@functools.cache
def _read_library(path: str) -> None:
    file = Path(path).open("rb")  # noqa: SIM115 - the threads read it later
    for start, size in parts(file):
        for offset in range(start, start + size, _PIECE):
            # Lustre and squashfs ignore posix_fadvise: their ra_pages are 0.
            _threads.submit(lambda at: os.pread(file.fileno(), _PIECE, at), offset)


def parts(library: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield offset and size of the sections that loading the library may read."""
    start, number = _HEADER.unpack(library.read(_HEADER.size))
    library.seek(start)
    sections = library.read(number * _SECTION.size)
    for kind, flags, offset, size in _SECTION.iter_unpack(sections):
        if flags & _LOADED and kind not in _UNREAD and (flags & _CODE or size < _MOST):
            yield offset, min(size, _MOST)


def main() -> None:
    """Read modules until the launcher closes the pipe."""
    os.nice(10)  # the launcher comes first
    FOLDERS[:] = sys.argv[1:]
    _threads.submit(read_entry_points)
    for line in sys.stdin:
        read(line.strip())
    os._exit(0)


if __name__ == "__main__":
    main()
