"""The host of the rendezvous leaves last.

At the end, the host's agent may leave before the others have read the end. Without the
store, they print a warning, or a trace from the exit barrier.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc import waiting
from torchrun_hpc.agent.patches.replacing import has, wrap
from torchrun_hpc.agent.patches.report_missing_nodes import HANDLERS
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan

TARGET = "RendezvousHandler.shutdown"
REASON = "nodes may print errors at the end of a successful job (pytorch#69520)"
IS_FOR = capabilities.EVERY

_KEY = "torchrun_hpc/left"

_LIMIT = 5.0  # seconds

# Stores whose servers are in this process, recorded when torch makes them.
_hosted: list[Any] = []


def hosts(store: Any) -> None:
    """Record that the server of a store is in this process."""
    _hosted.append(store)


def fits() -> bool:
    """Check that the handlers have a store, and leave in this method."""
    return all(
        has(handler, "shutdown") and capabilities.uses(handler.__init__, "_store")
        for handler in HANDLERS
    )


def apply(plan: LaunchPlan, *_: object) -> None:
    """Count the nodes that have left, and let the host wait for all of them."""
    _hosted.clear()
    if plan.meeting.nodes == 1 and not plan.meeting.may_grow:
        return
    for handler in HANDLERS:
        wrap(handler, "shutdown", functools.partial(_shutdown, plan))


def _shutdown(plan: LaunchPlan, original: Any, handler: Any) -> Any:
    went_well = sys.exc_info()[0] is None
    closed = original(handler)
    store = handler._store
    with contextlib.suppress(Exception):  # without the store, nobody waits
        store.add(_KEY, 1)
        if went_well and any(store is hosted for hosted in _hosted):
            holder = getattr(handler, "_state_holder", None)
            # An elastic range may have fewer nodes than planned.
            nodes = len(holder.state.participants) if holder else plan.meeting.nodes
            waiting.until(lambda: store.add(_KEY, 0) >= nodes, _LIMIT)
    return closed
