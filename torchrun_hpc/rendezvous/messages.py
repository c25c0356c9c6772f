"""What the user reads about the rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, waiting, wire
from torchrun_hpc.errors import LaunchError, Message
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

_SHORT = 50  # characters of the name of a site

_PORTS = "Give each launch its own port, --rdzv_endpoint=HOST:PORT, or use mpiexec"

# --- what happens meanwhile -------------------------------------------------------


def render(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Write what the coordinator or this node's client reports; it may be nothing."""
    for key, write in _EVENTS.items():
        if key in event:
            return write(event, meeting)
    return None


def _waiting(event: Mapping[str, Any], meeting: Meeting) -> Message:
    ranks, total, seconds = event["waiting"], meeting.active, event["seconds"]
    text = f"{total - len(ranks)} of {total} nodes are there after {seconds} s; "
    text += f"waiting for {names(ranks, meeting)}. {meeting.hint}".rstrip(". ")
    if unproved := event.get("beside"):
        text += f". Without a proof: {', '.join(unproved)}"
    return Message("HPC114", text)


def _finishing(event: Mapping[str, Any], meeting: Meeting) -> Message:
    ranks, total, seconds = event["finishing"], meeting.active, event["seconds"]
    text = f"{total - len(ranks)} of {total} nodes have finished, the last one "
    text += f"{seconds} s ago; still at work: {names(ranks, meeting)}"
    return Message("HPC120", text)


