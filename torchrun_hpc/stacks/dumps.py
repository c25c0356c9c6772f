"""The flight recorder's dump, a file that torch writes when NCCL times out.

A worker that was started by exec tells nothing else about its collectives. Names and
folders are those of ``DebugInfoWriter`` in torch's FlightRecorder.cpp, 2.2 to 2.15.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files, wire
from torchrun_hpc.stacks.calls import Group, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.failures.worker import Worker

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAME = "torch/comm_lib_trace_rank_"  # in the folder for caches

_LARGEST = 2**24  # bytes; 2,000 entries with frames have some megabytes

# A file may have any content, or be of another release. No signal's exception is here.
_FAULTS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError),
    *(pickle.PickleError, RecursionError, TypeError, ValueError),
)


def groups(worker: Worker, environ: Mapping[str, str]) -> tuple[Group, ...]:
    """Return the groups in the dump that a worker has written, if there is one."""
    for prefix in _prefixes(environ):
        path = Path(f"{prefix}{worker.rank}")
        with contextlib.suppress(*_FAULTS):
            found = path.lstat()
            if found.st_uid == os.getuid() and found.st_mtime >= worker.started:
                data = files.read(path, _LARGEST, os.O_NOFOLLOW)
                known = groups_of(_Plain(io.BytesIO(data)).load(), {})
                sent = [wire.encode(group) for group in known]
                return wire.decode(tuple[Group, ...], sent)
    return ()


def _prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, map(environ.get, _PREFIXES))
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"  # noqa: S108
    yield f"{cache}/{_NAME}"


class _Plain(pickle.Unpickler):  # noqa: S301 - it finds no class
    """Reads only numbers, texts, lists and dictionaries; it can run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")
