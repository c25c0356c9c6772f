"""Why a launch has ended too early, and which node is to blame: a pure function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.failures.failure import ending
from torchrun_hpc.launching.abort import WRONG_USE
from torchrun_hpc.names import host, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.launch import Ended

    Cause = tuple[str, tuple[int, ...]]  # what a person reads, and the nodes to blame

# What a worker writes that waits for another one, or has lost it; and what an agent
# tells the others when the doctor has ended it by its limit.
_OF_OTHERS = re.compile(
    "time?d? ?out|no end within|(reset|closed) by|refused|broken pipe|remote process"
    "|received SIGTERM",
    re.IGNORECASE,
)


def cause(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Cause:
    """Return why a launch has ended too early; empty if the launcher itself says it.

    Args:
        ends: How it has ended, by task, in the order in which the tasks have told.
        nodes: Ranks of the nodes of these tasks.
        hosts: Names of all nodes, by rank.
    """
    refused = {nodes[task] for task, end in ends.items() if is_refused(end)}
    if refused:
        is_of_some = refused < {*nodes.values()}
        return "", tuple(sorted(refused)) if is_of_some else ()
    found = [
        (weight, bool(_OF_OTHERS.search(text)), text, blamed)
        for weight, text, blamed in _failures(ends, nodes, hosts)
    ]
    if not found:
        return "", ()
    _, is_of_others, text, blamed = min(found, key=lambda each: each[:2])
    if is_of_others:
        return _who_did_not_come(ends, nodes, hosts) or (text, ())
    return text, blamed


def is_refused(end: Ended) -> bool:
    """Return whether the launcher has refused to start there."""
    return end.code == WRONG_USE and any(is_error for _, _, is_error in end.said)


def _failures(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Yield the failures, with their weights: the least is nearest to the cause."""
    for task, end in ends.items():
        node = nodes[task]
        if end.reason:
            own = sorted({*nodes.values()})
            yield 1, end.reason, tuple(n for n in own if hosts[n] in end.blamed)
        elif end.code:
            words = filter(None, (ending(end.code), end.cause))
            text = f"{host(node, hosts)}: the task {': '.join(words)}"
            yield 0 if end.code < 0 else 2, text, (node,)


def _who_did_not_come(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Cause | None:
    """Return which workers are behind all others; nothing if most of them are."""
    steps = {
        rank: (*step, nodes[task])
        for task, end in ends.items()
        for rank, step in end.at.items()
    }
    last, name = max(((n, step) for n, step, _ in steps.values()), default=(0, ""))
    behind = sorted(rank for rank, (number, *_) in steps.items() if number < last)
    if not 0 < len(behind) <= len(steps) // 2:
        return None
    blamed = tuple(sorted({steps[rank][2] for rank in behind}))
    where = ", ".join(host(node, hosts) for node in blamed)
    return f"rank {ranges(behind)} ({where}) did not come to {name}", blamed
