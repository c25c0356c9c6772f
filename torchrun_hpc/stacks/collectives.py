"""The latest collectives of all ranks, compared: which rank did not call one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import count
from torchrun_hpc.stacks.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.stacks.calls import Call, Group
    from torchrun_hpc.stacks.sampling import WorkerStack

_LINES = 8  # groups; the others are counted
_PARTS = 4  # of a line


def compare(stacks: Sequence[WorkerStack], hosts: Mapping[int, str]) -> list[str]:
    """Return a line for each process group whose ranks differ, largest group first."""
    members: dict[str, dict[WorkerStack, Group]] = {}
    for stack in stacks:
        for group in stack.groups:
            members.setdefault(group.name, {})[stack] = group
    ordered = sorted(members.items(), key=lambda item: -len(item[1]))
    found = (_line(name, groups, stacks, hosts) for name, groups in ordered)
    lines = [line for line in found if line]
    if more := lines[_LINES:]:
        lines[_LINES:] = [f"{count(len(more), 'other group')} whose ranks differ"]
    return lines


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
    (usual, came), *odd = sorted(
        called[number].values(), key=lambda kind: -len(kind[1])
    )
    parts = [f"{who(ranks)} called {call}" for call, ranks in odd]
    behind: dict[Call | None, list[WorkerStack]] = {}
    for stack, group in groups.items():
        if group.last < number:
            behind.setdefault(next(reversed(group.calls), None), []).append(stack)
    for last, ranks in behind.items():
        whose = "its" if len(ranks) == 1 else "their"
        before = f"{whose} last was {last.operation} {last.number}" if last else ""
        parts.append(f"{who(ranks)} did not call it, {before or 'nor any other'}")
    if len(groups) < len({*stacks}) <= size:  # all ranks of the job
        unknown = [stack for stack in stacks if stack not in groups]
        parts.append(f"nothing is known of {who(unknown)}")
    shape = str(usual).removeprefix(usual.operation)
    parts.insert(0, f"{usual.operation} {number} of group {name}{shape}: {who(came)}")
    return "; ".join(parts[:_PARTS]) if len(parts) > 1 else ""
