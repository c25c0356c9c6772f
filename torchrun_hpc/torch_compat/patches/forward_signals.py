"""The workers get what is sent to the agent: SIGUSR1 and SIGUSR2.

Torchrun dies of both, and its workers, which are in sessions of their own, live on.
With ``--signals-to-handle`` it passes them on and then ends the job.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext

from torchrun_hpc.launching import signals
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

TARGET = "LocalElasticAgent._monitor_workers"
REASON = "SIGUSR1 ends it, and does not reach the workers (pytorch#154849)"
IS_FOR = capabilities.EVERY

_Agent: Any = LocalElasticAgent
_NAME = "_monitor_workers"
_CONTEXT = "_pcontext"


def fits() -> bool:
    """Check that the agent looks after its workers here, and knows their numbers."""
    return (
        has(_Agent, _NAME)
        and list(inspect.signature(_Agent._monitor_workers).parameters)
        == ["self", "worker_group"]
        and _CONTEXT in _Agent.__init__.__code__.co_names
        and list(inspect.signature(PContext.pids).parameters) == ["self"]
    )


def apply(_plan: object) -> None:
    """Forward signals each time that the agent looks after its workers."""
    original = _Agent._monitor_workers

    @functools.wraps(original)
    def monitor_workers(self: Any, worker_group: Any) -> Any:
        context = getattr(self, _CONTEXT)
        if context is not None:
            signals.forward(context.pids())
        return original(self, worker_group)

    replace(_Agent, _NAME, monitor_workers)
