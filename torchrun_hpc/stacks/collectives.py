"""Comparison of all ranks: the latest collective that each has called, their stacks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.errors import count
from torchrun_hpc.names import fold, ranges, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.stacks.calls import Call, Group
    from torchrun_hpc.stacks.sampling import WorkerStack


_LINES = 8  # groups; the others are counted
_PARTS = 4  # of a line


class _Difference(NamedTuple):
    """A group's ranks have called different collectives.

    ``line`` is for the user. ``call`` is what most ranks have called, and ``absent``
    are the others.
    """

    line: str
    call: str
    absent: list[WorkerStack]


def compare(stacks: Sequence[WorkerStack], hosts: Mapping[int, str]) -> list[str]:
    """Return a line for each process group whose ranks differ, the largest one first.

    The ranks differ in their calls of collectives.
    """
    lines = [difference.line for difference in _differences(stacks, hosts)]
    if more := lines[_LINES:]:
        lines[_LINES:] = [f"{count(len(more), 'other group')} whose ranks differ"]
    return lines


def absent(stacks: Sequence[WorkerStack], hosts: Mapping[int, str], failed: int) -> str:
    """Return who did not come to a collective, and where they were.

    The group with the fewest absent ranks counts, because others may wait for them. If
    no calls differ, the absent ranks are at another place than rank ``failed``. Then
    all stacks must be readable. Return nothing if most ranks are absent.
    """
    places = {stack: place(stack.frames) for stack in stacks}
    waits_at = next((places[stack] for stack in stacks if stack.rank == failed), "")
    elsewhere = [s for s in stacks if s.is_known and places[s] != waits_at]
    differences = _differences(stacks, hosts)[:_LINES]
    is_complete = waits_at and not any(stack.is_lasting for stack in stacks)
    if not (differences or is_complete):
        return ""
    by_place = _Difference("", waits_at, elsewhere)
    _, call, ranks = min(differences, key=lambda d: len(d.absent), default=by_place)
    has_calls = any(stack.groups for stack in ranks)
    if not has_calls:  # without calls, a rank at the same place may have called it
        ranks = [stack for stack in ranks if stack in elsewhere]
    if not 0 < 2 * len(ranks) <= len(stacks):
        return ""
    first, names = ranks[0], fold(filter(None, (hosts.get(s.node) for s in ranks)))
    who = rank_list([stack.rank for stack in ranks])
    who += f" on {names}" if names else ""
    state = first.problem or f"it was in {places[first] or 'no Python frame'}"
    of_first = f"rank {first.rank}: " if len(ranks) > 1 else ""
    doubt = "" if has_calls else "probably "
    return f"{who} {doubt}did not call {call}; {of_first}{state}"


def _differences(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str]
) -> list[_Difference]:
    members: dict[str, dict[WorkerStack, Group]] = {}
    for stack in stacks:
        for group in stack.groups:
            members.setdefault(group.name, {})[stack] = group
    ordered = sorted(members.items(), key=lambda item: -len(item[1]))
    compared = (_difference(name, groups, stacks, hosts) for name, groups in ordered)
    return [each for each in compared if each is not None and each.absent]


def _difference(
    name: str,
    groups: Mapping[WorkerStack, Group],
    stacks: Sequence[WorkerStack],
    hosts: Mapping[int, str],
) -> _Difference | None:
    """Compare the first unequal calls, or the last ones; ``None`` without calls."""
    called: dict[int, dict[tuple[str, str], tuple[Call, list[WorkerStack]]]] = {}
    for stack, group in groups.items():
        for call in group.calls:
            kinds = called.setdefault(call.number, {})
            kinds.setdefault(call.key, (call, []))[1].append(stack)
    if not called:
        return None
    unequal = (number for number, kinds in called.items() if len(kinds) > 1)
    number = min(unequal, default=max(called))
    size = max(len(groups), *(group.size for group in groups.values()))
    who = Tree(size, hosts).who
    kinds_of_call = sorted(called[number].values(), key=lambda kind: -len(kind[1]))
    (usual, came), *odd = kinds_of_call
    shape = str(usual).removeprefix(usual.operation)
    parts = [f"{who(ranks)} called {call}" for call, ranks in odd]
    missed = [stack for _, ranks in odd for stack in ranks]
    behind: dict[Call | None, list[WorkerStack]] = {}
    for stack, group in groups.items():
        if group.last < number:
            behind.setdefault(next(reversed(group.calls), None), []).append(stack)
            missed.append(stack)
    for last, ranks in behind.items():
        whose = "its" if len(ranks) == 1 else "their"
        before = f"{whose} last was {last.operation} {last.number}" if last else ""
        parts.append(f"{who(ranks)} did not call it, {before or 'nor any other'}")
    if len(groups) < len({*stacks}) <= size:  # all ranks of the job
        unknown = [stack for stack in stacks if stack not in groups]
        parts.append(f"nothing is known of {who(unknown)}")
        missed = missed or unknown
    collective = f"{usual.operation} {number}"
    parts.insert(0, f"{collective} of group {name}{shape}: {who(came)}")
    line = "; ".join(parts[:_PARTS])
    return _Difference(line, collective + shape if odd else collective, missed)


# --- the merged stacks of all ranks ---------------------------------------------------

_SHOWN = 8  # frames of a line; its middle is cut
_HEAD = 2  # frames before the cut
_PARTS_OF_TREE = 10  # branches at one place
_ODD, _USUAL = "* ", "  "
# Functions of torch around the one that the script calls.
_WRAPPERS = ("wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl")


def render(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str], most: int = _PARTS_OF_TREE
) -> list[str]:
    """Return the stacks as lines of a tree, with the stack of most ranks first.

    ``*`` marks what few ranks do while most do something else. The tree has at most
    ``most`` branches at one place.
    """
    tree = Tree(len(stacks), hosts, most)
    readable = [stack for stack in stacks if not stack.problem]
    lines = [*tree.lines(readable)] if readable else []
    problems: dict[str, list[WorkerStack]] = {}
    for stack in stacks:
        if stack.problem:
            problems.setdefault(stack.problem, []).append(stack)
    ordered = sorted(problems.items(), key=lambda item: -len(item[1]))
    for problem, group in ordered[:most]:
        lines.append(f"no stack from {tree.who(group)}: {problem}")
    if rest := [stack for _, group in ordered[most:] for stack in group]:
        lines.append(f"no stack from {tree.who(rest)}: other problems")
    return lines


def summary(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str], most: int
) -> list[str]:
    """Return a tree of the ranks' places; see `place` and `render`."""
    places = [replace(s, frames=tuple(filter(None, [place(s.frames)]))) for s in stacks]
    return render(places, hosts, most)


