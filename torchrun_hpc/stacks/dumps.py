"""The flight recorder's dump, a file that torch writes when NCCL times out.

A worker that was started by exec tells nothing else about its collectives. Names and
folders are those of ``DebugInfoWriter`` in torch's FlightRecorder.cpp, 2.2 to 2.15.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files, programs, wire
from torchrun_hpc.stacks.calls import Group, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.failures.worker import Worker

_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAME = "torch/comm_lib_trace_rank_"  # in the folder for caches

_LARGEST = 2**24  # bytes; 2,000 entries with frames have some megabytes

# A file may have any content, or be of another release. No signal's exception is here.
_FAULTS = (AttributeError, LookupError, OSError, TypeError, ValueError)


def groups(worker: Worker, environ: Mapping[str, str]) -> tuple[Group, ...]:
    """Return the groups in the dump that a worker has written, if there is one."""
    for prefix in _prefixes(environ):
        path = Path(f"{prefix}{worker.rank}")
        with contextlib.suppress(*_FAULTS):
            about = path.lstat()
            if about.st_uid == os.getuid() and about.st_mtime >= worker.started:
                entries = _entries(files.read(path, _LARGEST, os.O_NOFOLLOW))
                latest = groups_of({"entries": entries}, {})
                return wire.decode(tuple[Group, ...], [*map(wire.encode, latest)])
    return ()


def _prefixes(environ: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, map(environ.get, _PREFIXES))
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"  # noqa: S108
    yield f"{cache}/{_NAME}"


def _entries(data: bytes) -> Any:
    """Return the latest entries; no dump can need much memory or time here."""
    pipes = {"stdin": programs.PIPE, "stdout": programs.PIPE}
    with programs.start("read_dump", **pipes) as program:
        return wire.from_json(program.communicate(data)[0])
