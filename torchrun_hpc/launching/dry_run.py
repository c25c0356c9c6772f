"""The dry run: the nodes meet, tell each other what they would do, and do nothing.

They meet on the endpoint and port of the launch, so that what would keep them apart
shows. Node 0 prints. It is the only output on stdout that the launcher ever makes,
because there is no script to have it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from torchrun_hpc import waiting, wire
from torchrun_hpc.errors import Message
from torchrun_hpc.launching.start import Answers
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous, settings_of
from torchrun_hpc.rendezvous.rounds import ranks_by_site
from torchrun_hpc.rendezvous.store import AgentStore
from torchrun_hpc.reporting import console, description
from torchrun_hpc.reporting.reporter import reports_wait_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description

# Seconds that node 0 waits for the others, if --rdzv-conf has no join_timeout.
LIMIT = 60

_PREFIX = "torchrun_hpc/dry_run"
_ARRIVED, _ANSWERED = f"{_PREFIX}/arrived", f"{_PREFIX}/answered"


def meet(
    args: argparse.Namespace,
    plan: LaunchPlan,
    own: Description,
    environ: Mapping[str, str],
) -> Answers:
    """Meet the other nodes, and return what they would do, on the one that reports.

    Args:
        args: Arguments of torchrun, filled in.
        plan: What is planned on this node.
        own: Its description.
        environ: Environment of this process.

    Raises:
        RendezvousError: The head node could not be reached, or is lost.
    """
    meeting = plan.meeting
    limit = plan.asked.rdzv_conf.join_timeout or LIMIT
    found = {meeting.node_rank: own}
    missing: list[str] = []
    if meeting.uses_ours(plan.asked):
        asked = plan.asked
        settings = settings_of(
            meeting, str(args.rdzv_id), asked.rdzv_conf, asked.max_restarts
        )
        rendezvous = SchedulerRendezvous(meeting, settings, environ)
        try:
            store = AgentStore(rendezvous.connect(limit))
            found = _exchange(store, plan, own, limit)
        finally:
            rendezvous.leave()
        absent = (r for r in range(meeting.nodes) if r not in found)
        missing = [meeting.hosts[rank] or f"node {rank}" for rank in absent]
    nodes = [found[rank] for rank in sorted(found)]
    sites = {rank: node.meeting.site for rank, node in found.items()}
    by_site = ranks_by_site({r: str(s.value) if s else "" for r, s in sites.items()})
    if len(by_site) > 1:
        said = nodes[0].messages
        advice = (*said.advice, messages.disagreement(by_site, meeting))
        nodes[0] = replace(nodes[0], messages=replace(said, advice=advice))
    return Answers(nodes, missing, limit)


def _exchange(
    store: Any, plan: LaunchPlan, own: Description, limit: int
) -> dict[int, Description]:
    """Return the descriptions of all nodes that answer, on node 0."""
    store.set(_key(plan.meeting.node_rank), wire.to_line(wire.encode(own)))
    store.add(_ARRIVED, 1)
    found = {}
    if plan.meeting.node_rank == 0:
        arrived = functools.partial(store.add, _ARRIVED, 0)
        _wait(
            lambda: arrived() >= plan.meeting.nodes,
            limit,
            lambda: f"{arrived()} of {plan.meeting.nodes} nodes have answered",
        )
        for rank in range(plan.meeting.nodes):
            if store.check([_key(rank)]):
                node = description.received(store.get(_key(rank)), rank, plan.meeting)
                if node is not None:
                    found[rank] = node
        store.add(_ANSWERED, len(found))
    elif not _wait(
        lambda: store.add(_ANSWERED, 0) > 0,
        2 * limit,
        (lambda: "node 0 has not answered")
        if reports_wait_for(plan.meeting.node_rank, 0)
        else None,
    ):
        raise RendezvousTimeoutError(f"no answer from node 0 within {2 * limit} s")
    return found


def _wait(
    condition: Callable[[], bool], limit: float, state: Callable[[], str] | None
) -> bool:
    """Wait, and report how far it is, if that is known; return whether it came true."""

    def report(waited: float) -> None:
        if state is not None:
            text = f"{state()} after {waited:.0f} s; the limit is {limit:.0f} s"
            console.write(Message("HPC100", text))

    return waiting.until(condition, limit, report)


def _key(rank: int) -> str:
    return f"{_PREFIX}/{rank}"
