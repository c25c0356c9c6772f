"""Every attempt of the workers gets its own store.

The agent of rank 0 opens one store for all, without prefixes. So after a restart,
workers find the addresses of dead ones, or use the store of an earlier round's rank 0.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.agent.patches.replacing import has, wrap
from torchrun_hpc.host import capabilities

TARGET = "DynamicRendezvousHandler.next_rendezvous"
REASON = "restarted workers may meet keys of dead ones (pytorch#135712, #167288)"
IS_FOR = capabilities.SHARED_STORE

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_KEPT = ("_shared_tcp_store_server", "_bootstrap_store_info")


def fits() -> bool:
    """Check that the store is in the known attributes."""
    keeps = capabilities.uses(_Handler.__init__, *_KEPT)
    return keeps and has(_Handler, "next_rendezvous")


def apply(*_: object) -> None:
    """Forget the last attempt's store before each rendezvous."""
    wrap(_Handler, "next_rendezvous", _next_rendezvous)


def _next_rendezvous(original: Any, handler: Any) -> Any:
    for name in _KEPT:
        setattr(handler, name, None)
    return original(handler)
