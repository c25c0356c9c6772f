"""The host of the rendezvous leaves last.

When a job ends well, the host's agent may be gone before the others have read that it
ended: they print a warning or wait in the exit barrier for a store that is no more.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.patching.replacing import has, replace

if TYPE_CHECKING:
    from torchrun_hpc.plan import LaunchPlan

TARGET = "DynamicRendezvousHandler.shutdown"
REASON = "nodes may print errors at the end of a job that went well (pytorch#69520)"
RELEASES = ">=2.0"

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_KEY = "torchrun_hpc/left"

# Seconds.
_LIMIT = 5.0
_PAUSE = 0.02


def fits() -> bool:
    """Check that the handler has its store and state where they were."""
    names = _Handler.__init__.__code__.co_names
    return has(_Handler, "shutdown") and {"_store", "_state_holder"} <= set(names)


def apply(plan: LaunchPlan) -> None:
    """Count the nodes that have left, and let the host wait for all."""
    if plan.nodes == 1:
        return
    original = _Handler.shutdown

    @functools.wraps(original)
    def shutdown(self: Any) -> Any:
        went_well = sys.exc_info()[0] is None
        closed = original(self)
        with contextlib.suppress(Exception):  # the store is gone: nothing to wait for
            self._store.add(_KEY, 1)
            if plan.is_host and went_well:
                _wait(self._store, len(self._state_holder.state.participants))
        return closed

    replace(_Handler, "shutdown", shutdown)


def _wait(store: Any, nodes: int) -> None:
    end = time.monotonic() + _LIMIT
    while store.add(_KEY, 0) < nodes and time.monotonic() < end:
        time.sleep(_PAUSE)
