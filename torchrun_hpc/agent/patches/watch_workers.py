"""A failed worker is noticed at once, together with its traceback.

Torch's agent looks only every ``--monitor-interval``, and stops the other workers
first. The worker's own text is lost in the output of all.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api as launcher

from torchrun_hpc.agent.patches import agent
from torchrun_hpc.agent.patches.replacing import extend, has, takes, wrap
from torchrun_hpc.failures.worker import Worker, exit_code_of
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from torchrun_hpc.agent.patches.hooks import Hooks
    from torchrun_hpc.failures.watch import Watch

TARGET = "SubprocessHandler._popen"
REASON = "the traceback of the first failure is lost (pytorch#113546, #75087, #60911)"
IS_FOR = capabilities.EVERY

_log = logging.getLogger(__name__)
_torch: Any = api
_Simple: Any = server.SimpleElasticAgent


def fits() -> bool:
    """Check where workers are started and stopped, and where their files are."""
    handler = _torch.SubprocessHandler
    return (
        agent.is_extensible()
        and takes(handler, "_popen", "self", "args", "env")
        and capabilities.uses(handler._popen, "_stderr")
        and takes(LocalElasticAgent, "_start_workers", "self", "worker_group")
        and has(LocalElasticAgent, "_shutdown")
        and takes(LocalElasticAgent, "_monitor_workers", "self", "worker_group")
        and has(server.RunResult, "is_failed")
        and capabilities.uses(LocalElasticAgent.__init__, "_pcontext")
        and capabilities.uses(_Simple.__init__, "_remaining_restarts")
        and has(_torch.PContext, "close")
        and capabilities.uses(_torch.PContext.__init__, "stderrs", "error_files")
    )


def apply(_plan: object, hooks: Hooks) -> None:
    """Read the workers' stderr, and watch them."""

    class WatchingAgent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            workers = _workers(pids, worker_group, self._pcontext)
            hooks.watch.begin(workers, self._remaining_restarts)
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            hooks.watch.before_poll()
            result = super()._monitor_workers(worker_group)
            if not result.is_failed():
                hooks.watch.poll_was_clean()
            return result

        def _shutdown(self, *args: Any, **options: Any) -> None:
            is_signal = isinstance(sys.exc_info()[1], SignalException)
            hooks.watch.stopping(look=not is_signal)
            super()._shutdown(*args, **options)
            hooks.watch.all_stopped()

    def popen(original: Any, handler: Any, args: Any, env: Any) -> Any:
        planned = handler._stderr
        is_hidden = getattr(planned, "name", "") == os.devnull  # --local-ranks-filter

        def start(stderr: Any) -> Any:
            handler._stderr = planned if stderr is None else stderr
            try:
                return original(handler, args, env)
            finally:
                handler._stderr = planned

        if planned is not None and not is_hidden:  # a file: --redirects, --tee
            return original(handler, args, env)
        return hooks.relay.start(start, is_shown=not is_hidden)

    def close(original: Any, *args: Any, **options: Any) -> None:
        _examine(hooks.watch)
        original(*args, **options)

    extend(launcher, agent.TARGET, WatchingAgent)
    wrap(_torch.PContext, "close", close)
    wrap(_torch.SubprocessHandler, "_popen", popen)


def _examine(watch: Watch) -> None:
    try:
        watch.before_stop()
    except SignalException:
        raise
    except Exception as error:  # noqa: BLE001 - the workers must be stopped
        _log.warning("the workers were not examined: %s", error)


def _workers(pids: dict[int, Any], group: Any, context: Any) -> list[Worker]:
    processes = _processes(context)
    return [
        Worker(
            rank=group.workers[local].global_rank,
            size=group.workers[local].world_size,
            node=group.group_rank,
            local_rank=local,
            pid=pid,
            exit_code=functools.partial(_exit_code, pid, processes.get(local)),
            log=_file(context.stderrs.get(local)),
            error_file=context.error_files.get(local, ""),
            nodes=group.group_world_size,
            told=getattr(processes.get(local), "told", lambda *_: b""),
        )
        for local, pid in pids.items()
    ]


def _file(name: str | None) -> str:
    return "" if name in (None, os.devnull) else str(name)


def _processes(context: Any) -> dict[int, Any]:
    if hasattr(context, "subprocess_handlers"):
        return {k: h.proc for k, h in context.subprocess_handlers.items()}
    processes = getattr(getattr(context, "_pc", None), "processes", ())  # functions
    return dict(enumerate(getattr(each, "_popen", None) for each in processes))


def _exit_code(pid: int, process: Any) -> int | None:
    collected = getattr(process, "returncode", None)
    return exit_code_of(pid) if collected is None else int(collected)
