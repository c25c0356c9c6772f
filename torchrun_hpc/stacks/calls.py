"""The latest collective calls of a rank, from torch's flight recorder.

For gloo, an entry's state remains ``scheduled``, so only sequence numbers count.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchrun_hpc import files, programs, wire
from torchrun_hpc.variables import CACHE_HOME, DUMP_FILE, HOME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.failures.worker import Worker


_CALLS = 3  # the latest ones of a group
_GROUPS = 8  # of a worker, with the latest calls
_WORD = 60  # characters
# Questions to a fork; and the first byte of its answer when it ends.
ASK_FRAMES, ASK_ALL, AT_END = b"f", b"a", b"!"
LONGEST = 200  # characters of a frame
IMPORTS = "<frozen importlib"  # Python's own frames of an import

Word = Annotated[str, wire.short_text(_WORD)]
Frame = Annotated[str, wire.short_text(LONGEST)]

# All ranks pass the same shape to these. Other operations may be uneven.
_EQUAL = "all_reduce broadcast reduce all_gather _all_gather_base _reduce_scatter_base"

# The ``torch.dtype`` of a c10::ScalarType; all others have the same name in lower case.
_TORCH_TYPES = {
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Byte": "uint8",
    "Int": "int32",
    "Long": "int64",
}


@dataclass(frozen=True)
class Call:
    """A collective call; ``shape`` is like ``float32[1024]``, or empty."""

    number: int
    operation: Word
    shape: Word = ""

    @property
    def key(self) -> tuple[str, str]:
        """The parts that must be equal on all ranks."""
        return self.operation, self.shape if self.operation in _EQUAL.split() else ""

    def __str__(self) -> str:
        """Write operation and shape: ``all_reduce (float32[1024])``."""
        return self.operation + (f" ({self.shape})" if self.shape else "")


@dataclass(frozen=True)
class Group:
    """A rank's latest calls in a process group of ``size`` ranks, in their order."""

    name: Word
    size: int
    calls: tuple[Call, ...] = ()

    @property
    def last(self) -> int:
        """The number of the last call; 0 without one."""
        return self.calls[-1].number if self.calls else 0


@dataclass(frozen=True)
class ForkAnswer:
    """A fork's answer to its agent: the frames of its main thread, and its groups.

    ``error`` is what Python writes about the exception that ends the fork. ``time`` is
    when it answered, in seconds since 1970.
    """

    frames: tuple[Frame, ...] = ()
    groups: tuple[Group, ...] = ()
    error: wire.AnyText = ""
    time: float = 0.0


# Dumps can have values of any type. The formats s and d take only texts and numbers.
def title(name: str, description: str) -> str:
    """Return a group's title: its name, and its description if torch knows one."""
    is_usual = description in ("", "undefined", "default_pg")
    return name if is_usual else f"{name:s} {description:s}"


def groups_of(trace: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Group, ...]:
    """Return the latest calls in a flight recorder's ``trace``.

    ``sizes`` has the size of each process group, by title. A group without an entry has
    no call, unless the recorder's ring has lost its first entries.
    """
    entries: Sequence[Any] = trace.get("entries") or ()
    is_complete = not entries or entries[0]["record_id"] == 0
    calls: dict[str, list[Call]] = {name: [] for name in sizes if is_complete}
    for entry in entries:
        if not entry["is_p2p"]:
            name = title(*entry["process_group"])
            earlier = calls.pop(name, [])  # the latest group comes last
            calls[name] = [*earlier[1 - _CALLS :], _call(entry)]
    latest = [*calls.items()][-_GROUPS:]
    return tuple(Group(name, sizes.get(name, 0), tuple(of)) for name, of in latest)


def _call(entry: Mapping[str, Any]) -> Call:
    operation = entry["profiling_name"].rpartition(":")[2]
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = [
        f"{_TORCH_TYPES.get(kind, kind.lower())}[{','.join(f'{n:d}' for n in size)}]"
        for kind, size in pairs
    ]
    return Call(entry["collective_seq_id"], operation, ", ".join(shapes))


# --- the flight recorder's dump -------------------------------------------------------

# An exec'd worker tells nothing else about its collectives. The names are those of
# DebugInfoWriter in FlightRecorder.cpp, in torch 2.2 to 2.15.

_NAME = "torch/comm_lib_trace_rank_"  # in the folder for caches

_LARGEST = 2**24  # bytes; 2,000 entries with frames have some megabytes

# A file may have any content, or be of another release. Signals' exceptions must pass.
_FAULTS = (AttributeError, LookupError, OSError, TypeError, ValueError)


def groups_in_dump(worker: Worker, environ: Mapping[str, str]) -> tuple[Group, ...]:
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
    yield from filter(None, map(environ.get, DUMP_FILE))
    cache = environ.get(CACHE_HOME) or f"{environ.get(HOME, '/tmp')}/.cache"  # noqa: S108
    yield f"{cache}/{_NAME}"


def _entries(data: bytes) -> Any:
    """Return the latest entries. A separate program limits memory and time for them."""
    pipes = {"stdin": programs.PIPE, "stdout": programs.PIPE}
    with programs.start("read_dump", **pipes) as program:
        return wire.from_json(program.communicate(data)[0])
