"""Messages about the rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, waiting, wire
from torchrun_hpc.errors import LaunchError, Message, to_copy
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure
from torchrun_hpc.host.network import join_endpoint, path_problem
from torchrun_hpc.names import host, nodes
from torchrun_hpc.planning.messages import RUN_ID, nested
from torchrun_hpc.rendezvous.members import SILENCE_REPORT
from torchrun_hpc.rendezvous.protocol import Refusal
from torchrun_hpc.rendezvous.search import NOBODY
from torchrun_hpc.reporting.reporter import reports_wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.errors import RefusedError
    from torchrun_hpc.rendezvous.protocol import JoinRequest

_SHORT = 50  # characters of another node's values

_PORTS = "Give each launch its own port with --rdzv_endpoint=HOST:PORT, or use mpiexec"
_BOTH = "Its output shows both"

# --- while the job runs -----------------------------------------------------------


def render(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Write an event of the coordinator or of this node's client, if it is due."""
    for key, write in _EVENTS.items():
        if key in event:
            return write(event, meeting)
    return None


def _waiting(event: Mapping[str, Any], meeting: Meeting) -> Message:
    ranks, total, seconds = event["waiting"], meeting.active, event["seconds"]
    text = f"{total - len(ranks)} of {total} nodes have joined after {seconds} s. "
    text += f"Waiting for {names(ranks, meeting)}. {meeting.hint}".rstrip(". ")
    if unproved := event.get("beside"):
        text += f". Ignored callers without a proof: {', '.join(unproved)}"
    return Message("HPC114", text)


def _finishing(event: Mapping[str, Any], meeting: Meeting) -> Message:
    ranks, total, seconds = event["finishing"], meeting.active, event["seconds"]
    text = f"{total - len(ranks)} of {total} nodes have finished, the last one "
    text += f"{seconds} s ago. Still running: {names(ranks, meeting)}"
    return Message("HPC120", text)


def _silent(event: Mapping[str, Any], meeting: Meeting) -> Message:
    silent, what = event["silent"], "The job ends"
    if meeting.spares.number:
        what = "It counts as lost" if len(silent) == 1 else "They count as lost"
    return _no_answer(names(silent, meeting), SILENCE_REPORT, what, event["left"])


def _no_answer(who: str, seconds: int, what: str, left: int) -> Message:
    text = f"no answer from {who} for {seconds} s. {what} in {left} s if this continues"
    return Message("HPC121", text)


def _answering(event: Mapping[str, Any], meeting: Meeting) -> Message:
    ranks = event["answering"]
    return _answers(names(ranks, meeting), "answers" if len(ranks) == 1 else "answer")


def _answers(who: str, verb: str, after: str = "") -> Message:
    return Message("HPC160", f"{who} {verb} again{after}")


def _lost(event: Mapping[str, Any], meeting: Meeting) -> Message:
    who = f"the agent on {names([event['lost']], meeting)}"
    return Message("HPC123", f"{who} is gone. Waiting until it is started again")


def _restart(event: Mapping[str, Any], meeting: Meeting) -> Message:
    because = wire.decode(Failure, event["because"])
    return report.restarted(event["restart"], because, meeting)


def _stranger(event: Mapping[str, Any], meeting: Meeting) -> Message:
    claimed = names(event["stranger"], meeting)
    who = f"an agent that claims to be {claimed}" if claimed else "an unknown agent"
    text = f"refused {who}: {event['because']}. This job continues"
    return Message("HPC229", text)


def _unproved(event: Mapping[str, Any], _: Meeting) -> Message:
    text = f"ignored {event['unproved']}, which does not prove that it belongs to this "
    text += "job. It belongs to another user or job, has another key, or runs an older "
    return Message("HPC237", f"{text}torchrun_hpc. Key here: {event['key']}")


