"""Node 0 reports that it waits for the other nodes; torch prints nothing."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc import waiting
from torchrun_hpc.agent.patches.replacing import has, wrap
from torchrun_hpc.errors import Message
from torchrun_hpc.host import capabilities
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan

TARGET = "RendezvousHandler.next_rendezvous"
REASON = "torch does not report that it waits for other nodes (pytorch#76287)"
IS_FOR = capabilities.EVERY

# They meet in a store on one of the nodes.
HANDLERS: tuple[Any, ...] = (
    dynamic_rendezvous.DynamicRendezvousHandler,
    static_tcp_rendezvous.StaticTCPRendezvous,
)


def fits() -> bool:
    """Check that the handlers still meet in this method."""
    return all(has(handler, "next_rendezvous") for handler in HANDLERS)


def apply(plan: LaunchPlan, *_: object) -> None:
    """Report from node 0 of several, until the nodes have met."""
    if is_reporter(plan.meeting.report_rank) and plan.meeting.nodes > 1:
        for handler in HANDLERS:
            wrap(handler, "next_rendezvous", functools.partial(_meet, plan))


def _meet(plan: LaunchPlan, original: Any, handler: Any) -> Any:
    met = threading.Event()
    threading.Thread(target=_report, args=(met, plan), daemon=True).start()
    try:
        return original(handler)
    finally:
        met.set()


def _report(met: threading.Event, plan: LaunchPlan) -> None:
    place = f"at {plan.meeting.endpoint} for all {plan.meeting.nodes} nodes"
    hint = f"; {plan.meeting.hint}" if plan.meeting.hint else ""

    def report(waited: float) -> None:
        text = f"waiting {place}, {waited:.0f} s so far{hint}"
        console.write(Message("HPC084", text))

    waiting.until(met.is_set, report=report)
