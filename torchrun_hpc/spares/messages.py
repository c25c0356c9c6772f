"""What the user reads about spares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.errors import Message
from torchrun_hpc.failures.failure import Failure
from torchrun_hpc.failures.report import sentence
from torchrun_hpc.names import host
from torchrun_hpc.rendezvous.members import SILENCE_REPORT
from torchrun_hpc.rendezvous.messages import names
from torchrun_hpc.waiting import is_report_due

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.meeting import Meeting


def render(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Write what the coordinator or this member reports; ``None`` if it is not ours."""
    own = host(meeting.node_rank, meeting.hosts)
    match event:
        case {"replaced": replaced, "round": number}:
            code, text = (
                "HPC207",
                _replaced(replaced, number, event["because"], meeting),
            )
        case {"excluded": node, "because": reason}:
            code, text = "HPC208", f"{names([node], meeting)} is out: {reason}"
            if not reason:
                text = (
                    f"{names([node], meeting)} is a spare again: the script has failed "
                    "on another node, too"
                )
        case {"out": reason}:
            code, text = "HPC209", f"{own} is a spare again"
            if reason:
                text = f"{own} takes part no more, and waits for the end: {reason}"
        case {"takes_over": old}:
            code = "HPC212"
            text = (
                f"{own} does not reach the coordinator on {names([old], meeting)}, and "
                "takes over if enough nodes follow"
            )
        case {"may_run": ranks, "left": left}:
            code = "HPC214"
            text = (
                f"workers may still run on {names(ranks, meeting)}, which cannot be "
                f"asked: the next round begins in {left} s"
            )
        case _:
            return _silence(event, meeting)
    return Message(code, text)


def _silence(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Write who has not been heard of for how long."""
    own = host(meeting.node_rank, meeting.hosts)
    match event:
        case {"suspended": seconds}:
            code = "HPC210"
            text = f"{own} was suspended for up to {seconds} s: its workers are killed"
        case {"silent": ranks, "left": left}:
            code = "HPC217"
            text = (
                f"no sign of {names(ranks, meeting)} for {SILENCE_REPORT} s; lost in "
                f"{left} s if it stays so"
            )
        case {"seeks": waited, "left": left} if is_report_due(waited):
            code = "HPC218"
            text = (
                f"{own} looks for the node that coordinates the job, for {waited} s; "
                f"it ends in {left} s if there is none"
            )
        case {"coordinator_silent": seconds, "left": left, "of": coordinator}:
            code = "HPC211"
            text = (
                f"no sign of the coordinator on {names([coordinator], meeting)} for "
                f"{seconds} s; another node takes over in {left} s if it stays so"
            )
        case _:
            return None
    return Message(code, text)


def _replaced(
    replaced: Sequence[tuple[int, int, int]],
    number: int,
    because: Mapping[str, Any] | None,
    meeting: Meeting,
) -> str:
    """Say who takes whose place, and why."""
    who = "; ".join(
        f"{names([new], meeting)} takes the place of {names([old], meeting)} as node "
        f"rank {rank}"
        for rank, old, new in replaced
    )
    if not number:
        return who
    why = f"{sentence(wire.decode(Failure, because), meeting)}. " if because else ""
    return f"restart {number} of all workers: {why}{who}"


def bad_nodes(ranks: Sequence[int], meeting: Meeting) -> Message:
    """Name the nodes that the next job had better do without."""
    text = f"lost, or out: {names(ranks, meeting)}"
    if meeting.spares is not None and meeting.spares.exclude:
        hosts = ",".join(filter(None, (meeting.hosts[rank] for rank in ranks)))
        text += f". For the next job: {meeting.spares.exclude}{hosts}"
    return Message("HPC213", text)
