"""The latest collectives of all ranks, compared: which rank did not call one.

Facts come from torch's flight recorder. For gloo, an entry's state remains
``scheduled``, so only sequence numbers count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from torchrun_hpc import wire
from torchrun_hpc.stacks.tree import Tree, named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.stacks.sampling import WorkerStack

_CALLS = 3  # the latest ones of a group
_GROUPS = 8  # of a worker, with the latest calls
_ODD = 2  # kinds of odd ranks in a line
_WORD = 60  # characters
LONGEST = 200  # characters of a frame
IMPORTS = "<frozen importlib"  # Python's own frames of an import

Word = Annotated[str, wire.short_text(_WORD)]
Frame = Annotated[str, wire.short_text(LONGEST)]

# In these, all ranks pass the same shape. A root's, or an uneven one, may differ.
_EQUAL = frozenset(
    (
        *("all_reduce", "broadcast", "reduce", "all_gather"),
        *("_all_gather_base", "_reduce_scatter_base"),
    )
)

# Names of c10::ScalarType that differ from those of ``torch.dtype``.
_TYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
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
        return self.operation, self.shape if self.operation in _EQUAL else ""


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
        f"{_TYPES.get(kind, kind.lower())}[{','.join(map(str, size))}]"
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
    """Compare the ranks of a group; return an empty text if they are equal."""
    size = max(len(groups), *(group.size for group in groups.values()))
    who = Tree(size, named(stacks, hosts)).who
    called = _first_difference(groups)
    if len(called) > 1:
        (usual, ranks), *odd = called[: 1 + _ODD]
        parts = [f"{who(of)} called {call.operation}{_in(call)}" for call, of in odd]
    else:
        last = max(group.last for group in groups.values())
        ranks = [stack for stack, group in groups.items() if group.last == last]
        usual = groups[ranks[0]].calls[-1] if last else Call(0, "nothing")
        behind: dict[int, list[WorkerStack]] = {}
        for stack, group in groups.items():
            if group.last < last:
                behind.setdefault(group.last, []).append(stack)
        largest = sorted(behind.values(), key=len, reverse=True)[:_ODD]
        parts = [_behind(of, groups[of[0]], who(of)) for of in largest]
        unknown = [stack for stack in stacks if stack not in groups]
        if unknown and last and size == len(stacks):
            parts.append(f"nothing is known of {who(unknown)}")
    text = f"{usual.operation} {usual.number} of group {name}{_in(usual)}: {who(ranks)}"
    return "; ".join((text, *parts)) if parts else ""


def _first_difference(
    groups: Mapping[WorkerStack, Group],
) -> list[tuple[Call, list[WorkerStack]]]:
    """Return the first unequal calls of one number, the usual one first."""
    calls: dict[int, dict[tuple[str, str], tuple[Call, list[WorkerStack]]]] = {}
    for stack, group in groups.items():
        for call in group.calls:
            of_number = calls.setdefault(call.number, {})
            of_number.setdefault(call.key, (call, []))[1].append(stack)
    for _, kinds in sorted(calls.items()):
        if len(kinds) > 1:
            return sorted(kinds.values(), key=lambda kind: -len(kind[1]))
    return []


def _behind(stacks: Sequence[WorkerStack], group: Group, who: str) -> str:
    if not group.calls:
        return f"{who} called none in this group"
    call, whose = group.calls[-1], "its" if len(stacks) == 1 else "their"
    last = f"{whose} last was {call.operation} {call.number}"
    return f"{who} did not call it, {last}"


def _in(call: Call) -> str:
    return f" ({call.shape})" if call.shape else ""
