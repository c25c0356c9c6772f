"""The shared libraries of an extension module, and what their loading reads."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 2**17  # bytes of one request; of a longer one, the kernel reads only so many

# See elf(5): e_shoff and e_shnum; then sh_type, sh_flags, sh_offset and sh_size.
_HEADER, _SECTION = struct.Struct("<40xQ12xH2x"), struct.Struct("<4xIQ8xQQ24x")
_EMPTY, _IN_MEMORY = 8, 2  # a type; a flag

# Of larger parts, such as libtorch_cpu.so's code and the code for GPUs, loading reads
# little (measured, torch 2.14 for CUDA 13).
_LONGEST = 2**26  # bytes


def needed(path: str) -> list[str]:
    """Return the libraries that are loaded with an extension module, and the module."""
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=True)
    return [*re.findall(r" => (\S+) ", done.stdout), path]


def read(path: str) -> None:
    """Let the kernel read what loading reads; do not wait for it."""
    with open(path, "rb") as file:
        for start, size in _parts(file):
            for offset in range(start, start + size, _PIECE):
                os.posix_fadvise(file.fileno(), offset, _PIECE, os.POSIX_FADV_WILLNEED)


def _parts(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Return offset and size of the parts that loading may read."""
    start, number = _HEADER.unpack(file.read(_HEADER.size))
    file.seek(start)
    sections = file.read(number * _SECTION.size)
    for kind, flags, offset, size in _SECTION.iter_unpack(sections):
        if flags & _IN_MEMORY and kind != _EMPTY and size < _LONGEST:
            yield offset, size
