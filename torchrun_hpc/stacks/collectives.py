"""The latest collectives of all ranks, compared: which rank did not call one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.errors import count
from torchrun_hpc.names import fold, rank_list
from torchrun_hpc.stacks import tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.stacks.calls import Call, Group
    from torchrun_hpc.stacks.sampling import WorkerStack

_LINES = 8  # groups; the others are counted
_PARTS = 4  # of a line


def compare(
    stacks: Sequence[WorkerStack], hosts: Mapping[int, str]
) -> dict[str, tuple[str, list[WorkerStack]]]:
    """Compare the calls in each process group, the largest group first.

    Return a line for each one whose ranks differ, with a call, and who did not call it.
    """
    members: dict[str, dict[WorkerStack, Group]] = {}
    for stack in stacks:
        for group in stack.groups:
            members.setdefault(group.name, {})[stack] = group
    ordered = sorted(members.items(), key=lambda item: -len(item[1]))
    compared = (_difference(name, groups, stacks, hosts) for name, groups in ordered)
    lines = [(line, missed) for line, missed in compared if missed[1]]
    if more := lines[_LINES:]:
        text = f"{count(len(more), 'other group')} whose ranks differ"
        lines[_LINES:] = [(text, ("", []))]
    return dict(lines)


def absent(stacks: Sequence[WorkerStack], hosts: Mapping[int, str], failed: int) -> str:
    """Return who did not come to a collective, and where they were.

    Others wait for the fewest absent ranks. If the calls do not tell, these are the
    ranks known to be elsewhere than rank ``failed``, if all can be read. Return nothing
    if they are most ranks.
    """
    places = {stack: tree.place(stack.frames) for stack in stacks}
    waits_at = next((places[stack] for stack in stacks if stack.rank == failed), "")
    elsewhere = [s for s in stacks if s.is_known and places[s] != waits_at]
    differences = [each for each in compare(stacks, hosts).values() if each[1]]
    is_complete = waits_at and not any(stack.is_lasting for stack in stacks)
    if not (differences or is_complete):
        return ""
    default = waits_at, elsewhere
    call, ranks = min(differences, key=lambda each: len(each[1]), default=default)
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


def _difference(
    name: str,
    groups: Mapping[WorkerStack, Group],
    stacks: Sequence[WorkerStack],
    hosts: Mapping[int, str],
) -> tuple[str, tuple[str, list[WorkerStack]]]:
    """Compare the first unequal calls, or the last ones."""
    called: dict[int, dict[tuple[str, str], tuple[Call, list[WorkerStack]]]] = {}
    for stack, group in groups.items():
        for call in group.calls:
            kinds = called.setdefault(call.number, {})
            kinds.setdefault(call.key, (call, []))[1].append(stack)
    if not called:
        return "", ("", [])
    unequal = (number for number, kinds in called.items() if len(kinds) > 1)
    number = min(unequal, default=max(called))
    size = max(len(groups), *(group.size for group in groups.values()))
    who = tree.Tree(size, hosts).who
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
    this = f"{usual.operation} {number}"
    parts.insert(0, f"{this} of group {name}{shape}: {who(came)}")
    return "; ".join(parts[:_PARTS]), (this + shape if odd else this, missed)
