"""``--version``: what is installed."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, NoReturn

from torchrun_hpc import __version__
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import obstacles
from torchrun_hpc.options import arguments
from torchrun_hpc.options.values import NONE
from torchrun_hpc.planning.preload import DEFAULT, modules_of
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers import process
from torchrun_hpc.worker import imports

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options


def show(options: Options) -> NoReturn:
    """Print the versions, and end; with ``--hpc-debug`` also preloading and patches.

    No other node has to know if this fails.
    """
    try:
        _print(options)
    except LaunchError as error:
        sys.exit(console.refuse(error))
    sys.exit()


def _print(options: Options) -> None:
    """Print the versions; only the patches need the import of torch."""
    found = arguments.torch_version()
    torch = f"torch {found}" if found else "no torch"
    python = platform.python_version()
    console.output(f"torchrun_hpc {__version__}, {torch}, Python {python}\n")
    if options.hpc_debug:
        imports.import_torch()
        from torchrun_hpc.reporting import tables  # noqa: PLC0415
        from torchrun_hpc.torch_compat.patches import registry  # noqa: PLC0415

        registry.check_names(options)
        outcomes = registry.examine(registry.PATCHES, options.hpc_without_patches)
        console.output(f"preload: {_preload(options)}\n")
        console.output(f"\n{tables.of_patches(map(registry.described, outcomes))}\n")


def _preload(options: Options) -> str:
    """Return the modules to preload, or why a script's workers would start by exec."""
    problem = obstacles.of_default(options, process.environment())
    if not problem and options.hpc_preload == DEFAULT:
        problem = imports.build_problem()
    return f"{NONE} ({problem})" if problem else ",".join(modules_of(options)) or NONE
