"""Checks of the script's file on this node, before anything is started.

They need no torch: direct mode also uses them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, near
from torchrun_hpc.variables import PATH, PYTHON_EXEC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.options.options import Options

# Entries of a folder that are compared with a wrong name. On a shared file system, each
# entry costs every node a request.
_MOST = 1000


def check(name: str, options: Options, environ: Mapping[str, str]) -> None:
    """Check the script or the program; a module and a dry run need no check."""
    if options.no_python:
        check_program(name, environ)
    elif not (options.module or options.hpc_dry_run):
        check_script(name, environ)


def check_program(name: str, environ: Mapping[str, str]) -> None:
    """Check that the program of ``--no-python`` exists."""
    import shutil  # noqa: PLC0415 - slow to import

    if shutil.which(name, path=environ.get(PATH, os.defpath)) is None:
        raise LaunchError(
            "HPC016",
            f"{name}: there is no such program. Pass its path, or remove --no_python "
            "if it is a Python script",
        )


def check_script(name: str, environ: Mapping[str, str]) -> None:
    """Check that Python finds the script on this node.

    It can be a file, or a folder or an archive with ``__main__.py``. With
    ``PYTHON_EXEC``, nothing is checked: that Python may see other files.
    """
    if name.startswith("-") or environ.get(PYTHON_EXEC):
        return  # an option of Python, or standard input
    path = Path(name)
    problem = folder = ""
    remedy = (
        "Pass a path that is valid on every node. A module needs -m, a program "
        "--no_python"
    )
    try:
        if not path.is_absolute():
            folder = f" in {Path.cwd()}"
        path.stat()
        if path.is_dir():
            if not any(entry.name.startswith("__main__") for entry in path.iterdir()):
                problem = "a folder without __main__.py"
        elif not os.access(path, os.R_OK):
            problem = os.strerror(errno.EACCES)
    except OSError as error:
        problem = f"{error.strerror}{folder}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            with contextlib.suppress(OSError):
                scripts = islice(path.parent.glob("*.py"), _MOST)
                remedy = near(str(path), map(str, scripts)) or remedy
    if problem:
        raise LaunchError("HPC150", f"{name} cannot be run: {problem}. {remedy}")
