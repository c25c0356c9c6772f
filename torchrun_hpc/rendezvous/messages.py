"""What the user reads about the rendezvous."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.network import join_endpoint, path_problem
from torchrun_hpc.planning.messages import nested
from torchrun_hpc.rendezvous.coordinator import SILENCE_REPORT
from torchrun_hpc.rendezvous.protocol import Failure, Kind, Refusal, unpacked
from torchrun_hpc.rendezvous.search import NOBODY
from torchrun_hpc.reporting import intervals
from torchrun_hpc.reporting.reporter import is_reporter, reports_wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.launch_plan import LaunchPlan
    from torchrun_hpc.rendezvous.protocol import JoinRequest
    from torchrun_hpc.rendezvous.search import RefusedError

# How many names a message quotes.
_SHOWN = 10

# Characters of the name of a site.
_SHORT = 50

# --- what happens meanwhile -------------------------------------------------------


def render(event: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    """Write what the coordinator or this node's client reports; it may be nothing."""
    for key, write in (
        ("looking", _looking),
        ("waiting", _waiting),
        ("finishing", _finishing),
        ("silent", _silent),
        ("answering", _answering),
        ("lost", _lost),
        ("restart", _restart),
        ("sites", _sites),
        ("coordinator_silent", _coordinator_silent),
        ("coordinator_answers", _coordinator_silent),
    ):
        if key in event:
            return write(event, plan)
    return None


