"""The agent knows the name of its host without asking a name server.

Torch looks for the full name when it records an event: the end of the agent, its
measurements, the end of each worker. Where the name server is slow, each of them
stalls the agent by seconds. Where the failure of a worker is reported, torch still asks
by another way.

The original is not called: to call it is to ask.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import replace, takes

_NAME = "_get_fq_hostname"

TARGET = f"torch.distributed.elastic.agent.server.api.{_NAME}"
REASON = "a slow name server stalls it at each event (as in pytorch#159007)"
IS_FOR = capabilities.RENDEZVOUS_INFO  # before, it decides on MASTER_ADDR

_torch: Any = api
_Agent: Any = LocalElasticAgent


def fits() -> bool:
    """Check that the name is asked for here, and given as a text."""
    return (
        takes(_torch, _NAME)
        and takes(_Agent, _NAME, "self")
        and capabilities.uses(_torch.SimpleElasticAgent._construct_event, _NAME)
    )


def apply(*_: object) -> None:
    """Answer with what the kernel says."""
    replace(_torch, _NAME, socket.gethostname)
    replace(_Agent, _NAME, staticmethod(socket.gethostname))
