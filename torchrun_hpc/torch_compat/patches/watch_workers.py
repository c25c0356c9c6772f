"""A worker that fails is seen at once, and why it does.

Torch's agent looks every ``--monitor-interval``, and then stops the others first, which
takes as long as they like. What the worker wrote stands somewhere in the output of all.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api as launcher

from torchrun_hpc.failures.watch import Worker, exit_code_of
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import agent
from torchrun_hpc.torch_compat.patches.replacing import extend, has, takes, wrap

if TYPE_CHECKING:
    from torchrun_hpc.torch_compat.patches.hooks import Hooks

TARGET = "SubprocessHandler._popen"
REASON = "the traceback of the first failure is lost (pytorch#113546, #75087, #60911)"
IS_FOR = capabilities.EVERY

_torch: Any = api


def fits() -> bool:
    """Check where workers are started and stopped, and where their files are."""
    handler = _torch.SubprocessHandler
    return (
        agent.is_extensible()
        and takes(handler, "_popen", "self", "args", "env")
        and capabilities.uses(handler._popen, "_stderr")
        and takes(LocalElasticAgent, "_start_workers", "self", "worker_group")
        and has(LocalElasticAgent, "_shutdown")
        and capabilities.uses(LocalElasticAgent.__init__, "_pcontext")
        and capabilities.uses(_torch.PContext.__init__, "stderrs", "error_files")
    )


def apply(_plan: object, hooks: Hooks) -> None:
    """Read what workers write, and watch them."""

    class WatchingAgent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            workers = _workers(pids, worker_group, self._pcontext)
            hooks.watch.begin(workers, self._remaining_restarts)
            return pids

        def _shutdown(self, *args: Any, **options: Any) -> None:
            is_signal = isinstance(sys.exc_info()[1], SignalException)
            hooks.watch.stop(look=not is_signal)
            super()._shutdown(*args, **options)
            hooks.watch.stopped()

    def popen(original: Any, handler: Any, args: Any, env: Any) -> Any:
        def start(stderr: Any) -> Any:
            handler._stderr = stderr
            try:
                return original(handler, args, env)
            finally:
                handler._stderr = None

        if handler._stderr is not None:  # a file: --redirects, --tee
            return original(handler, args, env)
        return hooks.relay.start(start)

    extend(launcher, agent.TARGET, WatchingAgent)
    wrap(_torch.SubprocessHandler, "_popen", popen)


def _workers(pids: dict[int, Any], group: Any, context: Any) -> list[Worker]:
    processes = getattr(context, "subprocess_handlers", {})
    return [
        Worker(
            rank=group.workers[local].global_rank,
            size=group.workers[local].world_size,
            node=group.group_rank,
            local_rank=local,
            pid=pid,
            exit_code=functools.partial(_exit_code, pid, processes.get(local)),
            log=context.stderrs.get(local, ""),
            error_file=context.error_files.get(local, ""),
        )
        for local, pid in pids.items()
    ]


def _exit_code(pid: int, process: Any) -> int | None:
    collected = process.proc.returncode if process is not None else None
    return exit_code_of(pid) if collected is None else int(collected)