def _coordinator_silent(event: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    """Report that the coordinator does not answer, or answers again."""
    if not reports_wait_for(plan.world.node_rank, plan.rendezvous.coordinator):
        return None
    node = f"the head node at {plan.rendezvous.endpoint}"
    if "coordinator_answers" in event:
        seconds = event["coordinator_answers"]
        return Message("HPC161", f"{node} answers again, after {seconds} s")
    text = (
        f"no sign of {node} for {event['coordinator_silent']} s; the job ends in "
        f"{event['left']} s if it stays so"
    )
    return Message("HPC124", text)


def _waiting(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    missing = event["waiting"]
    text = (
        f"{plan.world.nodes - len(missing)} of {plan.world.nodes} nodes are there after "
        f"{event['seconds']} s; waiting for {names(missing, plan)}"
    )
    return Message("HPC114", f"{text}. {plan.messages.hint}".rstrip(". "))


def _finishing(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    unfinished = event["finishing"]
    text = (
        f"{plan.world.nodes - len(unfinished)} of {plan.world.nodes} nodes have finished, the last "
        f"one {event['seconds']} s ago; still at work: {names(unfinished, plan)}"
    )
    return Message("HPC120", text)


def _silent(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    text = (
        f"no sign of {names(event['silent'], plan)} for {SILENCE_REPORT} s; the job "
        f"ends in {event['left']} s if it stays so"
    )
    return Message("HPC121", text)


def _answering(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    ranks = event["answering"]
    verb = "answers" if len(ranks) == 1 else "answer"
    return Message("HPC160", f"{names(ranks, plan)} {verb} again")


def _lost(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    text = (
        f"the agent on {names([event['lost']], plan)} is gone; waiting for it to be "
        "started again"
    )
    return Message("HPC123", text)


def _restart(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    cause = _cause(unpacked(event["because"]), plan)
    return Message("HPC128", f"restart {event['restart']} of all workers: {cause}")


def _sites(event: Mapping[str, Any], plan: LaunchPlan) -> Message:
    return disagreement(event["sites"], plan)


def disagreement(by_site: Mapping[str, Sequence[int]], plan: LaunchPlan) -> Message:
    """Say that not all nodes use the same site.

    Args:
        by_site: Name of each site, empty for none, and the ranks of its nodes.
        plan: What is planned on this node.
    """
    names_of = {"".join(filter(str.isprintable, s[:_SHORT])): s for s in by_site}
    who = "; ".join(
        f"{name or 'none'} on {names(by_site[site], plan)}"
        for name, site in names_of.items()
    )
    text = (
        f"the nodes use different sites, and so other variables: {who}. Type "
        f"--hpc-site={next(filter(None, names_of), 'NAME')}, or export on all nodes "
        "what tells it (mpirun: -x NAME)"
    )
    return Message("HPC163", text)


def _looking(event: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    """Report a wait for the coordinator: soon from one node, later from any."""
    waited = event["looking"]
    is_reporter = reports_wait_for(plan.world.node_rank, plan.rendezvous.coordinator)
    if not intervals.is_report_due(waited, is_reporter=is_reporter):
        return None
    text = (
        f"waiting for the head node at {plan.rendezvous.endpoint} ({plan.rendezvous.connect_host}) for "
        f"{waited} s: {_search_problem(event['found'], plan)}"
    )
    return Message("HPC113", text)


# --- why a launch ends ------------------------------------------------------------


def coordinator_missing(found: str, timeout: float, plan: LaunchPlan) -> Message:
    """Say what was found on the coordinator's ports, after ``timeout`` seconds."""
    text = (
        f"no head node at {plan.rendezvous.endpoint} ({plan.rendezvous.connect_host}) within {timeout:.0f} s "
        f"(join_timeout): {_search_problem(found, plan)}"
    )
    return Message("HPC112", text)


def _search_problem(found: str, plan: LaunchPlan) -> str:
    """Say why the coordinator was not found: the cause, not what follows from it."""
    if NOBODY in found:  # its node is reached
        return f"{found}. Has the job started there? {plan.messages.hint}".rstrip()
    problem, is_cause = path_problem(plan.rendezvous.local_address)
    if is_cause:
        return problem
    return (found or "no answer yet") + (f"; {problem}" if problem else "")


def refusal(
    refused: RefusedError,
    plan: LaunchPlan,
    request: JoinRequest,
    environ: Mapping[str, str],
) -> LaunchError:
    """Say why the coordinator refuses this agent."""
    node = (
        f"the head node at {join_endpoint(plan.rendezvous.connect_host, refused.port)}"
    )
    reason, value = refused.reason, refused.value
    if reason in (Refusal.TAKEN, Refusal.RUN_ID):
        run_id = value if reason is Refusal.RUN_ID else request.run_id
        inside = nested(environ, run_id)
        if inside is not None:
            return inside
    if reason is Refusal.TAKEN:
        code = "HPC115"
        text = (
            f"{node} has another agent of node {plan.world.node_rank} already: {value}. "
            "Start torchrun_hpc once on each node"
        )
    elif reason is Refusal.VERSION:
        code = "HPC116"
        text = (
            f"{node} has torchrun_hpc {value}, which speaks another protocol than "
            f"{__version__} here. Load the same environment on all nodes"
        )
    elif reason is Refusal.RUN_ID:
        code = "HPC117"
        text = (
            f"--rdzv_id={request.run_id} here, but {value} on {node}. Was it $RANDOM, "
            "expanded on each node? Leave the option out"
        )
    elif reason is Refusal.NODES:
        code = "HPC118"
        text = (
            f"this is node {plan.world.node_rank} of {plan.world.nodes}, but {node} waits for "
            f"{value}. Start one job step with the same command on all nodes"
        )
    else:
        code = "HPC119"
        text = (
            f"{node} is of another job than this one, {request.job}. Type another "
            "port, or leave the endpoint out"
        )
    return LaunchError(code, text, others_know=reason is not Refusal.UNKNOWN)


def failed(failure: Failure, plan: LaunchPlan) -> Message:
    """Say why the job failed: the last line of node 0."""
    return Message("HPC125", f"the job has failed: {_cause(failure, plan)}")


def _cause(failure: Failure, plan: LaunchPlan) -> str:
    where = names(failure.nodes, plan) or "another node"
    if failure.kind is Kind.WORKER:
        text = f"worker {failure.rank} on {where} {ending(failure.code)}"
    elif failure.kind is Kind.SIGNAL:
        text = f"the agent on {where} received {signal_name(failure.code)}"
    elif failure.kind is Kind.LOST:
        text = (
            f"the agent on {where} is gone without a word: it was killed, or the "
            "node is lost"
        )
    elif failure.kind is Kind.SILENT:
        text = f"the agent on {where} did not answer for {failure.code} s"
    elif failure.kind is Kind.MISSING:
        text = (
            f"{count(len(failure.nodes), 'node')} did not come within {failure.code} s "
            f"(join_timeout): {where}"
        )
    elif failure.kind is Kind.REFUSED:
        text = f"the agent on {where} does not belong here ({failure.text}); see there"
    elif failure.kind is Kind.COORDINATOR:
        what = f"did not answer for {failure.code} s" if failure.code else "is gone"
        node = (
            plan.rendezvous.endpoint
            if plan.rendezvous.coordinator is None
            else names([plan.rendezvous.coordinator], plan)
        )
        text = f"the agent on the head node, {node}, {what}"
    else:
        text = f"the agent on {where} gave up: {failure.text}"
    if failure.finished:
        nodes = count(failure.finished, "node")
        text += f"; no restart, because {nodes} had finished already"
    return text


def reports_failure(failure: Failure, plan: LaunchPlan) -> bool:
    """Say whether this node reports the failure."""
    world = plan.world
    if failure.kind is Kind.COORDINATOR:
        return reports_wait_for(world.node_rank, plan.rendezvous.coordinator)
    is_absent = failure.kind in (Kind.LOST, Kind.SILENT, Kind.MISSING)
    absent = {r for r in failure.nodes if is_absent and 0 <= r < world.nodes}
    return is_reporter(world.node_rank, absent if len(absent) < world.nodes else ())


def ending(code: int) -> str:
    """Say how a worker ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ": probably out of memory" if code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-code)}{memory}"


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def names(ranks: Sequence[int], plan: LaunchPlan) -> str:
    """Write nodes by name, not too many."""
    known = [
        f"{plan.world.hosts[rank]} (node {rank})"
        if 0 <= rank < len(plan.world.hosts) and plan.world.hosts[rank]
        else f"node {rank}"
        for rank in ranks[:_SHOWN]
    ]
    more = len(ranks) - _SHOWN
    return ", ".join(known) + (f" and {more} more" if more > 0 else "")
