"""The options of torchrun, and our own: the ``--hpc-*`` group.

Each option has a variable by torchrun's own rule: ``--hpc-site`` is ``PET_HPC_SITE``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError
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

WITHOUT_PATCHES = "hpc_without_patches"

# Ours but --hpc-dry-run: how the value is written in the help, None for a flag; and the
# help.
_OURS = {
    "hpc_site": (
        "NAME|FILE|none",
        (
            "Computing centre whose rules for host names and variables to use, or a "
            "file with them, or 'none'. By default it is recognised by the "
            "environment. python -m torchrun_hpc.sites lists them."
        ),
    ),
    "hpc_omp_threads": (
        "auto|NUMBER",
        (
            "OMP_NUM_THREADS of each worker where it is not set; 'auto' divides the "
            "CPUs of this process by the workers, or follows --hpc-bind. By default 1, "
            "as torchrun does."
        ),
    ),
    "hpc_bind": (
        "gpu|even|none",
        (
            "Divide the CPUs that this node has for the job among its workers: 'gpu' "
            "gives each those near its GPU, 'even' as many as the others. By default "
            "the site's, or none."
        ),
    ),
    "hpc_rendezvous": (
        "auto|scheduler|c10d",
        (
            "How the nodes of a job meet where torchrun would use c10d: 'scheduler' "
            "by the ranks that the scheduler gave them, 'c10d' as torch does. By "
            "default 'auto': the first if the number of nodes is fixed."
        ),
    ),
    "hpc_preload": (
        "MODULE[,MODULE]|none",
        (
            "Modules that each node imports once, for all of its workers: 'torch'. A "
            "worker is a fork then, and starts much faster. By default the site's, "
            "or none."
        ),
    ),
    "hpc_stall_report": (
        "SECONDS",
        (
            "When all workers of the job have shown the same stacks for so long, print "
            "what they are doing, once; nothing is ended. Off by default; needs "
            "py-spy: pip install 'torchrun_hpc[stacks]'."
        ),
    ),
    "hpc_spares": (
        "NUMBER",
        (
            "How many of the nodes wait, to take the place of one that is lost; the "
            "world has as many fewer. Needs --no-kill of sbatch and srun, "
            "--kill-on-bad-exit=0 and --wait=0 of srun, and --max-restarts. By default "
            "0."
        ),
    ),
    "hpc_spare_after": (
        "SECONDS",
        ("When a spare takes the place of a node that has not come. By default 60."),
    ),
    "hpc_health_check": (
        "COMMAND",
        (
            "A shell command that each node runs before its workers start, also after "
            "a restart; where it fails, a spare takes the node's place."
        ),
    ),
    "hpc_health_check_timeout": (
        "SECONDS",
        "How long it may take; longer is a failure. By default 60.",
    ),
    "hpc_outcome": (
        "FILE",
        (
            "Write how the job ended into a file, as JSON: done, the script failed, or "
            "nodes failed, and which ones."
        ),
    ),
    WITHOUT_PATCHES: (
        "NAME[,NAME]",
        (
            "Changes inside torch to leave out, by their names in docs/patches.md; the "
            "same on all nodes. By default none."
        ),
    ),
    "hpc_debug": (
        None,
        (
            "Log what torch and the launcher do, on every node, with host name and "
            "rank before each line."
        ),
    ),
}
# Not an option with a value: that would take the script for it.
DRY_RUN = {
    "table": "Start nothing: meet the other nodes, and print on node 0 what would be "
    "done, value by value with its source, and the same with plain torchrun.",
    "json": "The same for machines.",
}

# Those of which the variable counts in a script that calls setup_environment().
_OF_SETUP = ("hpc_site", "hpc_omp_threads", "hpc_bind")

OURS = (*_OURS, "hpc_dry_run")

# Bytes of --rdzv-id: torch names a folder by it, with nine more, and 255 are allowed.
LONGEST_ID = 246


def names_of(dest: str) -> tuple[str, ...]:
    """Return the spellings of an option: short, with dashes, with underscores."""
    short = (_SHORT[dest],) if dest in _SHORT else ()
    return (*short, *dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}")))


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names in a list with commas, such as that of `WITHOUT_PATCHES`."""
    names = (name.strip() for name in (text or "").split(","))
    return tuple(name for name in names if name)


def options_of_setup(environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the options that a script has that calls ``setup_environment()``."""
    variables = {dest: variable_of(dest) for dest in _OF_SETUP}
    return {
        dest: Setting(environ[name], name)
        for dest, name in variables.items()
        if environ.get(name)
    }


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
    for dest, (metavar, text) in _OURS.items():
        value: dict[str, Any] = {"type": str, "metavar": metavar}
        group.add_argument(
            *names_of(dest),
            action=action or ("store" if metavar else "store_const"),
            default=default_of(dest, str if metavar else bool, environ),
            help=text,
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
