"""Torch's agents act as one where the nodes are numbered by the scheduler.

An agent counts its own restarts only, tells nobody that it gives up, and waits at its
end for others that may never come, deaf to signals.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SignalException

from torchrun_hpc.rendezvous.client import exit_code_of
from torchrun_hpc.rendezvous.handler import RoundOverError, SchedulerRendezvous
from torchrun_hpc.rendezvous.protocol import Failure, Kind
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.planning.launch_plan import LaunchPlan

TARGET = "LocalElasticAgent"
REASON = (
    "an agent that gives up leaves the others running (pytorch#111646, #99051), and "
    "restarts are counted per agent (pytorch#108158)"
)
IS_FOR = capabilities.EVERY

_Simple: Any = api.SimpleElasticAgent
_Local: Any = local_elastic_agent.LocalElasticAgent
_RENDEZVOUS, _BARRIER = "_rendezvous", "_exit_barrier"
_START, _SHUTDOWN = "_start_workers", "_shutdown"
_LEFT = "_remaining_restarts"


def fits() -> bool:
    """Check the methods, and the number of restarts that is set."""
    signatures = {
        (_Simple, _RENDEZVOUS): ["self", "worker_group"],
        (_Simple, _BARRIER): ["self"],
        (_Local, _START): ["self", "worker_group"],
    }
    return (
        all(
            has(owner, name)
            and list(inspect.signature(vars(owner)[name]).parameters) == parameters
            for (owner, name), parameters in signatures.items()
        )
        and has(_Local, _SHUTDOWN)
        and _LEFT in _Simple.__init__.__code__.co_names
    )


def apply(_plan: LaunchPlan) -> None:
    """Let the agent and the handler know of each other."""
    replace(_Simple, _RENDEZVOUS, _counting(vars(_Simple)[_RENDEZVOUS]))
    replace(_Local, _START, _watching(vars(_Local)[_START]))
    replace(_Local, _SHUTDOWN, _announcing(vars(_Local)[_SHUTDOWN]))
    replace(_Simple, _BARRIER, _waiting(vars(_Simple)[_BARRIER]))


def _handler(agent: Any) -> SchedulerRendezvous | None:
    handler = agent._worker_group.spec.rdzv_handler
    return handler if isinstance(handler, SchedulerRendezvous) else None


def _counting(original: Any) -> Any:
    """Wrap the rendezvous: all agents have as many restarts left as the job."""

    @functools.wraps(original)
    def rendezvous(self: Any, worker_group: Any) -> Any:
        while True:
            try:
                answer = original(self, worker_group)
                break
            except RoundOverError:
                continue  # an agent was lost before the workers could start
        handler = _handler(self)
        if handler is not None:
            left = worker_group.spec.max_restarts - handler.restarts
            setattr(self, _LEFT, max(left, 0))
        return answer

    return rendezvous


def _watching(original: Any) -> Any:
    """Wrap the start of the workers: their end is reported at once.

    Torch's agent looks every ``--monitor-interval``, and then stops the others first,
    which takes as long as they like.
    """

    @functools.wraps(original)
    def start_workers(self: Any, worker_group: Any) -> Any:
        pids = original(self, worker_group)
        handler = _handler(self)
        if handler is not None:
            processes = getattr(self._pcontext, "subprocess_handlers", {})
            handler.watch(
                {
                    worker_group.workers[local].global_rank: _exit_code(
                        pid, processes.get(local)
                    )
                    for local, pid in pids.items()
                }
            )
        return pids

    return start_workers


def _exit_code(pid: int, process: Any) -> Callable[[], int | None]:
    look = exit_code_of(pid)

    def exit_code() -> int | None:
        collected = process.proc.returncode if process is not None else None
        return look() if collected is None else int(collected)

    return exit_code


def _announcing(original: Any) -> Any:
    """Wrap the stop of the workers: the others are told first, if it is for good."""

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **options: Any) -> Any:
        handler = _handler(self)
        if handler is not None:
            error = sys.exc_info()[1]
            signalled = isinstance(error, SignalException)
            handler.stop_watching(look=not signalled)
            if isinstance(error, SignalException):
                handler.give_up(Failure(Kind.SIGNAL, code=int(error.sigval)))
        return original(self, *args, **options)

    return shutdown


def _waiting(original: Any) -> Any:
    """Take the place of the exit barrier: that one is deaf, and has its own limit."""

    @functools.wraps(original)
    def exit_barrier(self: Any) -> Any:
        handler = _handler(self)
        if handler is None:
            return original(self)
        handler.finish()
        return None

    return exit_barrier
