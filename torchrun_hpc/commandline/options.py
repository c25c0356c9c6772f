"""Our own options, the ``--hpc-*`` group, for both command lines.

torchrun's parser, which `arguments` extends, and the small one of direct mode. Each
option has a variable by torchrun's own rule: ``--hpc-site`` is ``PET_HPC_SITE``.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "torchrun_hpc"

# Not an option with a value: that would take the script for it.
DRY_RUN = {
    "table": "Start nothing: meet the other nodes, and print on node 0 what would be "
    "done, value by value with its source, and the same with plain torchrun.",
    "json": "The same for machines.",
}


def options_of(made: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a parser, without its positional arguments."""
    return [action for action in made._actions if action.option_strings]


def without_defaults(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let a parser return what was typed, and nothing else."""
    for action in options_of(made):
        action.default = argparse.SUPPRESS
    return made


def variable_of(dest: str) -> str:
    """Return the variable of an option, by torchrun's rule."""
    return f"PET_{dest.upper()}"


class OrVariable(argparse.Action):
    """An option whose default is in its variable."""

    def __init__(self, dest: str, default: Any = None, **kwargs: Any) -> None:
        default = os.environ.get(variable_of(dest), default)
        super().__init__(dest=dest, default=default, **kwargs)

    def __call__(self, _parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        """Take the value that was typed."""
        setattr(namespace, self.dest, values)


class Flag(OrVariable):
    """An option without a value; its variable is 1 or 0."""

    def __init__(self, dest: str, **kwargs: Any) -> None:
        super().__init__(dest=dest, nargs=0, **kwargs)
        self.default = bool(int(self.default or 0))

    def __call__(self, _parser: Any, namespace: Any, *_: Any) -> None:
        """Switch it on."""
        setattr(namespace, self.dest, True)


class _DryRun(OrVariable):
    """A flag of several forms, which ``PET_HPC_DRY_RUN`` names; 1 is the first."""

    def __init__(self, dest: str, const: str, **kwargs: Any) -> None:
        super().__init__(dest=dest, const=const, nargs=0, **kwargs)
        forms = {"": None, "0": None, "1": "table"}
        self.default = forms.get(self.default or "", self.default)

    def __call__(self, _parser: Any, namespace: Any, *_: Any) -> None:
        setattr(namespace, self.dest, self.const)


def add_ours(made: argparse.ArgumentParser) -> None:
    """Add our group to a parser.

    Raises:
        ValueError: The variable of a flag is not a number.
    """
    group = made.add_argument_group("clusters", "Added to torchrun by torchrun_hpc.")
    group.add_argument(
        "--hpc-site",
        "--hpc_site",
        action=OrVariable,
        type=str,
        metavar="NAME|FILE|none",
        help="Computing centre whose rules for host names and variables to use, or a "
        "file with them, or 'none'. By default it is recognised by the environment. "
        "python -m torchrun_hpc.sites lists them.",
    )
    group.add_argument(
        "--hpc-omp-threads",
        "--hpc_omp_threads",
        action=OrVariable,
        type=str,
        metavar="auto|NUMBER",
        help="OMP_NUM_THREADS of each worker where it is not set; 'auto' divides the "
        "CPUs of this process by the workers. By default 1, as torchrun does.",
    )
    group.add_argument(
        "--hpc-rendezvous",
        "--hpc_rendezvous",
        action=OrVariable,
        type=str,
        metavar="auto|scheduler|c10d",
        help="How the nodes of a job meet where torchrun would use c10d: 'scheduler' "
        "by the ranks that the scheduler gave them, 'c10d' as torch does. By default "
        "'auto': the first if the number of nodes is fixed.",
    )
    for form, meaning in DRY_RUN.items():
        names = ("--hpc-dry-run", "--hpc_dry_run")
        plain = names if form == "table" else ()
        group.add_argument(
            *plain,
            *(f"{name}={form}" for name in names),
            dest="hpc_dry_run",
            action=_DryRun,
            const=form,
            help=meaning,
        )
    group.add_argument(
        "--hpc-debug",
        "--hpc_debug",
        action=Flag,
        help="Log what torch and the launcher do, on every node, with host name and "
        "rank before each line.",
    )


# The options that say whether nodes meet, and where; and how torch reads them.
ENDPOINT: dict[str, type] = {
    "standalone": bool,
    **dict.fromkeys(("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id"), str),
    **dict.fromkeys(("rdzv_conf", "master_addr", "hpc_rendezvous", "hpc_site"), str),
    **dict.fromkeys(("master_port", "node_rank"), int),
}


def endpoint_options(argv: Sequence[str]) -> dict[str, Setting]:
    """Return what was typed of `ENDPOINT`, as far as this can be known without torch.

    Where torch's parser cannot be had, to tell other nodes just that: who finds nobody
    by a wrong answer tells nobody.

    Args:
        argv: The command line, without the program's name.
    """
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    made.error = wrong_line  # type: ignore[method-assign]
    try:
        for dest, kind in ENDPOINT.items():
            names = dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}"))
            if kind is bool:
                made.add_argument(*names, action=Flag)
            else:
                made.add_argument(*names, action=OrVariable, type=kind)
        args, _ = made.parse_known_args(_before_script(argv))
    except (LaunchError, ValueError):
        return {}
    return {
        dest: Setting(value, f"--{dest}")
        for dest, value in vars(args).items()
        if value not in (None, "") and value is not False
    }


# Options of torchrun behind which the next word is no value.
_FLAGS = {
    *("-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"),
    *("--standalone", "--virtual-local-rank", "--virtual_local_rank"),
    *("--hpc-debug", "--hpc_debug", "--hpc-dry-run", "--hpc_dry_run"),
}


def _before_script(argv: Sequence[str]) -> list[str]:
    """Cut a command line in front of the first word that can only be the script."""
    before = ""
    for number, word in enumerate(argv):
        may_be_value = before.startswith("-") and "=" not in before
        if not word.startswith("-") and (not may_be_value or before in _FLAGS):
            return list(argv[:number])
        before = word
    return list(argv)


def wrong_line(message: str) -> NoReturn:
    """Refuse a command line.

    Raises:
        LaunchError: Always.
    """
    raise LaunchError("HPC010", f"{message}. --help lists all options", everywhere=True)


def wrong_variable(error: ValueError) -> NoReturn:
    """Refuse the variable of a flag.

    Raises:
        LaunchError: Always.
    """
    flags = ", ".join(f"{k}={v}" for k, v in os.environ.items() if k[:4] == "PET_")
    raise LaunchError(
        "HPC011",
        f"a PET_* variable cannot be read ({error}): {flags}. Flags such as "
        "PET_STANDALONE are 1 or 0",
        everywhere=True,
    ) from None


def check_program(name: str) -> None:
    """See that a program that ``--no-python`` names is there.

    Raises:
        LaunchError: It is not.
    """
    if shutil.which(name) is None:
        raise LaunchError(
            "HPC016",
            f"{name}: there is no such program to run. Type its path, or leave "
            "--no_python out for a Python script",
        )


def check_script(name: str) -> None:
    """See that Python finds, on this node, the script that it is to run.

    Not a module: nothing but importing what it is in would tell. Not where the workers
    have another Python, which may see other files, in a container for example.

    Args:
        name: As typed: a file, or a folder or an archive with ``__main__.py``.

    Raises:
        LaunchError: It does not.
    """
    if name.startswith("-") or os.environ.get("PYTHON_EXEC"):
        return  # an option of Python, or standard input
    problem = _problem_of_script(Path(name))
    if problem:
        raise LaunchError(
            "HPC150",
            f"{name} cannot be run: {problem}. Type the script's path as it is on "
            "every node; a module takes -m, a program --no_python",
        )


def _problem_of_script(path: Path) -> str:
    """Say why Python cannot run a script; an empty text if it may."""
    where = ""
    try:
        if not path.is_absolute():
            where = f" in {Path.cwd()}"
        path.stat()
        if path.is_dir():
            entries = any(entry.name.startswith("__main__") for entry in path.iterdir())
            return "" if entries else "a folder without __main__.py"
    except OSError as error:
        return f"{error.strerror}{where}"
    return "" if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
