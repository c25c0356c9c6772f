"""Every attempt of the workers gets a store of its own.

The agent of rank 0 opens one store for the workers of all attempts, and their keys have
no prefix: after a restart the first workers to arrive find the addresses of the dead
ones. Other nodes keep using the store of a node that was rank 0 in an earlier round.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

TARGET = "DynamicRendezvousHandler.next_rendezvous"
REASON = "restarted workers may meet keys of dead ones (pytorch#135712, #167288)"
IS_FOR = capabilities.SHARED_STORE

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_SERVER = "_shared_tcp_store_server"
_INFO = "_bootstrap_store_info"


def fits() -> bool:
    """Check that the store is kept where it was."""
    names = _Handler.__init__.__code__.co_names
    return has(_Handler, "next_rendezvous") and {_SERVER, _INFO} <= set(names)


def apply(_plan: object) -> None:
    """Forget the store of the last attempt before each rendezvous."""
    original = _Handler.next_rendezvous

    @functools.wraps(original)
    def next_rendezvous(self: Any) -> Any:
        setattr(self, _SERVER, None)
        setattr(self, _INFO, None)
        return original(self)

    replace(_Handler, "next_rendezvous", next_rendezvous)
