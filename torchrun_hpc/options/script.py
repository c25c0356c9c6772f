"""The script, looked at on this node before anything is started."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.options.options import Options


def check(name: str, options: Options, environ: Mapping[str, str]) -> None:
    """See that what is to be run is there: a script, a module or a program.

    Raises:
        LaunchError: It is not.
    """
    if options.no_python:
        check_program(name, environ)
    elif not (options.module or options.hpc_dry_run):
        check_script(name, environ)  # a dry run needs none


def check_program(name: str, environ: Mapping[str, str]) -> None:
    """See that a program that ``--no-python`` names is there.

    Raises:
        LaunchError: It is not.
    """
    import shutil  # noqa: PLC0415 - slow to import

    if shutil.which(name, path=environ.get("PATH", os.defpath)) is None:
        raise LaunchError(
            "HPC016",
            f"{name}: there is no such program to run. Type its path, or leave "
            "--no_python out for a Python script",
        )


def check_script(name: str, environ: Mapping[str, str]) -> None:
    """See that Python finds, on this node, the script that it is to run.

    Not a module: nothing but importing what it is in would tell. Not where the workers
    have another Python, which may see other files, in a container for example.

    It may be a file, or a folder or an archive with ``__main__.py``.

    Raises:
        LaunchError: It does not.
    """
    if name.startswith("-") or environ.get("PYTHON_EXEC"):
        return  # an option of Python, or standard input
    path, where, problem = Path(name), "", ""
    try:
        if not path.is_absolute():
            where = f" in {Path.cwd()}"
        path.stat()
        if not path.is_dir():
            problem = "" if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
        elif not any(entry.name.startswith("__main__") for entry in path.iterdir()):
            problem = "a folder without __main__.py"
    except OSError as error:
        problem = f"{error.strerror}{where}"
    if problem:
        raise LaunchError(
            "HPC150",
            f"{name} cannot be run: {problem}. Type the script's path as it is on "
            "every node; a module takes -m, a program --no_python",
        )
