"""Changes of torch's command: the name of the host, and a needless warning."""

from __future__ import annotations

import inspect
import socket
from typing import Any

from torch.distributed import run as torch_run
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from torchrun_hpc.agent.patches import Patch, replace, takes, wrap
from torchrun_hpc.host import capabilities

_api: Any = api
_run: Any = torch_run
_Agent: Any = LocalElasticAgent

_HOST_NAME = "_get_fq_hostname"


class HostName(Patch):
    """The agent knows its host's name without asking a name server.

    Torch asks for the full name for each event, which may take seconds. For a worker's
    failure, torch still asks in another way.
    """

    NAME = "host_name"
    TARGET = f"torch.distributed.elastic.agent.server.api.{_HOST_NAME}"
    REASON = "a slow name server stalls the agent at each event (as in pytorch#159007)"
    IS_FOR = capabilities.RENDEZVOUS_INFO  # before, MASTER_ADDR depends on it

    @classmethod
    def fits(cls) -> bool:
        """Check that torch asks for the name here, and gets a text."""
        return (
            takes(_api, _HOST_NAME)
            and takes(_Agent, _HOST_NAME, "self")
            and capabilities.uses(_api.SimpleElasticAgent._construct_event, _HOST_NAME)
        )

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Answer with the kernel's host name."""
        replace(_api, _HOST_NAME, socket.gethostname)
        replace(_Agent, _HOST_NAME, staticmethod(socket.gethostname))


class MasterAddr(Patch):
    """Torch does not warn of an option that the user has not passed.

    Torch sets ``--master-addr`` itself, and then warns that it has no effect.
    """

    NAME = "master_addr"
    TARGET = "torch.distributed.run.config_from_args"
    REASON = "torch warns of --master-addr, which nobody has passed (pytorch#111085)"
    IS_FOR = capabilities.WARNS_OF_DEFAULT

    @classmethod
    def fits(cls) -> bool:
        """Check that the warning is written where the arguments are read."""
        code = inspect.unwrap(_run.config_from_args).__code__
        reads_it = "master_addr" in code.co_consts
        return takes(_run, "config_from_args", "args") and reads_it

    @classmethod
    def apply(cls, _plan: object, _hooks: object) -> None:
        """Leave the option out if torch does not read it."""

        def read(original: Any, args: Any) -> Any:
            return original(capabilities.without_default(args))

        wrap(_run, "config_from_args", read)
