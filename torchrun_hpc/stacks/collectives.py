"""The latest collectives of all ranks, compared: which rank did not call one.

Facts come from torch's flight recorder. For gloo, an entry's state remains
``scheduled``, so only sequence numbers count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from torchrun_hpc import wire
from torchrun_hpc.stacks.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.stacks.sampling import WorkerStack

_CALLS = 3  # the latest ones of a group
_GROUPS = 8  # of a worker, with the latest calls
_PARTS = 4  # of a line
_WORD = 60  # characters
LONGEST = 200  # characters of a frame
IMPORTS = "<frozen importlib"  # Python's own frames of an import

Word = Annotated[str, wire.short_text(_WORD)]
Frame = Annotated[str, wire.short_text(LONGEST)]

# In these, all ranks pass the same shape. A root's, or an uneven one, may differ.
_EQUAL = "all_reduce broadcast reduce all_gather _all_gather_base _reduce_scatter_base"

# Names of c10::ScalarType, and of ``torch.dtype`` if that is no lower-case form.
_TYPES = "Half float16 Float float32 Double float64 Byte uint8 Int int32 Long int64"
_TORCH_TYPES = dict(zip(_TYPES.split()[::2], _TYPES.split()[1::2], strict=True))


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
class Record:
    """What a fork tells its agent: the frames of its main thread, and its groups."""

    frames: tuple[Frame, ...] = ()
    groups: tuple[Group, ...] = ()


def groups_of(trace: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Group, ...]:
    """Return the latest calls in a flight recorder's ``trace``.

    ``sizes`` has the size of each process group, by name. A group without an entry has
    no call, unless the recorder's ring has lost its first entries.
    """
    entries: Sequence[Any] = trace.get("entries") or ()
    is_complete = not entries or entries[0]["record_id"] == 0
    calls: dict[str, list[Call]] = {name: [] for name in sizes if is_complete}
    names: dict[str, str] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            name, description = entry["process_group"]
            known = calls.pop(name, [])  # the latest group is the last one
            calls[name] = [*known[1 - _CALLS :], _call(entry)]
            names[name] = description
    latest = [*calls.items()][-_GROUPS:]
    return tuple(
        Group(_title(name, names.get(name, "")), sizes.get(name, 0), tuple(found))
        for name, found in latest
    )


def _title(name: str, description: str) -> str:
    is_usual = description in ("", "undefined", "default_pg")
    return name if is_usual else f"{name} {description}"


def _call(entry: Mapping[str, Any]) -> Call:
    operation = entry["profiling_name"].rpartition(":")[2]
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = [
        f"{_TORCH_TYPES.get(kind, kind.lower())}[{','.join(map(str, size))}]"
        for kind, size in pairs
    ]
    return Call(entry["collective_seq_id"], operation, ", ".join(shapes))


# --- of all ranks -----------------------------------------------------------------


def compare(stacks: Sequence[WorkerStack], hosts: Mapping[int, str]) -> list[str]:
    """Return a line for each process group whose ranks differ, largest group first."""
    members: dict[str, dict[WorkerStack, Group]] = {}
    for stack in stacks:
        for group in stack.groups:
            members.setdefault(group.name, {})[stack] = group
    ordered = sorted(members.items(), key=lambda item: -len(item[1]))
    lines = (_line(name, groups, stacks, hosts) for name, groups in ordered)
    return [line for line in lines if line]


def _line(
    name: str,
    groups: Mapping[WorkerStack, Group],
    stacks: Sequence[WorkerStack],
    hosts: Mapping[int, str],
) -> str:
    """Compare the first unequal calls, or the last ones; return nothing if equal."""
    called: dict[int, dict[tuple[str, str], tuple[Call, list[WorkerStack]]]] = {}
    for stack, group in groups.items():
        for call in group.calls:
            kinds = called.setdefault(call.number, {})
            kinds.setdefault(call.key, (call, []))[1].append(stack)
    if not called:
        return ""
    unequal = (number for number, kinds in called.items() if len(kinds) > 1)
    number = min(unequal, default=max(called))
    size = max(len(groups), *(group.size for group in groups.values()))
    who = Tree(size, hosts).who
    (usual, came), *odd = sorted(called[number].values(), key=_number_of_ranks)
    parts = [f"{who(ranks)} called {call}" for call, ranks in odd]
    behind: dict[Call | None, list[WorkerStack]] = {}
    for stack, group in groups.items():
        if group.last < number:
            behind.setdefault(next(reversed(group.calls), None), []).append(stack)
    for last, ranks in behind.items():
        whose = "its" if len(ranks) == 1 else "their"
        before = f"{whose} last was {last.operation} {last.number}" if last else ""
        parts.append(f"{who(ranks)} did not call it, {before or 'nor any other'}")
    unknown = [stack for stack in stacks if stack not in groups]
    if unknown and size == len(stacks):
        parts.append(f"nothing is known of {who(unknown)}")
    shape = str(usual).removeprefix(usual.operation)
    parts.insert(0, f"{usual.operation} {number} of group {name}{shape}: {who(came)}")
    return "; ".join(parts[:_PARTS]) if len(parts) > 1 else ""


def _number_of_ranks(kind: tuple[Call, list[WorkerStack]]) -> int:
    return -len(kind[1])
