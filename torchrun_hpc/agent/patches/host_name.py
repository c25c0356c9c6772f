"""The agent knows its host's name without asking a name server.

Torch asks for the full name for each event, which may take seconds. For a worker's
failure, torch still asks in another way.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchrun_hpc.agent.patches.replacing import replace, takes
from torchrun_hpc.host import capabilities

_NAME = "_get_fq_hostname"

TARGET = f"torch.distributed.elastic.agent.server.api.{_NAME}"
REASON = "a slow name server stalls the agent at each event (as in pytorch#159007)"
IS_FOR = capabilities.RENDEZVOUS_INFO  # before, MASTER_ADDR depends on it

_torch: Any = api
_Agent: Any = LocalElasticAgent


def fits() -> bool:
    """Check that torch asks for the name here, and gets a text."""
    return (
        takes(_torch, _NAME)
        and takes(_Agent, _NAME, "self")
        and capabilities.uses(_torch.SimpleElasticAgent._construct_event, _NAME)
    )


def apply(*_: object) -> None:
    """Answer with the kernel's host name."""
    replace(_torch, _NAME, socket.gethostname)
    replace(_Agent, _NAME, staticmethod(socket.gethostname))
