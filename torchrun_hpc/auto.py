"""Importing this makes torch.distributed.run understand clusters.

For programs that call ``torch.distributed.run.main`` or ``run`` themselves: the import
applies the patches that need no plan, and wraps the parser and ``run``, so that each
launch is planned, and patched, as by ``python -m torchrun_hpc``. Of arguments that the
program has made itself, what is left at torchrun's defaults is filled in.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torch_run

from torchrun_hpc import arguments, cli, launching, report
from torchrun_hpc.patching import capabilities, patches

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_original_run: Any = torch_run.run
_original_parse: Any = torch_run.parse_args

_TYPED = "hpc_typed"


@functools.wraps(_original_parse)
def _parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if args is None else args
    with cli.faults_reported():
        parsed, typed = arguments.parse(argv, os.environ)
    setattr(parsed, _TYPED, typed)
    return parsed


@functools.wraps(_original_run)
def _run(args: argparse.Namespace) -> None:
    launching.launch_parsed(_original_run, args, getattr(args, _TYPED, None))


with cli.faults_reported():
    capabilities.check_release()
for _message in patches.left_out(patches.apply_patches()):
    report.line(_message, sys.stderr, "warning")
torch_run.parse_args = _parse_args
torch_run.run = _run
