"""Nodes are ranked as the scheduler numbers them, not by their addresses as text.

Torch sorts the participants of a c10d rendezvous as dataclasses, so by address: n10
comes before n9, and MASTER_ADDR follows rank 0 to whatever node that is.
"""

from __future__ import annotations

import logging
import math
import operator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

if TYPE_CHECKING:
    from torchrun_hpc.planning.launch_plan import LaunchPlan

TARGET = "DynamicRendezvousHandler._node_desc_generator"
REASON = "nodes are ranked by the text of their addresses (pytorch#137402, #191190)"
IS_FOR = capabilities.EVERY

_torch: Any = dynamic_rendezvous
_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler


@dataclass(frozen=True, eq=True, repr=False)
class RankedNode(getattr(_torch, "_NodeDesc", object)):  # type: ignore[misc]
    """A participant that knows its rank among the scheduler's nodes.

    It travels through the rendezvous store, so its name and module are part of what
    all nodes of a job must agree on.
    """

    node_rank: int = 0

    # All four, because the base class has all four.

    def __lt__(self, other: Any) -> Any:
        return _compare(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _compare(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compare(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compare(operator.ge, self, other)


def _compare(operation: Any, one: RankedNode, other: Any) -> Any:
    """Compare by rank; a second agent on a node comes after the first.

    Who has joined from outside of the job has no rank, and comes last.
    """
    if not isinstance(other, _torch._NodeDesc):
        return NotImplemented
    return operation(_key(one), _key(other))


def _key(node: Any) -> tuple[float | str, ...]:
    rank = getattr(node, "node_rank", math.inf)
    return rank, node.addr, node.pid, node.local_id


class _Generator:
    """Stands in for torch's generator of participants, and asks it."""

    def __init__(self, original: Any, node_rank: int) -> None:
        self._original = original
        self._node_rank = node_rank

    def generate(self, local_addr: str | None = None) -> RankedNode:
        node = self._original.generate(local_addr)
        return RankedNode(**vars(node), node_rank=self._node_rank)


def fits() -> bool:
    """Let torch rank two participants whose addresses sort the other way."""
    if not has(_Handler, "_node_desc_generator"):
        return False
    first = RankedNode("n9", 1, 0, node_rank=0)
    second = RankedNode("n10", 1, 0, node_rank=1)
    settings = dynamic_rendezvous.RendezvousSettings(
        run_id="trial",
        min_nodes=2,
        max_nodes=2,
        timeout=dynamic_rendezvous.RendezvousTimeout(),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    state = _torch._RendezvousState()
    state.participants = {second: 0, first: 0}
    executor = _torch._DistributedRendezvousOpExecutor(first, None, settings)
    executor._state = state
    # In a log of --hpc-debug it would look like another job's.
    logger = logging.getLogger(_torch.__name__)
    disabled, logger.disabled = logger.disabled, True
    try:
        executor._mark_rendezvous_complete()
    finally:
        logger.disabled = disabled
    return bool(state.participants == {first: 0, second: 1})


def apply(plan: LaunchPlan) -> None:
    """Rank the nodes in the order of the plan."""
    if not plan.ranks_follow_scheduler:
        return
    original = _Handler._node_desc_generator
    replace(
        _Handler, "_node_desc_generator", _Generator(original, plan.world.node_rank)
    )
