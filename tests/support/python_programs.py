"""Programs that the tests start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from unittest import mock

from tests.support import ROOT
from tests.support.patience import PATIENCE


def load(path):
    """Import a program that is in no package, with what is beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


def run_python(*args, cwd, environ=None, path=(), before=()):
    """Run Python on this checkout, without standard input, and return the outcome.

    Args:
        args: Its arguments.
        cwd: Working directory.
        environ: Its environment but PYTHONPATH; by default that of this process.
        path: Folders to be searched before the checkout.
        before: A command that starts it, if not by itself.
    """
    return subprocess.run(
        [*before, sys.executable, *args],
        env={
            **(os.environ if environ is None else environ),
            "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]),
        },
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