def place(frames: Sequence[str]) -> str:
    """Return the script's innermost line, and which library function it calls.

    It is like ``all_reduce at train.py:88``; without the script, the innermost frame.
    """
    parts = [frame.partition(" ")[::2] for frame in frames]
    for depth, (function, line) in reversed([*enumerate(parts)]):
        if not _is_library(line):
            called = (name.rpartition(".")[2] for name, _ in parts[depth + 1 :])
            called = (name for name in called if name not in _WRAPPERS)
            shown = next(called, function.rpartition(".")[2])
            return f"{shown} at {PurePath(line).name}"
    return "".join(frames[-1:])


def _is_library(line: str) -> bool:
    package = line.partition("/")[0].partition(".py")[0]
    return package in {"torch", *sys.stdlib_module_names} or line.startswith("<")


class Tree(NamedTuple):
    """Writes groups of ranks; ``total`` counts all ranks."""

    total: int
    hosts: Mapping[int, str]
    most: int = _PARTS_OF_TREE

    def lines(
        self, group: Sequence[WorkerStack], depth: int = 0, indent: str = ""
    ) -> Iterator[str]:
        """Write the common frames below ``depth``, and then the rest."""
        common = _common(group)
        parts: dict[str, list[WorkerStack]] = {}
        for stack in group:
            deeper = stack.frames[common] if len(stack.frames) > common else ""
            parts.setdefault(deeper, []).append(stack)
        if common or len(parts) == 1:
            # A rank without deeper frames is at the caller of the others' frames.
            shown = group[0].frames[depth:common] or group[0].frames[-1:]
            if len(shown) > _SHOWN:
                shown = (*shown[:_HEAD], "...", *shown[_HEAD + 1 - _SHOWN :])
            text = " > ".join(shown) or "no Python frame"
            yield f"{indent}{self.who(group)}: {text}"
        if len(parts) > 1:
            ordered = sorted(parts.values(), key=len, reverse=True)
            is_usual = len(ordered[0]) * 2 > self.total
            most = self.most
            if len(ordered) == most + 1:  # counting one place would also take a line
                most += 1
            for part in ordered[:most]:
                is_odd = is_usual and len(part) * 2 < self.total
                mark = _ODD if is_odd else _USUAL
                yield from self.lines(part, common, " " * len(indent) + mark)
            if rest := [stack for part in ordered[most:] for stack in part]:
                places = count(len(ordered) - most, "other place")
                yield " " * len(indent) + f"{_USUAL}{self.who(rest)}: at {places}"

    def who(self, group: Sequence[WorkerStack]) -> str:
        """Write which ranks these are, and their host if it is a single one."""
        if len(group) == self.total:
            return count(self.total, "rank")
        ranks, node = ranges(stack.rank for stack in group), group[0].node
        if all(stack.node == node for stack in group) and self.hosts.get(node):
            ranks += f", {self.hosts[node]}"
        number = f"{len(group)} of {self.total} ranks" if len(group) > 1 else "1 rank"
        return f"{number} ({ranks})"


def _common(group: Sequence[WorkerStack]) -> int:
    first = group[0].frames
    for depth, frame in enumerate(first):
        if any(s.frames[depth : depth + 1] != (frame,) for s in group):
            return depth
    return len(first)
