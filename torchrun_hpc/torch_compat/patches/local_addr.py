"""MASTER_ADDR is the address that the first node has published.

The agent of rank 0 takes its host's full name instead, on whatever network that is:
``--local-addr`` is lost on its way.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

TARGET = "DynamicRendezvousHandler.next_rendezvous"
REASON = "MASTER_ADDR is the full name of a host, not its --local-addr (pytorch#125743)"
IS_FOR = capabilities.ADDRESS_IS_LOST

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_NAME = "next_rendezvous"
_INFO, _STATE = "bootstrap_store_info", "_state_holder"


def fits() -> bool:
    """Check that the workers are told what the handler answers."""
    return (
        has(_Handler, _NAME)
        and _INFO in _Handler.next_rendezvous.__code__.co_varnames
        and _STATE in _Handler.__init__.__code__.co_names
    )


def apply(_plan: object) -> None:
    """Correct the answer; all nodes find the address among the participants."""
    original = _Handler.next_rendezvous

    @functools.wraps(original)
    def next_rendezvous(self: Any) -> Any:
        info = original(self)
        ranks = getattr(self, _STATE).state.participants
        first = [node.addr for node, rank in ranks.items() if rank == 0]
        if len(first) == 1:  # more are there while the next round forms
            getattr(info, _INFO).master_addr = first[0]
        return info

    replace(_Handler, _NAME, next_rendezvous)