def _silent(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = f"no sign of {names(event['silent'], meeting)} for {SILENCE_REPORT} s; "
    if meeting.spares.number:
        return Message("HPC217", f"{text}lost in {event['left']} s if it stays so")
    return Message("HPC121", f"{text}the job ends in {event['left']} s if it stays so")


def _answering(event: Mapping[str, Any], meeting: Meeting) -> Message:
    verb = "answers" if len(event["answering"]) == 1 else "answer"
    return Message("HPC160", f"{names(event['answering'], meeting)} {verb} again")


def _lost(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = f"the agent on {names([event['lost']], meeting)} is gone; waiting for it to "
    return Message("HPC123", f"{text}be started again")


def _restart(event: Mapping[str, Any], meeting: Meeting) -> Message:
    because = wire.decode(Failure, event["because"])
    return report.restarted(event["restart"], because, meeting)


def _stranger(event: Mapping[str, Any], meeting: Meeting) -> Message:
    who = names(event["stranger"], meeting) or "another node"
    text = f"refused an agent as {who}: {event['because']}. This job continues"
    return Message("HPC229", text)


def _unproved(event: Mapping[str, Any], _: Meeting) -> Message:
    text = f"ignored {event['unproved']}, which does not prove that it belongs to this "
    text += "job. It belongs to another user or job, has another key, or is an older "
    return Message("HPC237", f"{text}torchrun_hpc. Key here: {event['key']}")


def _sites(event: Mapping[str, Any], meeting: Meeting) -> Message:
    return disagreement(event["sites"], meeting)


def _looking(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Report that the coordinator is not found: soon from one node, later from any."""
    waited = event["looking"]
    is_reporter = reports_wait_for(meeting.node_rank, meeting.coordinator)
    if not waiting.is_report_due(waited, is_reporter=is_reporter):
        return None
    problem = _search_problem(event["found"], meeting)
    text = f"{_head_node(meeting)} ({meeting.connect_host}) for {waited} s: {problem}"
    return Message("HPC113", f"waiting for {text}")


def _coordinator_silent(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    seconds, left = event["coordinator_silent"], event["left"]
    if not reports_wait_for(meeting.node_rank, event.get("of", meeting.coordinator)):
        return None
    if "of" not in event:
        text = f"no sign of {_head_node(meeting)} for {seconds} s; the job ends in "
        return Message("HPC124", f"{text}{left} s if it stays so")
    text = f"no sign of the coordinator on {names([event['of']], meeting)} for "
    text += f"{seconds} s; another node takes over in {left} s if it stays so"
    return Message("HPC211", text)


def _coordinator_answers(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    of = event.get("of", meeting.coordinator)
    if not reports_wait_for(meeting.node_rank, of):
        return None
    who = _head_node(meeting)
    if "of" in event:
        who = f"the coordinator on {names([of], meeting)}"
    text = f"answers again, after {event['coordinator_answers']} s"
    return Message("HPC161", f"{who} {text}")


def _replaced(event: Mapping[str, Any], meeting: Meeting) -> Message:
    """Say who takes whose place, and why."""
    text = "; ".join(
        f"{names([new], meeting)} takes the place of {names([old], meeting)} as node "
        f"rank {rank}"
        for rank, old, new in event["replaced"]
    )
    if number := event["round"]:
        because = event["because"]
        why = because and f"{report.sentence(wire.decode(Failure, because), meeting)}. "
        text = f"restart {number} of all workers: {why or ''}{text}"
    return Message("HPC207", text)


def _excluded(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = "a spare again: the script has failed on another node, too"
    if reason := event["because"]:
        text = f"out: {reason}"
    return Message("HPC208", f"{names([event['excluded']], meeting)} is {text}")


def _out(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = "is a spare again"
    if reason := event["out"]:
        text = f"takes part no more, and waits for the end: {reason}"
    return Message("HPC209", f"{_own(meeting)} {text}")


def _takes_over(event: Mapping[str, Any], meeting: Meeting) -> Message:
    old = names([event["takes_over"]], meeting)
    text = (
        f"{_own(meeting)} does not reach the coordinator on {old}, and takes over if "
    )
    return Message("HPC212", f"{text}enough nodes follow")


def _may_run(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = f"workers may still run on {names(event['may_run'], meeting)}, which cannot "
    text += f"be asked: the next round begins in {event['left']} s"
    return Message("HPC214", text)


def _suspended(event: Mapping[str, Any], meeting: Meeting) -> Message:
    text = f"was suspended for up to {event['suspended']} s: its workers are killed"
    return Message("HPC210", f"{_own(meeting)} {text}")


def _seeks(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    if not waiting.is_report_due(event["seeks"]):
        return None
    text = f"{_own(meeting)} looks for the node that coordinates the job, for "
    text += f"{event['seeks']} s; it ends in {event['left']} s if there is none"
    return Message("HPC218", text)


_EVENTS: dict[str, Callable[[Mapping[str, Any], Meeting], Message | None]] = {
    "waiting": _waiting,
    "finishing": _finishing,
    "silent": _silent,
    "answering": _answering,
    "lost": _lost,
    "restart": _restart,
    "stranger": _stranger,
    "unproved": _unproved,
    "sites": _sites,
    "looking": _looking,
    "coordinator_silent": _coordinator_silent,
    "coordinator_answers": _coordinator_answers,
    "replaced": _replaced,
    "excluded": _excluded,
    "out": _out,
    "takes_over": _takes_over,
    "may_run": _may_run,
    "suspended": _suspended,
    "seeks": _seeks,
}

_WARNINGS = {"sites", "stranger", "unproved", "replaced", "excluded", "out"}
_WARNINGS |= {"takes_over", "may_run"}
_WARNINGS_OF_SPARES = frozenset(["suspended", "seeks", "silent", "coordinator_silent"])


def is_warning(event: Mapping[str, Any], meeting: Meeting) -> bool:
    """Return whether an event is more than news."""
    with_spares = _WARNINGS_OF_SPARES if meeting.spares.number else ()
    return not event.keys().isdisjoint({*_WARNINGS, *with_spares})


def _own(meeting: Meeting) -> str:
    return host(meeting.node_rank, meeting.hosts)


def _head_node(meeting: Meeting) -> str:
    return f"the head node at {meeting.endpoint}"


def names(ranks: Sequence[int], meeting: Meeting) -> str:
    """Write nodes of the job by name and rank."""
    return nodes(ranks, meeting.hosts)


def disagreement(by_site: Mapping[str, Sequence[int]], meeting: Meeting) -> Message:
    """Say that not all nodes use the same site.

    Args:
        by_site: Name of each site, empty for none, and the ranks of its nodes.
        meeting: Where the nodes meet.
    """
    names_of = {wire.printable(site, _SHORT): site for site in by_site}
    who = "; ".join(
        f"{name or 'none'} on {names(by_site[site], meeting)}"
        for name, site in names_of.items()
    )
    text = (
        f"the nodes use different sites, and so other variables: {who}. Type "
        f"--hpc-site={next(filter(None, names_of), 'NAME')}, or export on all nodes "
        "what tells it (mpirun: -x NAME)"
    )
    return Message("HPC163", text)


# --- why a launch ends ------------------------------------------------------------


def coordinator_missing(
    found: str, timeout: float, meeting: Meeting, option: str = "join_timeout"
) -> Message:
    """Say what was found on the coordinator's ports.

    Args:
        found: That.
        timeout: Seconds that it was looked for.
        meeting: Where the nodes meet.
        option: What has set the timeout.
    """
    node = f"{meeting.endpoint} ({meeting.connect_host})"
    text = f"no head node at {node} within {timeout:.0f} s ({option}): "
    return Message("HPC112", text + _search_problem(found, meeting))


def _search_problem(found: str, meeting: Meeting) -> str:
    """Say why the coordinator was not found: the cause, not what follows from it."""
    if NOBODY in found:  # its node is reached
        return f"{found}. Has the job started there? {meeting.hint}".rstrip()
    problem, is_cause = path_problem(meeting.local_address, meeting.connect_host)
    if is_cause:
        return problem
    parts = (found or "no answer yet", problem, meeting.network_hint)
    return "; ".join(filter(None, parts))


def refusal(
    refused: RefusedError,
    meeting: Meeting,
    request: JoinRequest,
    environ: Mapping[str, str],
    key: str,
) -> LaunchError:
    """Say why the coordinator refuses this agent, which has this key."""
    endpoint = join_endpoint(meeting.connect_host, refused.port)
    node = f"the head node at {endpoint}"
    reason, outer = refused.reason, environ.get(RUN_ID, "")
    # The coordinator does not say its own id.
    is_own = outer == request.run_id
    is_second = reason is (Refusal.TAKEN if is_own else Refusal.RUN_ID)
    if is_second and (inside := nested(environ, outer)):
        return inside
    remedy = "Start one job step with the same command on all nodes"
    other = f"here, but another number on {node}"
    if reason is Refusal.TAKEN:
        code, remedy = "HPC115", "Start torchrun_hpc once on each node"
        text = f"{node} has another agent of node {meeting.node_rank} already"
    elif reason is Refusal.VERSION:
        code, remedy = "HPC116", "Load the same environment on all nodes"
        text = f"torchrun_hpc {__version__} here, but another one on {node}"
    elif reason is Refusal.RUN_ID:
        code, remedy = "HPC117", f"Leave it out if each node makes its own. {_PORTS}"
        text = f"--rdzv_id={request.run_id} here, but another one on {node}"
    elif reason is Refusal.STARTED:
        code, remedy = "HPC232", _PORTS
        text = f"{request.started} here, but another command on {node}"
    elif reason is Refusal.SPARES:
        code, text = "HPC206", f"--hpc-spares={meeting.spares.number} {other}"
    elif reason is Refusal.NODES:
        code, text = "HPC118", f"{meeting.nodes} nodes {other}"
    else:
        text = f"{node} does not prove that it belongs to job {meeting.launch_id}. It "
        text += f"belongs to another job or user, or has another key. Key here: {key}. "
        text += "Pass the same --hpc-key-file=FILE on all nodes, or pass another port"
        return LaunchError("HPC119", text, others_know=True)
    text += f". Node 0 names both. {remedy}"
    return LaunchError(code, text, others_know=True)


def bad_nodes(ranks: Sequence[int], meeting: Meeting) -> Message:
    """Name the nodes that the next job had better do without."""
    text = f"lost, or out: {names(ranks, meeting)}"
    if meeting.spares.exclude:
        hosts = ",".join(filter(None, (meeting.hosts[rank] for rank in ranks)))
        text += f". For the next job: {meeting.spares.exclude}{hosts}"
    return Message("HPC213", text)
