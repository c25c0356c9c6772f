"""Importing this makes torch.distributed.run understand clusters.

For programs that call ``torch.distributed.run.main`` or ``run`` themselves: the import
applies the patches that need no plan, and wraps the parser and ``run``, so that each
launch is planned, and patched, as by ``python -m torchrun_hpc``. Of arguments that the
program has made itself, what is left at torchrun's defaults is filled in.

The command ends with an exit code; here the program gets an exception, as from torch,
and decides. `SystemExit` is what torch makes of it too: a command line that cannot be
parsed, ``--help``, and the end of a dry run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torch_run

from torchrun_hpc import main
from torchrun_hpc.commandline import torchrun_parser
from torchrun_hpc.errors import EmbeddedLaunchError, LaunchError
from torchrun_hpc.launching import agent
from torchrun_hpc.reporting import report
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import registry

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

_original_run: Any = torch_run.run
_original_parse: Any = torch_run.parse_args

_EXPLICIT = "hpc_typed"


@contextlib.contextmanager
def _faults_raised() -> Iterator[None]:
    """Raise what the command would report, and what it would end of.

    Raises:
        EmbeddedLaunchError: Wrong use, for which the command has exit code 2.
        Exception: What ended the job, where the command has exit code 1.
    """
    try:
        yield
    except LaunchError as error:
        raise EmbeddedLaunchError(error.code, str(error)) from None
    except SystemExit as end:
        if isinstance(end.__cause__, Exception):
            raise end.__cause__ from None
        raise


@functools.wraps(_original_parse)
def _parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if args is None else args
    with _faults_raised():
        torchrun_parser.parser(os.environ)  # of a variable that cannot be read torch speaks here
    with main.faults_reported():  # and argparse ends the program
        parsed, explicit = torchrun_parser.parse(argv, os.environ)
    setattr(parsed, _EXPLICIT, explicit)
    return parsed


@functools.wraps(_original_run)
def _run(args: argparse.Namespace) -> None:
    with _faults_raised():
        agent.launch_parsed(_original_run, args, getattr(args, _EXPLICIT, None))


try:
    capabilities.check_release()
except LaunchError as _error:
    raise ImportError(f"{_error.code} {_error}") from None
for _message in registry.left_out(registry.apply_patches()):
    report.line(_message, sys.stderr, "warning")
torch_run.parse_args = _parse_args
torch_run.run = _run
