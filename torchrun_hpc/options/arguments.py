"""Options as argparse takes them: torchrun's, and our own group, ``--hpc-*``.

Each option has a variable by torchrun's own rule: ``--hpc-site`` is ``PET_HPC_SITE``.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.options.values import DRY_RUN
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

PROGRAM = "torchrun_hpc"

# All options of torchrun 2.0 to 2.15 (torch/distributed/run.py) by their names in the
# parsed arguments, with the type of their values. A bool is a flag, without a value.
TORCHRUN: dict[str, type] = {
    **dict.fromkeys(("nnodes", "nproc_per_node", "role"), str),
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), str),
    **dict.fromkeys(("standalone", "module", "no_python", "run_path"), bool),
    **dict.fromkeys(("max_restarts", "node_rank", "master_port"), int),
    "monitor_interval": float,
    "start_method": str,
    **dict.fromkeys(("master_addr", "local_addr", "log_dir", "redirects", "tee"), str),
    **dict.fromkeys(("local_ranks_filter", "logs_specs"), str),  # since 2.3
    "event_log_handler": str,  # since 2.8
    "numa_binding": str,  # since 2.9
    "virtual_local_rank": bool,  # since 2.10, as the next three
    "signals_to_handle": str,
    **dict.fromkeys(("duplicate_stdout_filters", "duplicate_stderr_filters"), str),
    "shutdown_timeout": int,  # since 2.12
    "log_line_prefix_template": str,  # since 2.14
    "print_completion": str,  # since 2.14
}
WITHOUT_VARIABLE = ("logs_specs", "numa_binding", "print_completion")
_SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}

# Those of which the variable counts in a script that calls setup_environment().
_OF_SETUP = ("hpc_site", "hpc_omp_threads", "hpc_bind")

_OURS = tuple(each for each in fields(Options) if "help" in each.metadata)
OURS = (*(each.name for each in _OURS), "hpc_dry_run")

# Bytes of --rdzv-id: torch names a folder by it, with nine more, and 255 are allowed.
LONGEST_ID = 246


def names_of(dest: str) -> tuple[str, ...]:
    """Return the spellings of an option: short, with dashes, with underscores."""
    short = (_SHORT[dest],) if dest in _SHORT else ()
    return (*short, *dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}")))


def of_setup(environ: Mapping[str, str]) -> Options:
    """Return the options that a script has that calls ``setup_environment()``."""
    variables = {dest: variable_of(dest) for dest in _OF_SETUP}
    return read(
        {
            dest: Setting(environ[name], name)
            for dest, name in variables.items()
            if environ.get(name)
        }
    )


def variable_of(dest: str) -> str:
    """Return the variable of an option, by torchrun's rule."""
    return f"PET_{dest.upper()}"


def default_of(dest: str, kind: type, environ: Mapping[str, str]) -> Any:
    """Return the default of an option, which its variable has; of a flag, 1 or 0.

    Raises:
        ValueError: The variable of a flag is not a number.
    """
    text = environ.get(variable_of(dest)) or None
    return bool(int(text or 0)) if kind is bool else text


def add_ours(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str],
    action: type[argparse.Action] | None = None,
) -> None:
    """Add our group to a parser. The default of an option is in its variable.

    Args:
        parser: torchrun's, or another one for its command line.
        environ: Environment of this process.
        action: What the parser does with an option, if not store its value; a flag
            has a constant.

    Raises:
        ValueError: The variable of a flag is not a number.
    """
    group = parser.add_argument_group("clusters", "Added to torchrun by torchrun_hpc.")
    for each in _OURS:
        metavar = each.metadata["metavar"]
        value: dict[str, Any] = {"type": str, "metavar": metavar}
        group.add_argument(
            *names_of(each.name),
            action=action or ("store" if metavar else "store_const"),
            default=default_of(each.name, str if metavar else bool, environ),
            help=each.metadata["help"],
            **(value if metavar else {"const": True}),
        )
    by_variable = default_of("hpc_dry_run", str, environ)
    names = names_of("hpc_dry_run")
    for form, text in DRY_RUN.items():
        group.add_argument(
            *(names if form == "table" else ()),
            *(f"{name}={form}" for name in names),
            dest="hpc_dry_run",
            action=action or "store_const",
            const=form,
            default={"0": None, "1": "table"}.get(by_variable, by_variable),
            help=text,
        )


def names_folder(run_id: str) -> bool:
    """Say whether torch can name its folder for logs by an id."""
    return "/" not in run_id and len(os.fsencode(run_id)) <= LONGEST_ID


def wrong_line(message: str) -> LaunchError:
    """Return the refusal of a command line."""
    text = f"{message}. --help lists all options"
    return LaunchError("HPC010", text, everywhere=True)


def wrong_variable(error: ValueError, environ: Mapping[str, str]) -> LaunchError:
    """Return the refusal of the variable of a flag."""
    flags = ", ".join(f"{k}={v}" for k, v in environ.items() if k.startswith("PET_"))
    return LaunchError(
        "HPC011",
        f"a PET_* variable cannot be read ({error}): {flags}. Flags such as "
        "PET_STANDALONE are 1 or 0",
        everywhere=True,
    )
