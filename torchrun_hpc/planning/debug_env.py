"""The environment variables of ``--hpc-debug``."""

from __future__ import annotations

# Each of these sets a level of its own, so that their common parent has no say.
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.distributed_c10d",
    "torchrun_hpc.rendezvous.client",
)

VARIABLES = {
    "TORCH_LOGS": ",".join(f"+{module}" for module in _MODULES),
    # Not DETAIL: that is no logging, it checks each collective in a process group of
    # its own, and jobs hang (pytorch#129672) or, DDP on gloo in torch 2.13, crash.
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    # For --tee, which is set where neither it nor --redirects is typed.
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
}
