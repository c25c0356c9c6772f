"""What the user reads about the rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, waiting, wire
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure
from torchrun_hpc.host.network import join_endpoint, path_problem
from torchrun_hpc.names import nodes
from torchrun_hpc.planning.messages import RUN_ID, nested
from torchrun_hpc.rendezvous.members import SILENCE_REPORT
from torchrun_hpc.rendezvous.protocol import Refusal
from torchrun_hpc.rendezvous.search import NOBODY
from torchrun_hpc.reporting.reporter import reports_wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import RefusedError

_SHORT = 50  # characters of the name of a site

_PORTS = "Give each launch its own port, --rdzv_endpoint=HOST:PORT, or use mpiexec"

# --- what happens meanwhile -------------------------------------------------------


def render(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Write what the coordinator or this node's client reports; it may be nothing."""
    total = meeting.active
    match event:
        case {"waiting": ranks}:
            code = "HPC114"
            text = (
                f"{total - len(ranks)} of {total} nodes are there after "
                f"{event['seconds']} s; waiting for {names(ranks, meeting)}. "
                f"{meeting.hint}"
            ).rstrip(". ")
        case {"finishing": ranks}:
            code = "HPC120"
            text = (
                f"{total - len(ranks)} of {total} nodes have finished, the last one "
                f"{event['seconds']} s ago; still at work: {names(ranks, meeting)}"
            )
        case {"silent": ranks}:
            code = "HPC121"
            text = (
                f"no sign of {names(ranks, meeting)} for {SILENCE_REPORT} s; the job "
                f"ends in {event['left']} s if it stays so"
            )
        case {"answering": ranks}:
            verb = "answers" if len(ranks) == 1 else "answer"
            code, text = "HPC160", f"{names(ranks, meeting)} {verb} again"
        case {"lost": rank}:
            code = "HPC123"
            text = (
                f"the agent on {names([rank], meeting)} is gone; waiting for it to be "
                "started again"
            )
        case {"restart": number}:
            because = wire.decode(Failure, event["because"])
            return report.restarted(number, because, meeting)
        case {"stranger": ranks}:
            code, who = "HPC229", names(ranks, meeting) or "another node"
            because = event["because"]
            text = f"refused an agent as {who}: {because}. This job continues"
        case {"sites": by_site}:
            return disagreement(by_site, meeting)
        case _:
            return _wait_for_coordinator(event, meeting)
    return Message(code, text)


def names(ranks: Sequence[int], meeting: Meeting) -> str:
    """Write nodes of the job by name and rank."""
    return nodes(ranks, meeting.hosts)


def _wait_for_coordinator(event: Mapping[str, Any], meeting: Meeting) -> Message | None:
    """Report that the coordinator is not found, does not answer, or answers again.

    The first from one node soon, and later from any; the others from one node.
    """
    is_reporter = reports_wait_for(meeting.node_rank, meeting.coordinator)
    node = f"the head node at {meeting.endpoint}"
    match event:
        case {"looking": waited}:
            if waiting.is_report_due(waited, is_reporter=is_reporter):
                problem = _search_problem(event["found"], meeting)
                text = f"{node} ({meeting.connect_host}) for {waited} s: {problem}"
                return Message("HPC113", f"waiting for {text}")
        case {"coordinator_silent": seconds} if is_reporter:
            end = f"the job ends in {event['left']} s if it stays so"
            return Message("HPC124", f"no sign of {node} for {seconds} s; {end}")
        case {"coordinator_answers": seconds} if is_reporter:
            return Message("HPC161", f"{node} answers again, after {seconds} s")
    return None


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
) -> LaunchError:
    """Say why the coordinator refuses this agent."""
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
        code, remedy = "HPC119", "Pass another port, or leave the endpoint out"
        text = f"{node} is of another job than this one, {request.job}"
    others_know = reason is not Refusal.UNKNOWN
    text += ". Node 0 names both" if others_know else ""
    return LaunchError(code, f"{text}. {remedy}", others_know=others_know)
