"""Output beside messages: with ``--hpc-debug``, of torch's logs, and of versions."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from typing import TYPE_CHECKING, NoReturn

from torchrun_hpc import __version__, environment, programs
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.values import NONE
from torchrun_hpc.planning import network_env
from torchrun_hpc.preload import imports, plan
from torchrun_hpc.preload.plan import DEFAULT, modules_of
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from torchrun_hpc.options.options import Options


_STDERR = 2

_copier: subprocess.Popen[bytes] | None = None


def switch_on_debug(host: str, rank: int | None) -> None:
    """Set the unset variables, and prefix each line of stderr with this node.

    Torch's C++ code writes to stderr until the process ends, so a separate process adds
    the prefix.
    """
    global _copier  # noqa: PLW0603 - a process has one stderr
    if _copier is not None:
        return
    environment.update(network_env.debugging(process.environment()))
    node = "" if rank is None else f" node {rank}"
    streams.flush(sys.stderr)
    prefix = f"{host.partition('.')[0]}{node}: "
    # It ends with the last writer.
    _copier = programs.start(
        "write_prefix", prefix, stdin=programs.PIPE, stdout=_STDERR
    )
    if _copier.stdin is not None:
        os.dup2(_copier.stdin.fileno(), _STDERR)
        _copier.stdin.close()


# --- torch's log lines ----------------------------------------------------------------

_PACKAGE = "torch.distributed.elastic"
_LOGGERS = "agent.server.api multiprocessing.api multiprocessing.errors.error_handler"
_WITHHELD = (
    "Received %s death signal",
    "Sending process ",
    "failed (exitcode: ",
    "no error file defined for parent",
)


@contextlib.contextmanager
def withhold(*, is_quiet: bool) -> Iterator[None]:
    """Withhold torch's log lines on signals, and on failed or stopped workers."""
    names = _LOGGERS.split() if is_quiet else ()
    loggers = [logging.getLogger(f"{_PACKAGE}.{name}") for name in names]
    for logger in loggers:
        logger.addFilter(_is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WITHHELD)


# --- versions -------------------------------------------------------------------------


def show_version(options: Options) -> NoReturn:
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
    version = imports.torch_version()
    torch = f"torch {version}" if version else "no torch"
    python = platform.python_version()
    console.output(f"torchrun_hpc {__version__}, {torch}, Python {python}\n")
    if options.hpc_debug:
        imports.import_torch()
        from torchrun_hpc.agent.patches import registry  # noqa: PLC0415
        from torchrun_hpc.reporting import tables  # noqa: PLC0415

        registry.check_names(options)
        outcomes = registry.examine(registry.PATCHES, options.hpc_without_patches)
        console.output(f"preload: {_preload(options)}\n")
        console.output(f"\n{tables.of_patches(map(registry.described, outcomes))}\n")


def _preload(options: Options) -> str:
    """Return the modules to preload, or why a script's workers would start by exec."""
    problem = plan.obstacle(options, process.environment())
    if not problem and options.hpc_preload == DEFAULT:
        problem = imports.build_problem()
    return f"{NONE} ({problem})" if problem else ",".join(modules_of(options)) or NONE
