"""What a person reads about the rendezvous."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import Message, count
from torchrun_hpc.network import path_problem
from torchrun_hpc.rendezvous.client import NOBODY
from torchrun_hpc.rendezvous.coordinator import SILENCE
from torchrun_hpc.rendezvous.protocol import Failure, Kind, unpacked
from torchrun_hpc.reporting import report
from torchrun_hpc.reporting.reporter import reports_wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.planning.launch_plan import LaunchPlan

# How many names a message quotes.
_SHOWN = 10

# Characters of the name of a site.
_SHORT = 50


def told(message: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    """Write what the head tells the user, and what this node found out by itself."""
    if "looking" in message:
        return _looking(message, plan)
    for verb, write in (
        ("waiting", _waiting),
        ("finishing", _finishing),
        ("silent", _silent),
        ("answering", _answering),
        ("lost", _lost),
        ("restart", _restart),
        ("sites", _sites),
    ):
        if verb in message:
            return write(message, plan)
    if reports_wait_for(plan.world.node_rank, plan.rendezvous.coordinator):
        return _of_head(message, plan)
    return None


def _of_head(message: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    head = f"the head node at {plan.rendezvous.endpoint}"
    if "head_silent" in message:
        text = (
            f"no sign of {head} for {message['head_silent']} s; the job ends in "
            f"{message['left']} s if it stays so"
        )
        return Message("HPC124", text)
    if "head_answers" in message:
        seconds = message["head_answers"]
        return Message("HPC161", f"{head} answers again, after {seconds} s")
    return None


def _waiting(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    missing = message["waiting"]
    text = (
        f"{plan.world.nodes - len(missing)} of {plan.world.nodes} nodes are there after "
        f"{message['seconds']} s; waiting for {names(missing, plan)}"
    )
    return Message("HPC114", f"{text}.{_how_to_fail_together(plan)}".rstrip("."))


def _finishing(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    unfinished = message["finishing"]
    text = (
        f"{plan.world.nodes - len(unfinished)} of {plan.world.nodes} nodes have finished, the last "
        f"one {message['seconds']} s ago; still at work: {names(unfinished, plan)}"
    )
    return Message("HPC120", text)


def _silent(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    text = (
        f"no sign of {names(message['silent'], plan)} for {SILENCE} s; the job ends in "
        f"{message['left']} s if it stays so"
    )
    return Message("HPC121", text)


def _answering(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    ranks = message["answering"]
    verb = "answers" if len(ranks) == 1 else "answer"
    return Message("HPC160", f"{names(ranks, plan)} {verb} again")


def _lost(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    text = (
        f"the agent on {names([message['lost']], plan)} is gone; waiting for it to be "
        "started again"
    )
    return Message("HPC123", text)


def _restart(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    cause = _cause(unpacked(message["because"]), plan)
    return Message("HPC128", f"restart {message['restart']} of all workers: {cause}")


def _sites(message: Mapping[str, Any], plan: LaunchPlan) -> Message:
    return disagreement(message["sites"], plan)


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


def _looking(message: Mapping[str, Any], plan: LaunchPlan) -> Message | None:
    """Report a wait for the head: soon from one node, later from any."""
    waited = message["looking"]
    is_first = reports_wait_for(plan.world.node_rank, plan.rendezvous.coordinator)
    first = report.FIRST_REPORT if is_first else report.ALONE
    if waited < first or (waited - first) % report.NEXT_REPORT:
        return None
    text = (
        f"waiting for the head node at {plan.rendezvous.endpoint} ({plan.rendezvous.connect_host}) for {waited} s: "
        f"{head_search(message['found'], plan)}"
    )
    return Message("HPC113", text)


def head_search(found: str, plan: LaunchPlan) -> str:
    """Say why the head was not found: the first cause, not what follows from it.

    Args:
        found: What was found on its ports.
        plan: The plan of this node.
    """
    if NOBODY in found:  # its node is reached
        return f"{found}. Has the job started there?" + _how_to_fail_together(plan)
    problem, is_cause = path_problem(plan.rendezvous.local_address)
    if is_cause:
        return problem
    return (found or "no answer yet") + (f"; {problem}" if problem else "")


def _how_to_fail_together(plan: LaunchPlan) -> str:
    if not plan.messages.fail_together:
        return ""
    return f" {plan.messages.fail_together} ends all tasks when one fails"


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
    elif failure.kind is Kind.HEAD:
        what = f"did not answer for {failure.code} s" if failure.code else "is gone"
        head = (
            plan.rendezvous.endpoint
            if plan.rendezvous.coordinator is None
            else names([plan.rendezvous.coordinator], plan)
        )
        text = f"the agent on the head node, {head}, {what}"
    else:
        text = f"the agent on {where} gave up: {failure.text}"
    if failure.finished:
        nodes = count(failure.finished, "node")
        text += f"; no restart, because {nodes} had finished already"
    return text


def is_reporter(failure: Failure, plan: LaunchPlan) -> bool:
    """Say whether this node reports the failure: the first one that is there."""
    if failure.kind is Kind.HEAD:
        return reports_wait_for(plan.world.node_rank, plan.rendezvous.coordinator)
    absent = set(failure.nodes) if failure.kind in _ABSENT else set()
    there = (rank for rank in range(plan.world.nodes) if rank not in absent)
    return plan.world.node_rank == next(there, 0)


_ABSENT = (Kind.LOST, Kind.SILENT, Kind.MISSING)


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
