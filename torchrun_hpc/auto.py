"""Importing this makes torch.distributed.run understand clusters.

For programs that call ``torch.distributed.run.run`` or ``main`` themselves: the import
wraps ``run``, and the next launch is planned as ``python -m torchrun_hpc`` would plan
it. What the program leaves at torchrun's defaults is filled in.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed import run as torch_run

from torchrun_hpc import arguments, cli

if TYPE_CHECKING:
    import argparse

_original: Any = torch_run.run


@functools.wraps(_original)
def _run(args: argparse.Namespace) -> None:
    with cli.faults_reported():
        job = cli.this_job()
        typed = arguments.changed(args, os.environ)
        cli.prepare(job, args, typed, shlex.join(["python", *sys.argv]))
        _original(args)


torch_run.run = _run
