"""Write options.md from the parser and the meanings below."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchrun_hpc.options import command_line, torchrun_parser

FILE = Path(__file__).with_name("options.md")

HEAD = """# Options

<!-- Written by docs/write_options.py from the parser. Do not edit. -->

Every option of torchrun works, with dashes or underscores: `--nproc-per-node` or
`--nproc_per_node`. The installed PyTorch decides which options of torchrun exist. This
page shows the options of PyTorch 2.13. Pass all options before the script's name. All
words after this name are the script's arguments.

The command line has priority over the variable, and the variable over the site file.
If none of these sets a value, torchrun_hpc derives it.

## Options of torchrun_hpc

| option | meaning | variable |
|---|---|---|
"""

TORCH = """
## Options of torchrun

The defaults are torchrun's. In a job with several nodes, torchrun_hpc
[derives](internals.md) most values instead.

| option | meaning | variable | default |
|---|---|---|---|
"""

# What torchrun's options mean, from torch/distributed/run.py of PyTorch 2.13.
MEANINGS = {
    "help": "Print the options and exit.",
    "nnodes": "Start on this many nodes, or on a range `MIN:MAX`. In a job, the "
    "default is the step's number of nodes.",
    "nproc_per_node": "Start this many workers per node. `gpu`, `xpu`, `cpu` and "
    "`auto` start one worker per device.",
    "rdzv_backend": "Choose how the nodes meet: `c10d`, `static`, `etcd` and others. "
    "See also `--hpc-rendezvous`.",
    "rdzv_endpoint": "Let the nodes meet at this `HOST:PORT`. In a job, the default "
    "is a port of the head node.",
    "rdzv_id": "Set the launch's name, which must be the same on all nodes. In a job, "
    "the default is the launch id.",
    "rdzv_conf": "Set the limits of the rendezvous, such as "
    "`join_timeout=900,read_timeout=600`.",
    "standalone": "Start a job on this node alone, with its rendezvous on a free port.",
    "max_restarts": "Restart all workers at most this many times.",
    "monitor_interval": "Check the workers at intervals of this many seconds.",
    "start_method": "Choose how Python's multiprocessing starts workers that are "
    "functions.",
    "event_log_handler": "Send PyTorch's elastic events to this handler.",
    "role": "Give the workers this role in logs.",
    "module": "Run the script as a module, like `python -m`.",
    "no_python": "Run the script as a program, without Python.",
    "run_path": "Run the script with `runpy.run_path` in the worker's interpreter.",
    "log_dir": "Write log files into this folder. Each launch gets its own subfolder.",
    "redirects": "Write streams to log files: 1 is stdout, 2 is stderr, 3 is both. "
    "`0:1,1:2` sets them by local rank.",
    "tee": "Write streams to log files and to the console. The values are those of "
    "`--redirects`.",
    "local_ranks_filter": "Show only these local ranks on the console: `0,1`.",
    "duplicate_stdout_filters": "Copy stdout lines with any of these words to a file.",
    "duplicate_stderr_filters": "Copy stderr lines with any of these words to a file.",
    "node_rank": "Set this node's node rank in the static rendezvous.",
    "master_addr": "In the static rendezvous, meet at this host, the head node.",
    "master_port": "In the static rendezvous, meet at this port of the head node.",
    "local_addr": "Set the address at which the other nodes reach this node.",
    "logs_specs": "Let the package that provides this entry point handle the logs.",
    "numa_binding": "Bind workers to CPUs near their GPUs: `node`, `socket`, "
    "`exclusive` or `core-complex`. This needs `numactl`. See also `--hpc-bind`.",
    "signals_to_handle": "End the job when one of these signals arrives.",
    "shutdown_timeout": "Kill workers that do not end within this many seconds "
    "(PyTorch's default: 30).",
    "virtual_local_rank": "Set `LOCAL_RANK` to 0, and show each worker its own GPU.",
}


def text() -> str:
    """Return the whole page."""
    parser = torchrun_parser.parser(os.environ)
    lines = {True: "", False: ""}
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            lines[_is_ours(action)] += _row(action)
    return HEAD + lines[True] + TORCH + lines[False]


def _is_ours(action: argparse.Action) -> bool:
    return action.dest.startswith("hpc_") or action.dest in (
        "version",
        "print_completion",
    )


def _spelling(action: argparse.Action) -> str:
    """Return the options with dashes; each also has a form with underscores."""
    names = [name for name in action.option_strings if "_" not in name]
    value = "" if action.nargs == 0 else f" {action.metavar or 'VALUE'}"
    shown = (f"`{name}{value}`" for name in names or action.option_strings)
    return ", ".join(shown).replace("|", r"\|")


def _variable(action: argparse.Action) -> str:
    dest = action.dest
    has_none = (
        dest in {"help", argparse.SUPPRESS} or dest in command_line.WITHOUT_VARIABLE
    )
    return "" if has_none else f"`{command_line.variable_of(dest)}`"


def _row(action: argparse.Action) -> str:
    if _is_ours(action):
        meaning = (action.help or "").replace("|", r"\|")
        return f"| {_spelling(action)} | {meaning} | {_variable(action)} |\n"
    none = action.default is None or str(action.default) in {"", argparse.SUPPRESS}
    shown = "" if none or action.nargs == 0 else f"`{action.default}`"
    meaning = MEANINGS[action.dest]
    return f"| {_spelling(action)} | {meaning} | {_variable(action)} | {shown} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
