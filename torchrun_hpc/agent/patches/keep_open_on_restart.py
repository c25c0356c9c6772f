"""An agent that stops its workers for a restart does not close the rendezvous.

Torch 2.3 closes it, so no restart succeeds.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher

from torchrun_hpc.agent.patches import agent
from torchrun_hpc.agent.patches.replacing import extend, has
from torchrun_hpc.host import capabilities

TARGET = "LocalElasticAgent._stop_workers"
REASON = "a restart closes the rendezvous and fails (pytorch#123678)"
IS_FOR = capabilities.STOP_CLOSES_RENDEZVOUS


class OpenAgent(LocalElasticAgent):
    """An agent that hides the rendezvous from itself while it stops its workers."""

    def _stop_workers(self, *args: Any, **options: Any) -> None:
        handler: Any = self._rdzv_handler
        nothing: Any = None
        self._rdzv_handler = nothing
        try:
            super()._stop_workers(*args, **options)
        finally:
            self._rdzv_handler = handler


def fits() -> bool:
    """Check that the agent keeps the rendezvous under this name."""
    return (
        agent.is_extensible()
        and has(LocalElasticAgent, "_stop_workers")
        and capabilities.uses(LocalElasticAgent.__init__, "_rdzv_handler")
    )


def apply(*_: object) -> None:
    """Extend the agent, which still closes the rendezvous when it ends."""
    extend(launcher, agent.TARGET, OpenAgent)
