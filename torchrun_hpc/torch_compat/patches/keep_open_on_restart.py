"""An agent that stops its workers for a restart does not close the rendezvous.

Torch 2.3 does, and so no restart succeeds in it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

TARGET = "LocalElasticAgent._stop_workers"
REASON = "a restart closes the rendezvous, and fails (pytorch#123678)"
IS_FOR = capabilities.STOP_CLOSES_RENDEZVOUS

_Agent: Any = LocalElasticAgent
_NAME = "_stop_workers"
_HANDLER = "_rdzv_handler"


def fits() -> bool:
    """Check that the agent keeps the rendezvous under this name."""
    return has(_Agent, _NAME) and _HANDLER in _Agent.__init__.__code__.co_names


def apply(_plan: object) -> None:
    """Hide the rendezvous meanwhile; it is closed when the agent ends."""
    original = _Agent._stop_workers

    @functools.wraps(original)
    def stop_workers(self: Any, *args: Any, **options: Any) -> Any:
        handler = getattr(self, _HANDLER)
        setattr(self, _HANDLER, None)
        try:
            return original(self, *args, **options)
        finally:
            setattr(self, _HANDLER, handler)

    replace(_Agent, _NAME, stop_workers)
