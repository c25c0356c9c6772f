"""The outcome of a job, in a file: what a job script needs to decide on a requeue.

The exit code of srun is the highest of all tasks, so a lost node hides a success.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files, wire
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.failures.report import sentence
from torchrun_hpc.options.values import NONE
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.failures.worker import Worker
    from torchrun_hpc.planning.plan import LaunchPlan

DONE, SCRIPT, NODES = "done", "script failed", "nodes failed"
STOPPED, LAUNCHER = "stopped", "launcher failed"
RUNNING = "running"  # also after the end of a launch that was killed

_LARGEST = 2**22  # bytes of an outcome; a job of 10,000 nodes writes 0.5 MB
_INERT = str.maketrans({"$": r"\u0024", "`": r"\u0060"})  # JSON's own escapes

_OUTCOMES = {
    Kind.WORKER: SCRIPT,
    Kind.SIGNAL: STOPPED,
    **dict.fromkeys((Kind.LOST, Kind.SILENT, Kind.MISSING), NODES),
    **dict.fromkeys((Kind.EXCLUDED, Kind.COORDINATOR), NODES),
    **dict.fromkeys((Kind.AGENT, Kind.REFUSED), LAUNCHER),
}


def outcome_of(
    failure: Failure | None,
    plan: LaunchPlan,
    out: Sequence[int] = (),
    restarts: int = 0,
    takeovers: int = 0,
) -> dict[str, Any]:
    """Return how a job has ended, as plain data.

    `out` has the ranks of nodes lost or excluded meanwhile.

    Returns:
        ``outcome`` (a constant of this module), ``launch_id``, ``reason`` (a sentence),
        ``rank`` and ``code`` of the worker that failed first, or ``None``,
        ``nodes`` (names of the nodes that failed), ``exclude`` (these, and nodes
        lost before), ``restarts`` (of all workers), ``takeovers`` (of the
        coordinator), ``preload`` (what was imported once, or none and the reason), and
        ``by``, the name of a node that has only lost the coordinator.
    """
    kind, meeting = DONE if failure is None else _OUTCOMES[failure.kind], plan.meeting
    is_alone = failure is not None and failure.kind is Kind.COORDINATOR
    rank = meeting.node_rank
    about = set(failure.nodes) if failure else set()
    bad = {*out, *(about if kind == NODES else ())}
    return {
        "outcome": kind,
        "launch_id": meeting.launch_id,
        "reason": sentence(failure, meeting) if failure else "",
        "rank": failure.rank if failure and failure.worker else None,
        "code": failure.code if failure and failure.worker else None,
        "nodes": _hosts(about, plan),
        "exclude": _hosts(bad, plan),
        "restarts": restarts,
        "takeovers": takeovers,
        "preload": str(plan.workers.preload or NONE),
        "by": next(iter(_hosts({rank}, plan)), f"node {rank}") if is_alone else "",
    }


def _hosts(ranks: set[int], plan: LaunchPlan) -> list[str]:
    hosts = dict(enumerate(plan.meeting.hosts))
    return [hosts[rank] for rank in sorted(ranks) if hosts.get(rank)]


def write(outcome: dict[str, Any], plan: LaunchPlan) -> None:
    """Write the outcome, if it is wanted: the whole file, or none.

    The first final outcome of the coordinator with the most takeovers counts: a node
    that was cut off may come back later, and believe that all others were lost.
    """
    if not plan.asked.hpc_outcome:
        return
    file = Path(plan.asked.hpc_outcome)
    if _stands(file, outcome):
        return
    # The reason may have come over the network, and a shell script may source this.
    written = json.dumps(outcome, indent=2).translate(_INERT)
    try:
        files.write(file, f"{written}\n")
    except OSError as error:
        text = f"cannot write the outcome to {file}: {error.strerror}"
        console.write(Message("HPC215", text), "error")


def _stands(file: Path, other: Mapping[str, Any]) -> bool:
    """Return whether a file has this launch's final outcome, and keeps it."""
    try:
        present = wire.from_json(files.read(file, _LARGEST, os.O_NOFOLLOW))
    except (OSError, WireError):
        return False
    if not isinstance(present, dict) or present.get("outcome") == RUNNING:
        return False
    is_same = present.get("launch_id") == other["launch_id"]
    return is_same and _weight(present) >= _weight(other)


def _weight(outcome: Mapping[str, Any]) -> int:
    takeovers = outcome.get("takeovers")
    return -1 if outcome.get("by") else takeovers if type(takeovers) is int else 0


def forget(plan: LaunchPlan) -> None:
    """Remove an earlier launch's outcome. Raise `LaunchError` if there is no folder."""
    file = Path(plan.asked.hpc_outcome)
    if not plan.asked.hpc_outcome or not is_reporter(plan.meeting.report_rank):
        return
    if not os.path.isdir(file.parent):  # noqa: PTH112 - it raises nothing
        text = f"--hpc-outcome={file}: the folder {file.parent} does not exist"
        raise LaunchError("HPC234", f"{text}. Create it where all nodes see it")
    with contextlib.suppress(OSError):
        if not files.is_of_system(file):
            file.unlink()


def begin(plan: LaunchPlan, workers: Sequence[Worker]) -> None:
    """Write, on the node of rank 0, that a round has begun; skip files in /dev."""
    is_wanted = plan.asked.hpc_outcome and any(worker.node == 0 for worker in workers)
    if is_wanted and not files.is_of_system(Path(plan.asked.hpc_outcome)):
        write({**outcome_of(None, plan), "outcome": RUNNING}, plan)
