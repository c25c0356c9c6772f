"""Torch's c10d rendezvous: its order of the nodes, its answers, waits, and end."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from inspect import unwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import (
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from torchrun_hpc import limits, waiting
from torchrun_hpc.agent.patches import Patch, has, replace, wrap
from torchrun_hpc.errors import Message
from torchrun_hpc.host import capabilities
from torchrun_hpc.reporting import console
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.variables import MASTER_ADDR

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


# --- answers, waits, and the end ------------------------------------------------------

# The handlers whose nodes meet in a store on one of them.
_HANDLERS: tuple[Any, ...] = (_Handler, static_tcp_rendezvous.StaticTCPRendezvous)

_NEXT = "next_rendezvous"
_STORE_FIELDS = ("_shared_tcp_store_server", "_bootstrap_store_info")

_KEY_OF_LEFT = "torchrun_hpc/left"  # key of the number of nodes that have left

# Stores whose servers are in this process, recorded when torch makes them.
_hosted: list[Any] = []


class FreshStore(Patch):
    """Every attempt of the workers gets its own store.

    The agent of rank 0 opens one store for all, without prefixes. So after a restart,
    workers find the addresses of dead ones, or use the store of an earlier round's
    rank 0.
    """

    NAME = "fresh_store"
    TARGET = "DynamicRendezvousHandler.next_rendezvous"
    REASON = "restarted workers may meet keys of dead ones (pytorch#135712, #167288)"
    IS_FOR = capabilities.SHARED_STORE

    @classmethod
    def fits(cls) -> bool:
        """Check that the store is in the known attributes."""
        keeps = capabilities.uses(_Handler.__init__, *_STORE_FIELDS)
        return keeps and has(_Handler, _NEXT)

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Forget the last attempt's store before each rendezvous."""
        wrap(_Handler, _NEXT, cls._meet)

    @staticmethod
    def _meet(original: Any, handler: Any) -> Any:
        for name in _STORE_FIELDS:
            setattr(handler, name, None)
        return original(handler)


class LocalAddr(Patch):
    """MASTER_ADDR is the address that the head node has published.

    Torch ignores ``--local-addr`` here, and uses the full name of rank 0's host.
    """

    NAME = "local_addr"
    TARGET = "DynamicRendezvousHandler.next_rendezvous"
    REASON = (
        f"{MASTER_ADDR} is the full name of a host, not its --local-addr "
        "(pytorch#125743)"
    )
    IS_FOR = capabilities.ADDRESS_IS_LOST

    @classmethod
    def fits(cls) -> bool:
        """Check that the workers get the handler's answer."""
        code = unwrap(_Handler.next_rendezvous).__code__
        return (
            has(_Handler, _NEXT)
            and "bootstrap_store_info" in code.co_varnames
            and capabilities.uses(_Handler.__init__, "_state_holder")
        )

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Correct the answer; all nodes find the address among the participants."""
        wrap(_Handler, _NEXT, cls._meet)

    @staticmethod
    def _meet(original: Any, handler: Any) -> Any:
        info = original(handler)
        ranks = handler._state_holder.state.participants
        first = [node.addr for node, rank in ranks.items() if rank == 0]
        if len(first) == 1:  # there are more while the next round forms
            info.bootstrap_store_info.master_addr = first[0]
        return info


class ReportMissingNodes(Patch):
    """Node 0 reports that it waits for the other nodes; torch prints nothing."""

    NAME = "report_missing_nodes"
    TARGET = "RendezvousHandler.next_rendezvous"
    REASON = "torch does not report that it waits for other nodes (pytorch#76287)"

    @classmethod
    def fits(cls) -> bool:
        """Check that the handlers still meet in this method."""
        return all(has(handler, _NEXT) for handler in _HANDLERS)

    @classmethod
    def apply(cls, plan: LaunchPlan, _hooks: object) -> None:
        """Report from node 0 of several, until the nodes have met."""
        if is_reporter(plan.meeting.report_rank) and plan.meeting.nodes > 1:
            for handler in _HANDLERS:
                wrap(handler, _NEXT, functools.partial(cls._meet, plan))

    @classmethod
    def _meet(cls, plan: LaunchPlan, original: Any, handler: Any) -> Any:
        met = threading.Event()
        threading.Thread(target=cls._report, args=(met, plan), daemon=True).start()
        try:
            return original(handler)
        finally:
            met.set()

    @staticmethod
    def _report(met: threading.Event, plan: LaunchPlan) -> None:
        place = f"at {plan.meeting.endpoint} for all {plan.meeting.nodes} nodes"
        hint = f"; {plan.meeting.hint}" if plan.meeting.hint else ""

        def report(waited: float) -> None:
            text = f"waiting {place}, {waited:.0f} s so far{hint}"
            console.write(Message("HPC084", text))

        waiting.until(met.is_set, report=report)


class HostExitsLast(Patch):
    """The host of the rendezvous leaves last.

    At the end, the host's agent may leave before the others have read the end. Without
    the store, they print a warning, or a trace from the exit barrier.
    """

    NAME = "host_exits_last"
    TARGET = "RendezvousHandler.shutdown"
    REASON = "nodes may print errors at the end of a successful job (pytorch#69520)"

    @classmethod
    def fits(cls) -> bool:
        """Check that the handlers have a store, and leave in this method."""
        return all(
            has(handler, "shutdown") and capabilities.uses(handler.__init__, "_store")
            for handler in _HANDLERS
        )

    @classmethod
    def apply(cls, plan: LaunchPlan, _hooks: object) -> None:
        """Count the nodes that have left, and let the host wait for all of them."""
        _hosted.clear()
        if plan.meeting.nodes == 1 and not plan.meeting.may_grow:
            return
        for handler in _HANDLERS:
            wrap(handler, "shutdown", functools.partial(cls._leave, plan))

    @staticmethod
    def _leave(plan: LaunchPlan, original: Any, handler: Any) -> Any:
        went_well = sys.exc_info()[0] is None
        closed = original(handler)
        store = handler._store
        with contextlib.suppress(Exception):  # without the store, nobody waits
            store.add(_KEY_OF_LEFT, 1)
            if went_well and any(store is hosted for hosted in _hosted):
                holder = getattr(handler, "_state_holder", None)
                # An elastic range may have fewer nodes than planned.
                nodes = len(holder.state.participants) if holder else plan.meeting.nodes
                waiting.until(
                    lambda: store.add(_KEY_OF_LEFT, 0) >= nodes,
                    limits.HOST_EXIT_TIMEOUT,
                )
        return closed


def record_hosted(store: Any) -> None:
    """Record that the server of a store is in this process."""
    _hosted.append(store)
