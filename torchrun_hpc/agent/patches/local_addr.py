"""MASTER_ADDR is the address that the head node has published.

Torch ignores ``--local-addr`` here, and uses the full name of rank 0's host.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.agent.patches.replacing import has, wrap
from torchrun_hpc.host import capabilities

TARGET = "DynamicRendezvousHandler.next_rendezvous"
REASON = "MASTER_ADDR is the full name of a host, not its --local-addr (pytorch#125743)"
IS_FOR = capabilities.ADDRESS_IS_LOST

_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
_NAME = "next_rendezvous"


def fits() -> bool:
    """Check that the workers get the handler's answer."""
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
    if len(first) == 1:  # there are more while the next round forms
        info.bootstrap_store_info.master_addr = first[0]
    return info
