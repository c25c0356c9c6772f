"""The merged stacks of all ranks: common frames once, unusual ranks marked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.errors import count
from torchrun_hpc.names import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.stacks.sampling import WorkerStack

_SHOWN = 8  # frames of a line; its middle is cut
_HEAD = 2  # frames before the cut
_PARTS = 10  # branches at one place
_ODD, _USUAL = "* ", "  "
# Functions of torch around the one that the script calls.
_WRAPPERS = ("wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl")


def render(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str], most: int = _PARTS
) -> list[str]:
    """Return the stacks as lines of a tree, with the stack of most ranks first.

    ``*`` marks what few ranks do while most do something else. The tree has at most
    ``most`` branches at one place.
    """
    tree = Tree(len(stacks), hosts, most)
    known = [stack for stack in stacks if not stack.problem]
    lines = [*tree.lines(known)] if known else []
    problems: dict[str, list[WorkerStack]] = {}
    for stack in stacks:
        if stack.problem:
            problems.setdefault(stack.problem, []).append(stack)
    ordered = sorted(problems.items(), key=lambda item: len(item[1]), reverse=True)
    for problem, group in ordered[:most]:
        lines.append(f"no stack from {tree.who(group)}: {problem}")
    if rest := [stack for _, group in ordered[most:] for stack in group]:
        lines.append(f"no stack from {tree.who(rest)}: other problems")
    return lines


def summary(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str], most: int
) -> list[str]:
    """Return where the ranks are in the script: ``all_reduce at train.py:88``."""
    places = [replace(s, frames=tuple(filter(None, [place(s.frames)]))) for s in stacks]
    return render(places, hosts, most)


def place(frames: Sequence[str]) -> str:
    """Return the script's innermost line, with the library's function called there."""
    parts = [frame.partition(" ")[::2] for frame in frames]
    for depth, (function, line) in reversed([*enumerate(parts)]):
        if not _is_library(line):
            called = (name.rpartition(".")[2] for name, _ in parts[depth + 1 :])
            called = (name for name in called if name not in _WRAPPERS)
            shown = next(called, function.rpartition(".")[2])
            return f"{shown} at {PurePath(line).name}"
    return "".join(frames[-1:])


def _is_library(place: str) -> bool:
    package = place.partition("/")[0].partition(".py")[0]
    return (
        package == "torch"
        or package in sys.stdlib_module_names
        or place.startswith("<")
    )


class Tree(NamedTuple):
    """Writes groups of ranks; ``total`` counts all ranks."""

    total: int
    hosts: Mapping[int, str]
    most: int = _PARTS

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
            most = self.most + (len(ordered) == self.most + 1)  # it needs one line
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
