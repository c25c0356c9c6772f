"""The order of the nodes in torch's c10d rendezvous."""

from __future__ import annotations

import functools
import logging
import math
import operator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from torchrun_hpc.agent.patches.patch import Patch, has, replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.planning.plan import LaunchPlan

_torch: Any = dynamic_rendezvous
_Handler: Any = dynamic_rendezvous.DynamicRendezvousHandler


def _comparison(operation: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def compare(self: RankedNode, other: object) -> Any:
        if not isinstance(other, _torch._NodeDesc):
            return NotImplemented
        return operation(_key(self), _key(other))

    return compare


@dataclass(frozen=True, eq=True, repr=False)
class RankedNode(getattr(_torch, "_NodeDesc", object)):  # type: ignore[misc]
    """A participant that knows its rank among the scheduler's nodes."""

    node_rank: int = 0

    # All four, as in the base class.
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)


def _key(node: Any) -> tuple[float | str, ...]:
    """Return a node's sort key; participants from outside the job come last.

    A node's second agent comes after its first.
    """
    rank = getattr(node, "node_rank", math.inf)
    return rank, node.addr, node.pid, node.local_id


class NodeOrder(Patch):
    """Nodes are ranked in the scheduler's order, not by their addresses as text.

    Torch sorts the participants of a c10d rendezvous by address: n10 comes before n9,
    and MASTER_ADDR follows rank 0.
    """

    NAME = "node_order"
    TARGET = "DynamicRendezvousHandler._node_desc_generator"
    REASON = "nodes are ranked by the text of their addresses (pytorch#137402, #191190)"

    @classmethod
    def fits(cls) -> bool:
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
        # With --hpc-debug, its log lines would look like another job's.
        logger = logging.getLogger(_torch.__name__)
        disabled, logger.disabled = logger.disabled, True
        try:
            executor._mark_rendezvous_complete()
        finally:
            logger.disabled = disabled
        return bool(state.participants == {first: 0, second: 1})

    @classmethod
    def apply(cls, plan: LaunchPlan, _hooks: object) -> None:
        """Rank the nodes in the order of the plan, if it has one."""
        if plan.ranks_follow_scheduler:
            original = _Handler._node_desc_generator.generate
            generate = functools.partial(_generate, plan.meeting.node_rank, original)
            ranking = SimpleNamespace(generate=generate)
            replace(_Handler, "_node_desc_generator", ranking)


def _generate(node_rank: int, original: Any, local_addr: str | None = None) -> Any:
    return RankedNode(**vars(original(local_addr)), node_rank=node_rank)
