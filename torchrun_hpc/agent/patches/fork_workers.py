"""Workers are forks of a process that has already imported torch.

Used with preloading only. A worker that cannot be a fork is started as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.agent.patches.replacing import takes, wrap
from torchrun_hpc.host import capabilities

if TYPE_CHECKING:
    from torchrun_hpc.agent.patches.hooks import Hooks

TARGET = "SubprocessHandler._popen"
REASON = "each worker of a node imports torch again (as in pytorch#103117)"
IS_FOR = capabilities.EVERY

_torch: Any = api


def fits() -> bool:
    """Check that the workers are started here, and where their files are."""
    handler = _torch.SubprocessHandler
    return takes(handler, "_popen", "self", "args", "env") and capabilities.uses(
        handler._popen, "_stdout", "_stderr"
    )


def apply(_plan: object, hooks: Hooks) -> None:
    """Fork each worker, if possible."""

    def popen(original: Any, handler: Any, args: Any, env: Any) -> Any:
        worker = hooks.fork(args, env, handler._stdout, handler._stderr)
        return original(handler, args, env) if worker is None else worker

    wrap(_torch.SubprocessHandler, "_popen", popen)
