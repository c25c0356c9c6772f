"""The cause of a launch that ended too early, and the nodes to blame."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.agent.abort import WRONG_USE
from torchrun_hpc.failures.failure import ending
from torchrun_hpc.names import host, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.doctor.launch import Ended

    Cause = tuple[str, tuple[int, ...]]  # text, and the nodes to blame

_FAILED = "the job has failed: "  # the launcher's last line

# Texts of a worker that waits for another one or has lost it, and of an agent that the
# doctor has ended at its limit.
_OF_OTHERS = re.compile(
    "time?d? ?out|not end within|(reset|closed) by|refused|broken pipe|remote process"
    "|received SIGTERM",
    re.IGNORECASE,
)


def cause(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Cause:
    """Return why a launch ended too early; empty if the launcher refused to start."""
    refused = {nodes[task] for task, end in ends.items() if is_refused(end)}
    if refused:
        is_of_some = refused < {*nodes.values()}
        return "", tuple(sorted(refused)) if is_of_some else ()
    found = [*_failures(ends, nodes, hosts)]
    if not found:
        return "", ()
    is_of_others, _, text, blamed = min(found, key=lambda each: each[:2])
    if is_of_others:
        return _who_did_not_come(ends, nodes, hosts) or (text, ())
    return text, blamed


def is_refused(end: Ended) -> bool:
    """Return whether the launcher refused to start."""
    return end.code == WRONG_USE and any(is_error for _, _, is_error in end.said)


def _failures(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Iterator[tuple[bool, int, str, tuple[int, ...]]]:
    """Yield failures: whether others caused it, rank of the cause, text, and nodes."""
    for task, end in ends.items():
        node, own = nodes[task], _own_cause(end)
        if end.reason:
            about = {n for n in nodes.values() if hosts[n] in end.blamed}
            is_of_others = bool(_OF_OTHERS.search(end.reason))
            yield is_of_others, 1, end.reason, tuple(sorted(about))
        elif end.is_stopped or (end.code > 0 and not own):
            yield True, 3, f"{host(node, hosts)}: {own or ending(end.code)}", ()
        elif end.code:
            text = ": ".join(filter(None, (ending(end.code), own)))
            is_of_others = bool(_OF_OTHERS.search(own))
            weight = 0 if end.code < 0 else 2
            yield is_of_others, weight, f"{host(node, hosts)}: the task {text}", (node,)


def _own_cause(end: Ended) -> str:
    # Step -1 of a worker is the import of torch.
    if not (end.cause or end.torch or any(n >= 0 for n, _ in end.at.values())):
        return "the import of torch did not finish"
    before, mark, told = end.cause.partition(_FAILED)
    return told if mark else before * (not before.startswith("torchrun_hpc"))


def _who_did_not_come(
    ends: Mapping[int, Ended], nodes: Mapping[int, int], hosts: Sequence[str]
) -> Cause | None:
    """Return the workers behind all others; nothing if most workers are behind."""
    steps: list[tuple[int, str, int, tuple[int, ...]]] = []
    for task, end in ends.items():
        # Its launcher did not start a worker, or did not even import torch.
        begun = -2 if end.torch else -3, "the meeting of the agents"
        at = [(*step, nodes[task], (rank,)) for rank, step in end.at.items()]
        steps += at or [(*begun, nodes[task], ())]
    last, name = max(((n, step) for n, step, *_ in steps), default=(0, ""))
    behind = [each for each in steps if each[0] < last]
    if not 0 < len(behind) <= len(steps) // 2:
        return None
    blamed = tuple(sorted({node for _, _, node, _ in behind}))
    who = ", ".join(host(node, hosts) for node in blamed)
    if ranks := [rank for *_, known in behind for rank in known]:
        who = f"rank {ranges(sorted(ranks))} ({who})"
    return f"{who} did not reach {name}", blamed
