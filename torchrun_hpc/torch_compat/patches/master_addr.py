"""Torch does not warn of an option that nobody has typed.

With any rendezvous but the static one it says that ``--master-addr`` has no effect,
whose default it has set itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torch_run

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, replace

if TYPE_CHECKING:
    import argparse

TARGET = "torch.distributed.run.config_from_args"
REASON = "it warns of --master-addr, which nobody has typed (pytorch#111085)"
IS_FOR = capabilities.WARNS_OF_DEFAULT

_torch: Any = torch_run
_NAME = "config_from_args"
_OPTION = "master_addr"


def fits() -> bool:
    """Check that the warning is written where the arguments are read."""
    original = _torch.config_from_args
    return (
        has(_torch, _NAME)
        and list(inspect.signature(original).parameters) == ["args"]
        and _OPTION in inspect.unwrap(original).__code__.co_consts
    )


def apply(_plan: object) -> None:
    """Leave the option out where torch does not read it."""
    original = _torch.config_from_args

    @functools.wraps(original)
    def config_from_args(args: argparse.Namespace) -> Any:
        return original(without(args))

    replace(_torch, _NAME, config_from_args)


def without(args: argparse.Namespace) -> argparse.Namespace:
    """Return arguments of which torch does not warn."""
    if not (IS_FOR.present and fits()) or args.rdzv_backend == "static":
        return args
    others = copy.copy(args)
    vars(others).pop(_OPTION, None)
    return others
