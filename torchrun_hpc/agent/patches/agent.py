"""Agents of one job act together if they meet in the scheduler rendezvous.

Torch's agent counts only its own restarts, and does not tell the others when it gives
up. At its end it waits for others that may never come, and ignores signals.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.launcher import api as launcher

from torchrun_hpc.agent.end import failure_of
from torchrun_hpc.agent.patches.replacing import extend, has, takes, wrap
from torchrun_hpc.host import capabilities
from torchrun_hpc.rendezvous.errors import NotNeededError, RoundOverError
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous

if TYPE_CHECKING:
    from torchrun_hpc.agent.patches.hooks import Hooks

TARGET = "LocalElasticAgent"
REASON = (
    "an agent that gives up leaves the others running (pytorch#111646, #99051), and "
    "restarts are counted per agent (pytorch#108158)"
)
IS_FOR = capabilities.EVERY

FIND = "get_rendezvous_handler"

_Simple: Any = api.SimpleElasticAgent


class JobAgent(LocalElasticAgent):
    """An agent that acts together with the others of its job."""

    def _rendezvous(self, worker_group: Any) -> None:
        """Meet the others; each agent has as many restarts left as the job."""
        while True:
            with suppress(RoundOverError):  # an agent was lost before the workers began
                super()._rendezvous(worker_group)
                break
        handler = _handler(self)
        if handler is not None:
            left = worker_group.spec.max_restarts - handler.restarts
            self._remaining_restarts = max(left, 0)

    def _invoke_run(self, *args: Any, **options: Any) -> Any:
        """Run the workers; a spare may have had none when the job ends well."""
        try:
            return super()._invoke_run(*args, **options)
        except NotNeededError:
            workers = self._worker_group.workers
            nothing = {worker.global_rank: None for worker in workers}
            return api.RunResult(api.WorkerState.SUCCEEDED, return_values=nothing)

    def _monitor_workers(self, worker_group: Any) -> Any:
        handler = _handler(self)
        if handler and handler.has_spares and handler.num_nodes_waiting():
            return api.RunResult(api.WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        handler = _handler(self)
        if handler is not None:
            error = sys.exc_info()[1]
            if isinstance(error, SignalException):
                handler.give_up(failure_of(error))
        super()._shutdown(*args, **options)

    def _exit_barrier(self) -> None:
        handler = _handler(self)
        if handler is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
        else:
            handler.finish()


def is_extensible() -> bool:
    """Return whether agents are created by a name that can be replaced."""
    agent = getattr(launcher, TARGET, None)  # a program may have another one
    is_class = isinstance(agent, type) and issubclass(agent, LocalElasticAgent)
    return is_class and capabilities.uses(launcher.launch_agent, TARGET)


def fits() -> bool:
    """Check the methods, and the name of the restart counter."""
    return (
        is_extensible()
        and takes(_Simple, "_rendezvous", "self", "worker_group")
        and takes(_Simple, "_exit_barrier", "self")
        and has(LocalElasticAgent, "_shutdown")
        and has(_Simple, "_invoke_run")
        and takes(LocalElasticAgent, "_monitor_workers", "self", "worker_group")
        and {"state", "return_values"} <= {*inspect.signature(api.RunResult).parameters}
        and capabilities.uses(_Simple.__init__, "_remaining_restarts")
        and takes(rendezvous, FIND, "params")
        and capabilities.uses(launcher.launch_agent, FIND)
    )


def apply(_plan: object = None, hooks: Hooks | None = None) -> None:
    """Let torch find our rendezvous, once, and an agent that uses it."""
    extend(launcher, TARGET, JobAgent)
    if hooks is None or hooks.rendezvous is None:
        return
    ours = [hooks.rendezvous]

    def find(original: Any, parameters: Any) -> Any:
        if not (ours and ours[0].get_backend() == parameters.backend):
            return original(parameters)
        ours[0].run_id = parameters.run_id
        return ours.pop()

    wrap(rendezvous, FIND, find)


def _handler(agent: JobAgent) -> SchedulerRendezvous | None:
    handler = agent._worker_group.spec.rdzv_handler
    return handler if isinstance(handler, SchedulerRendezvous) else None
