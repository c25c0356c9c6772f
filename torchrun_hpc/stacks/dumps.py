"""The flight recorder's dump, a file that torch writes when NCCL times out.

A worker that was started by exec tells nothing else about its collectives. Names and
folders are those of ``DebugInfoWriter`` in torch's FlightRecorder.cpp, 2.2 to 2.15.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files
from torchrun_hpc.stacks.calls import Group, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAME = "torch/comm_lib_trace_rank_"  # in the folder for caches
_OLD_NAME = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's name; see `_is_own`

_NEW = 120.0  # seconds since it was written; torch waits up to 60 before it ends
_LARGEST = 2**24  # bytes; 2,000 entries with frames have some megabytes


# A file may have any content, or be of another release. No signal's exception is here.
_FAULTS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError),
    *(pickle.PickleError, RecursionError, TypeError, ValueError),
)


def groups(rank: int, environ: Mapping[str, str]) -> tuple[Group, ...]:
    """Return the groups in the dump that a worker has just written, if there is one."""
    for prefix in _prefixes(environ):
        path = Path(f"{prefix}{rank}")
        with contextlib.suppress(*_FAULTS):
            if _is_own(path.lstat()):
                data = files.read(path, _LARGEST, os.O_NOFOLLOW)
                return groups_of(_Plain(io.BytesIO(data)).load(), {})
    return ()


def _prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, map(environ.get, _PREFIXES))
    yield f"{environ.get('XDG_CACHE_HOME')}/{_NAME}"
    yield f"{environ.get('HOME', '/tmp')}/.cache/{_NAME}"  # noqa: S108 - as in torch
    yield _OLD_NAME


def _is_own(found: os.stat_result) -> bool:
    """Return whether a file is new, and not another user's."""
    return found.st_uid == os.getuid() and time.time() - found.st_mtime < _NEW


class _Plain(pickle.Unpickler):  # noqa: S301 - it finds no class
    """Reads only numbers, texts, lists and dictionaries; it can run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")
