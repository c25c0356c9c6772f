"""A death signal interrupts neither a start nor an end of workers.

Torch's handler raises an exception, even in the at-fork hooks that a start of a worker
runs: there Python ignores it. While workers write their checkpoints, a second signal
would signal them again, and after one more the agent would end without them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher import api as launcher

from torchrun_hpc.agent.death_signals import FOREVER, LIMIT
from torchrun_hpc.agent.patches import agent
from torchrun_hpc.agent.patches.replacing import extend, has, takes, wrap
from torchrun_hpc.host import capabilities
from torchrun_hpc.rendezvous.errors import JobFailedError

if TYPE_CHECKING:
    from torchrun_hpc.agent.patches.hooks import Hooks

TARGET = "_terminate_process_handler"
REASON = (
    "a death signal is lost while a worker is started, and an agent signalled twice "
    "can leave workers behind (since pytorch#61602)"
)
IS_FOR = capabilities.EVERY

_torch: Any = api


def fits() -> bool:
    """Check where workers are started and ended, and that torch's handler raises."""
    return (
        agent.is_extensible()
        and takes(LocalElasticAgent, "_start_workers", "self", "worker_group")
        and has(LocalElasticAgent, "_shutdown")
        and takes(_torch.PContext, "close", "self", "death_sig", "timeout")
        and takes(_torch, TARGET, "signum", "frame")
        and has(_torch, "SignalException")
        and capabilities.uses(_torch.PContext.start, TARGET)
    )


def apply(_plan: object, hooks: Hooks) -> None:
    """Let a signal wait until the workers have started, or ended."""

    class DeferringAgent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            with hooks.death_signals.held(LIMIT):
                return super()._start_workers(worker_group)

        def _shutdown(self, *args: Any, **options: Any) -> None:
            if isinstance(sys.exc_info()[1], (_torch.SignalException, JobFailedError)):
                hooks.death_signals.end()
            super()._shutdown(*args, **options)

    def handle(original: Any, number: int, frame: Any) -> None:
        hooks.death_signals.handler(original)(number, frame)

    def close(original: Any, *args: Any, **options: Any) -> None:
        with hooks.death_signals.held(FOREVER):
            original(*args, **options)

    extend(launcher, agent.TARGET, DeferringAgent)
    wrap(_torch, TARGET, handle)
    wrap(_torch.PContext, "close", close)
