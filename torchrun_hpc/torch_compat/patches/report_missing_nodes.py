"""Node 0 says that it waits for the other nodes, where torch is silent for minutes."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
)

from torchrun_hpc.errors import Message
from torchrun_hpc.reporting import report
from torchrun_hpc.reporting.reporter import is_reporter
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

if TYPE_CHECKING:
    from torchrun_hpc.planning.launch_plan import LaunchPlan

TARGET = "RendezvousHandler.next_rendezvous"
REASON = "it does not say that it waits for other nodes (pytorch#76287)"
IS_FOR = capabilities.EVERY

# Those that meet in a store, which one of the nodes hosts.
HANDLERS: tuple[Any, ...] = (
    dynamic_rendezvous.DynamicRendezvousHandler,
    StaticTCPRendezvous,
)


def fits() -> bool:
    """Check that the handlers still meet in this method."""
    return all(has(handler, "next_rendezvous") for handler in HANDLERS)


def apply(plan: LaunchPlan) -> None:
    """Report from node 0 of several for as long as the nodes have not met."""
    if not is_reporter(plan.world.report_rank) or plan.world.nodes == 1:
        return
    for handler in HANDLERS:
        reporting = _reporting(handler.next_rendezvous, plan)
        replace(handler, "next_rendezvous", reporting)


def _reporting(original: Any, plan: LaunchPlan) -> Any:
    @functools.wraps(original)
    def next_rendezvous(self: Any) -> Any:
        met = threading.Event()
        threading.Thread(target=_report, args=(met, plan), daemon=True).start()
        try:
            return original(self)
        finally:
            met.set()

    return next_rendezvous


def _report(met: threading.Event, plan: LaunchPlan) -> None:
    waited = pause = report.FIRST_REPORT
    while not met.wait(pause):
        text = (
            f"waiting at {plan.rendezvous.endpoint} for other nodes of {plan.world.nodes}, for "
            f"{waited:.0f} s"
            + (f"; {plan.messages.suspicion}" if plan.messages.suspicion else "")
        )
        report.line(Message("HPC084", text), sys.stderr)
        pause = report.NEXT_REPORT
        waited += pause
