"""Each worker runs on its own CPUs, with ``--hpc-bind`` only.

A worker inherits the CPUs of the thread that starts it. This needs no ``numactl``,
unlike torch's ``--numa-binding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.agent.patches.replacing import takes, wrap
from torchrun_hpc.host import capabilities
from torchrun_hpc.planning.resources import CPU_LIST, OMP
from torchrun_hpc.preload import affinity

if TYPE_CHECKING:
    from torchrun_hpc.planning.plan import LaunchPlan

TARGET = "SubprocessHandler._popen"
REASON = "workers share the CPUs of their agent (pytorch#115305)"
IS_FOR = capabilities.EVERY

_torch: Any = api


def fits() -> bool:
    """Check that the workers are started here, with their rank in the environment."""
    return takes(_torch.SubprocessHandler, "_popen", "self", "args", "env")


def apply(plan: LaunchPlan, _hooks: object) -> None:
    """Bind the thread that starts a worker."""
    binding: Any = plan.workers.binding

    def popen(original: Any, handler: Any, args: Any, env: Any) -> Any:
        # With --virtual-local-rank (since 2.3), LOCAL_RANK is 0 for all workers.
        rank = getattr(handler, "local_rank_id", None)
        rank = int(env["LOCAL_RANK"]) if rank is None else rank
        share = binding.shares[rank]
        threads = {OMP: str(len(share.cpus))} if binding.sets_threads else {}
        cpus = {CPU_LIST: share.cpu_list} if env.get(CPU_LIST) else {}
        with affinity.bound(share, f"the worker of local rank {rank}"):
            return original(handler, args, {**env, **threads, **cpus})

    wrap(_torch.SubprocessHandler, "_popen", popen)
