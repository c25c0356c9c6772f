"""The dry run: the nodes meet and exchange their plans, but start nothing.

They use the launch's endpoint and port, to find whatever would keep the nodes apart.
Only node 0 prints to stdout.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.agent.start import DryRunReplies
from torchrun_hpc.errors import Message
from torchrun_hpc.names import host, placed, ranks_by
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous, settings_of
from torchrun_hpc.reporting import console, description
from torchrun_hpc.reporting.console import reports_wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.rendezvous.client import Client
    from torchrun_hpc.reporting.description import Description


def meet(
    run_id: str,
    plan: LaunchPlan,
    this_node: Description,
    environ: Mapping[str, str],
) -> DryRunReplies:
    """Meet the other nodes; return, on the reporting node, what all nodes would do.

    Raise `JobFailedError` or `RendezvousError` if a node cannot take part.
    """
    meeting, asked = plan.meeting, plan.asked
    limit = asked.rdzv_conf.join_timeout or limits.DRY_RUN_TIMEOUT
    nodes = {meeting.node_rank: this_node}
    missing: list[str] = []
    if meeting.uses_ours(asked):
        settings = settings_of(meeting, run_id, asked)
        may_leave = threading.Event()
        rendezvous = SchedulerRendezvous(
            meeting,
            replace(settings, is_fixed=True),
            environ,
            replies={
                "plan": lambda _: wire.encode(this_node),
                "leave": lambda _: may_leave.set(),
            },
        )
        try:
            client = rendezvous.connect(limit)
            if meeting.node_rank == 0:
                nodes = _ask(client, meeting, limit)
            else:
                _wait_for_node_0(client, meeting, may_leave, 2 * limit)
        finally:
            rendezvous.leave()
        hosts = {rank: node.meeting.hosts[rank] for rank, node in nodes.items()}
        meeting = replace(meeting, hosts=placed(meeting.hosts, hosts))
        absent = (rank for rank in range(meeting.nodes) if rank not in nodes)
        missing = [host(rank, meeting.hosts) for rank in absent]
    first, *others = (nodes[rank] for rank in sorted(nodes))
    by_value = ranks_by({rank: node.meeting.compared for rank, node in nodes.items()})
    if len(by_value) > 1:
        advice = *first.messages.advice, messages.disagreement(by_value, meeting)
        first = replace(first, messages=replace(first.messages, advice=advice))
    return DryRunReplies([first, *others], missing, limit)


def _ask(client: Client, meeting: Meeting, limit: float) -> dict[int, Description]:
    total = meeting.nodes

    def wait(replies: Callable[[], Mapping[int, Any]]) -> None:
        _wait(
            client,
            lambda: len(replies()) >= total,
            limit,
            lambda: f"{len(replies())} of {total} nodes have answered",
        )

    replies = client.ask_all("plan", wait)
    client.ask_all("leave", lambda _: None)
    nodes = {r: description.received(replies[r], r, meeting) for r in replies}
    return {rank: node for rank, node in nodes.items() if node is not None}


def _wait_for_node_0(
    client: Client, meeting: Meeting, may_leave: threading.Event, limit: float
) -> None:
    is_reporter = reports_wait_for(meeting.node_rank, 0)
    state = (lambda: "node 0 has not answered") if is_reporter else None
    if not _wait(client, may_leave.is_set, limit, state):
        raise RendezvousTimeoutError(f"no answer from node 0 within {limit:.0f} s")


def _wait(
    client: Client,
    condition: Callable[[], bool],
    limit: float,
    state: Callable[[], str] | None,
) -> bool:

    def report(waited: float) -> None:
        if state is not None:
            text = f"{state()} after {waited:.0f} s. The limit is {limit:.0f} s"
            console.write(Message("HPC100", text))

    waiting.until(lambda: condition() or client.state.failure, limit, report)
    is_done, failure = condition(), client.state.failure
    if not is_done and failure is not None:
        raise JobFailedError(failure)
    return is_done
