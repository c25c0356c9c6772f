"""MASTER_ADDR is the address that the first node has published.

The agent of rank 0 takes its host's full name instead, on whatever network that is:
``--local-addr`` is lost on its way.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, wrap

TARGET = "DynamicRendezvousHandler.next_rendezvous"
REASON = "MASTER_ADDR is the full name of a host, not its --local-addr (pytorch#125743)"
IS_FOR = capabilities.ADDRESS_IS_LOST

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_NAME = "next_rendezvous"


def fits() -> bool:
    """Check that the workers get what the handler answers."""
    code = unwrap(_Handler.next_rendezvous).__code__
    return (
        has(_Handler, _NAME)
        and "bootstrap_store_info" in code.co_varnames
        and capabilities.uses(_Handler.__init__, "_state_holder")
    )


def apply(*_: object) -> None:
    """Correct the answer; all nodes find the address among the participants."""
    wrap(_Handler, _NAME, _next_rendezvous)


def _next_rendezvous(original: Any, handler: Any) -> Any:
    info = original(handler)
    ranks = handler._state_holder.state.participants
    first = [node.addr for node, rank in ranks.items() if rank == 0]
    if len(first) == 1:  # more are there while the next round forms
        info.bootstrap_store_info.master_addr = first[0]
    return info