def _looking(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    waited = event["looking"]
    is_reporter = reports_wait_for(meeting.node_rank, meeting.coordinator)
    if not waiting.is_report_due(waited, is_reporter=is_reporter):
        return None
    problem = _search_problem(event["found"], meeting)
    text = f"{_head_node(meeting)} ({meeting.connect_host}) after {waited} s: {problem}"
    return Message("HPC113", f"still waiting for {text}")


def _coordinator_silent(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    if not reports_wait_for(meeting.node_rank, event.get("of", meeting.coordinator)):
        return None
    what = "Another node takes over" if "of" in event else "The job ends"
    who = _coordinator(event, meeting)
    return _no_answer(who, event["coordinator_silent"], what, event["left"])


def _coordinator_answers(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    if not reports_wait_for(meeting.node_rank, event.get("of", meeting.coordinator)):
        return None
    after = f" after {event['coordinator_answers']} s"
    return _answers(_coordinator(event, meeting), "answers", after)


def _replaced(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = "; ".join(
        f"{names([new], meeting)} replaces {names([old], meeting)} as node rank {rank}"
        for rank, old, new in event["replaced"]
    )
    if number := event["round"]:
        because = event["because"]
        why = because and f"{report.sentence(wire.decode(Failure, because), meeting)}. "
        text = f"restart {number} of all workers: {why or ''}{text}"
    return Message("HPC207", text)


def _excluded(event: Mapping[str, Any], meeting: Meeting) -> Message:
    why = ", because the script also failed on another node"
    return _exclusion(names([event["excluded"]], meeting), event["because"], why)


def _out(event: Mapping[str, Any], meeting: Meeting) -> Message:
    return _exclusion(_own(meeting), event["out"])


def _exclusion(who: str, reason: str, why_not: str = "") -> Message:
    text = f"excluded from this job: {reason}" if reason else f"a spare again{why_not}"
    return Message("HPC208", f"{who} is {text}")


def _takes_over(event: Mapping[str, Any], meeting: Meeting) -> Message:
    old = names([event["takes_over"]], meeting)
    text = f"{_own(meeting)} cannot reach the coordinator on {old}, and takes over "
    return Message("HPC212", f"{text}if enough nodes follow")


def _leased(event: Mapping[str, Any], meeting: Meeting) -> Message:
    where, left = names(event["leased"], meeting), event["left"]
    text = f"workers of an earlier round may still run on {where}. "
    return Message("HPC214", f"{text}The next round waits for them, for up to {left} s")


def _suspended(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = f"was suspended for up to {event['suspended']} s. Its workers are killed, "
    text += "because another node may have replaced it"
    return Message("HPC210", f"{_own(meeting)} {text}")


def _seeks(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    if not waiting.is_report_due(event["seeks"]):
        return None
    text = f"{_own(meeting)} has looked for the coordinator for {event['seeks']} s. "
    return Message("HPC218", f"{text}It gives up in {event['left']} s")


_EVENTS: dict[str, Callable[[Mapping[str, Any], Meeting], Message | None]] = {
    "waiting": _waiting,
    "finishing": _finishing,
    "silent": _silent,
    "answering": _answering,
    "lost": _lost,
    "restart": _restart,
    "stranger": _stranger,
    "unproved": _unproved,
    "differ": lambda event, meeting: disagreement(event["differ"], meeting),
    "looking": _looking,
    "coordinator_silent": _coordinator_silent,
    "coordinator_answers": _coordinator_answers,
    "replaced": _replaced,
    "excluded": _excluded,
    "out": _out,
    "takes_over": _takes_over,
    "leased": _leased,
    "suspended": _suspended,
    "seeks": _seeks,
}

_WARNINGS = {"differ", "stranger", "unproved", "replaced", "excluded", "out"}
_WARNINGS |= {"takes_over", "leased"}
_WARNINGS_OF_SPARES = frozenset(["suspended", "seeks", "silent", "coordinator_silent"])


def is_warning(event: Mapping[str, Any], meeting: Meeting) -> bool:
    """Return whether an event is a warning, rather than a note."""
    with_spares = _WARNINGS_OF_SPARES if meeting.spares.number else ()
    return not event.keys().isdisjoint({*_WARNINGS, *with_spares})


def cause_of(event: Mapping[str, Any]) -> Failure | None:
    """Return the cause of a restart; ``None`` if the event is no restart."""
    because = event.get("because") if {"restart", "replaced"} & event.keys() else None
    return because and wire.decode(Failure, because)


def _own(meeting: Meeting) -> str:
    return host(meeting.node_rank, meeting.hosts)


def _head_node(meeting: Meeting) -> str:
    return f"the head node at {meeting.endpoint}"


def _coordinator(event: Mapping[str, Any], meeting: Meeting) -> str:
    if "of" not in event:
        return _head_node(meeting)
    return f"the coordinator on {names([event['of']], meeting)}"


def names(ranks: Sequence[int], meeting: Meeting) -> str:
    """Write nodes of the job by name and rank."""
    return nodes(ranks, meeting.hosts)


def disagreement(ranks: Mapping[str, Sequence[int]], meeting: Meeting) -> Message:
    """Report that nodes differ, given node ranks by what is compared ("" is none)."""
    shown = {wire.printable(values, _SHORT): values for values in ranks}
    who = "; ".join(
        f"{text or 'none'} on {names(ranks[values], meeting)}"
        for text, values in shown.items()
    )
    text = (
        f"the nodes have different values: {who}. Pass --hpc-site=NAME, or set each "
        "variable on all nodes or on none (mpirun: with or without -x NAME)"
    )
    return Message("HPC163", text)


# --- why a launch ends ------------------------------------------------------------


def coordinator_missing(
    found: str, timeout: float, meeting: Meeting, option: str = "join_timeout"
) -> Message:
    """Report what was found instead of the coordinator within `timeout` seconds."""
    node = f"{meeting.endpoint} ({meeting.connect_host})"
    text = f"no head node at {node} within {timeout:.0f} s ({option}): "
    return Message("HPC112", text + _search_problem(found, meeting))


def _search_problem(found: str, meeting: Meeting) -> str:
    if NOBODY in found:  # its node is reached
        hint = f"Check that the job has started there. {meeting.hint}".rstrip(" .")
        return f"{found}. {hint}"
    problem, is_cause = path_problem(meeting.local_address, meeting.connect_host)
    if is_cause:
        return problem
    problems = "; ".join(filter(None, (found or "no answer yet", problem)))
    return ". ".join(filter(None, (problems, meeting.network_hint)))


def refusal(
    refused: RefusedError,
    meeting: Meeting,
    request: JoinRequest,
    environ: Mapping[str, str],
    key: str,
) -> LaunchError:
    """Return why the coordinator refuses this agent, which has this key."""
    endpoint = join_endpoint(meeting.connect_host, refused.port)
    node = f"the head node at {endpoint}"
    reason, outer = refused.reason, environ.get(RUN_ID, "")
    # The coordinator does not tell its own id.
    is_own = outer == request.run_id
    is_second = reason is (Refusal.TAKEN if is_own else Refusal.RUN_ID)
    if is_second and (inside := nested(environ, outer)):
        return inside
    if reason is Refusal.UNPROVED:
        text = f"{node} does not prove that it belongs to job {meeting.launch_id}. It "
        text += f"belongs to another job or user, or has another key. Key here: {key}. "
        text += "Pass the same --hpc-key-file=FILE on all nodes, or pass another port"
        return LaunchError("HPC119", text, others_know=True)
    if reason is Refusal.TAKEN:
        text = f"{node} already has an agent of node {meeting.node_rank}. {_BOTH}. "
        text += "Start torchrun_hpc once on each node"
        return LaunchError("HPC115", text, others_know=True)
    remedy, verb = "Start one job step with the same command on all nodes", "has"
    if reason is Refusal.VERSION:
        code, own, what = "HPC116", f"torchrun_hpc {__version__}", "version"
        remedy = "Load the same environment on all nodes"
    elif reason is Refusal.RUN_ID:
        code, own, what = "HPC117", f"--rdzv_id={request.run_id}", "id"
        remedy = f"Leave it out if each node generates its own id. {_PORTS}"
    elif reason is Refusal.STARTED:
        code, own, what = "HPC232", request.started, "command"
        verb, remedy = "runs", _PORTS
    elif reason is Refusal.SPARES:
        code, own, what = "HPC206", f"--hpc-spares={meeting.spares.number}", "number"
    else:
        code, own, what, verb = "HPC118", f"{meeting.nodes} nodes", "number", "sees"
    text = f"this node {verb} {own}, but {node} {verb} another {what}. {_BOTH}. "
    return LaunchError(code, text + remedy, others_know=True)


def bad_nodes(ranks: Sequence[int], meeting: Meeting) -> Message:
    """Name the nodes that the next job should exclude."""
    text = f"lost or excluded nodes: {names(ranks, meeting)}"
    if meeting.spares.exclude:
        hosts = ",".join(filter(None, (meeting.hosts[rank] for rank in ranks)))
        option = to_copy(f"{meeting.spares.exclude}{hosts}")
        text += f". Exclude them from the next job:{option}"
    return Message("HPC213", text)
