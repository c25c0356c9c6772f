"""SIGUSR1 and SIGUSR2 for the agent are forwarded to its workers.

Torchrun dies of both, and its workers keep running in their own sessions. With
``--signals-to-handle`` it forwards them, but then ends the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    MultiprocessContext,
    SubprocessContext,
)
from torch.distributed.launcher import api as launcher

from torchrun_hpc.agent.patches import agent
from torchrun_hpc.agent.patches.replacing import extend, takes
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from torchrun_hpc.agent.patches.hooks import Hooks

TARGET = "LocalElasticAgent._monitor_workers"
REASON = "SIGUSR1 ends the agent and does not reach the workers (pytorch#154849)"
IS_FOR = capabilities.EVERY

# They have the workers' process numbers.
_CONTEXTS = (MultiprocessContext, SubprocessContext)


def fits() -> bool:
    """Check that the agent monitors its workers here, and knows their numbers."""
    return (
        agent.is_extensible()
        and takes(LocalElasticAgent, "_monitor_workers", "self", "worker_group")
        and capabilities.uses(LocalElasticAgent.__init__, "_pcontext")
        and all(takes(context, "pids", "self") for context in _CONTEXTS)
    )


def apply(_plan: object, hooks: Hooks) -> None:
    """Forward signals each time that the agent monitors its workers."""

    class ForwardingAgent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            if self._pcontext is not None:
                hooks.forward(self._pcontext.pids())
            return super()._monitor_workers(worker_group)

    extend(launcher, agent.TARGET, ForwardingAgent)
