"""The stacks of all ranks, merged: what is common, once, and what is odd, marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import count
from torchrun_hpc.reporting import names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.stacks.sampling import WorkerStack

_SHOWN = 8  # frames of a line, the middle of which is cut
_HEAD = 2  # of them, those in front of the cut
_ODD = "* "


def render(stacks: Sequence[WorkerStack], hosts: Mapping[int, str]) -> list[str]:
    """Write the stacks as a tree, the one of most ranks first.

    Args:
        stacks: Of each rank.
        hosts: Names of the nodes by rank.

    Returns:
        Lines; ``*`` is in front of what few ranks do, where most do something else.
    """
    if len({stack.node for stack in stacks}) == 1:
        hosts = {}
    known = [stack for stack in stacks if not stack.problem]
    lines = [*_lines(known, 0, "", len(stacks), hosts)] if known else []
    problems: dict[str, list[WorkerStack]] = {}
    for stack in stacks:
        if stack.problem:
            problems.setdefault(stack.problem, []).append(stack)
    for problem, group in problems.items():
        lines.append(f"no stack of {_who(group, len(stacks), hosts)}: {problem}")
    return lines


def _lines(
    group: Sequence[WorkerStack],
    depth: int,
    indent: str,
    total: int,
    hosts: Mapping[int, str],
) -> Iterator[str]:
    """Write what ranks have in common below ``depth`` frames, and then the rest."""
    common = _common(group)
    shown = group[0].frames[depth:common]
    if len(shown) > _SHOWN:
        shown = (*shown[:_HEAD], "...", *shown[_HEAD + 1 - _SHOWN :])
    is_odd = indent and len(group) * 2 < total
    mark = _ODD if is_odd else indent and "  "
    text = " > ".join(shown) or "no frame of Python"
    yield f"{indent[2:]}{mark}{_who(group, total, hosts)}: {text}"
    parts: dict[str, list[WorkerStack]] = {}
    for stack in group:
        deeper = stack.frames[common] if len(stack.frames) > common else ""
        parts.setdefault(deeper, []).append(stack)
    if len(parts) > 1:
        for part in sorted(parts.values(), key=len, reverse=True):
            yield from _lines(part, common, indent + "  ", total, hosts)


def _common(group: Sequence[WorkerStack]) -> int:
    """Return how many of the outermost frames are the same."""
    first = group[0].frames
    for depth, frame in enumerate(first):
        if any(s.frames[depth : depth + 1] != (frame,) for s in group):
            return depth
    return len(first)


def _who(group: Sequence[WorkerStack], total: int, hosts: Mapping[int, str]) -> str:
    ranks = names.ranges(stack.rank for stack in group)
    if len(group) == total:
        return count(total, "rank")
    node = group[0].node
    if all(stack.node == node for stack in group):
        ranks += f", {hosts[node]}" if hosts.get(node) else ""
    number = f"{len(group)} of {total} ranks" if len(group) > 1 else "1 rank"
    return f"{number} ({ranks})"


def as_data(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the stacks for ``--json``: one object for each rank."""
    return [
        {
            "rank": stack.rank,
            "node": stack.node,
            "host": hosts.get(stack.node, ""),
            "frames": list(stack.frames),
            "problem": stack.problem,
        }
        for stack in sorted(stacks, key=lambda stack: stack.rank)
    ]
