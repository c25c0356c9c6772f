"""Torch does not warn of an option that the user has not passed.

Torch sets ``--master-addr`` itself, and then warns that it has no effect.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed import run as torch_run

from torchrun_hpc.agent.patches.replacing import takes, wrap
from torchrun_hpc.host import capabilities

TARGET = "torch.distributed.run.config_from_args"
REASON = "torch warns of --master-addr, which nobody has passed (pytorch#111085)"
IS_FOR = capabilities.WARNS_OF_DEFAULT

_torch: Any = torch_run
_NAME = "config_from_args"


def fits() -> bool:
    """Check that the warning is written where the arguments are read."""
    code = inspect.unwrap(_torch.config_from_args).__code__
    return takes(_torch, _NAME, "args") and "master_addr" in code.co_consts


def apply(*_: object) -> None:
    """Leave the option out if torch does not read it."""
    wrap(_torch, _NAME, lambda read, args: read(capabilities.without_default(args)))
