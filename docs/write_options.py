"""Write options.md from the parser and the meanings below."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torchrun_hpc.options import arguments, torchrun_parser

FILE = Path(__file__).with_name("options.md")

HEAD = """# Options

<!-- Written by docs/write_options.py from the parser. Do not edit. -->

Every option of torchrun works, in both spellings (`--nproc-per-node` and
`--nproc_per_node`). The installed PyTorch provides the parser: this page shows PyTorch
2.13. Options come before the script. Words after its name are the script's.

A value comes from the command line, otherwise from the variable, otherwise from the
site file. Otherwise it is derived.

## Options of torchrun_hpc

| option | meaning | variable |
|---|---|---|
"""

TORCH = """
## Options of torchrun

The defaults are torchrun's. In a job with several nodes, most of them are
[derived](internals.md) instead.

| option | meaning | variable | default |
|---|---|---|---|
"""

# What torchrun's options mean, from torch/distributed/run.py of PyTorch 2.13.
MEANINGS = {
    "help": "Print the options and exit.",
    "nnodes": "Number of nodes, or a range `MIN:MAX`. In a job: the step's nodes.",
    "nproc_per_node": "Workers per node: a number, `gpu`, `xpu`, `cpu` or `auto`.",
    "rdzv_backend": "How the nodes meet: `c10d`, `static`, `etcd` and others. "
    "See also `--hpc-rendezvous`.",
    "rdzv_endpoint": "Meeting point of the nodes: `HOST:PORT`. In a job: head node.",
    "rdzv_id": "Name of the launch, the same on all nodes. In a job: the launch id.",
    "rdzv_conf": "Settings of the rendezvous: `join_timeout=900,read_timeout=600`.",
    "standalone": "Start one world on this node, on a free port.",
    "max_restarts": "How often all workers may restart before the job fails.",
    "monitor_interval": "Seconds between two checks of the workers.",
    "start_method": "How Python's multiprocessing starts workers that are functions.",
    "event_log_handler": "Handler of PyTorch's elastic events.",
    "role": "Name of the workers' role, for logs.",
    "module": "Run the script as a module, like `python -m`.",
    "no_python": "Run the script as a program, without Python.",
    "run_path": "Run the script with `runpy.run_path` in the worker's interpreter.",
    "log_dir": "Folder for log files. Each launch gets its own subfolder.",
    "redirects": "Write streams to log files: 1 is stdout, 2 stderr, 3 both; "
    "`0:1,1:2` by local rank.",
    "tee": "Write streams to log files and to the console, in the same form.",
    "local_ranks_filter": "Show only these local ranks on the console: `0,1`.",
    "duplicate_stdout_filters": "Copy lines of stdout with these words to a file.",
    "duplicate_stderr_filters": "Copy lines of stderr with these words to a file.",
    "node_rank": "Rank of this node, for the static rendezvous.",
    "master_addr": "Host of rank 0, for the static rendezvous.",
    "master_port": "Port of rank 0, for the static rendezvous.",
    "local_addr": "Address of this node, as the other nodes know it.",
    "logs_specs": "Entry point of a package that handles the logs.",
    "numa_binding": "Bind workers near their GPUs: `node`, `socket`, `exclusive` or "
    "`core-complex`. Needs `numactl`; see also `--hpc-bind`.",
    "signals_to_handle": "Signals that end the job.",
    "shutdown_timeout": "Seconds before workers that were told to end are killed "
    "(PyTorch's default: 30).",
    "virtual_local_rank": "Set `LOCAL_RANK` to 0, and show each worker its own GPU.",
}


def text() -> str:
    """Return the whole page."""
    parser = torchrun_parser.parser(os.environ)
    lines = {True: "", False: ""}
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            lines[action.dest.startswith("hpc_")] += _row(action)
    return HEAD + lines[True] + TORCH + lines[False]


def _spelling(action: argparse.Action) -> str:
    """Return the options with dashes; each also has a form with underscores."""
    names = [name for name in action.option_strings if "_" not in name]
    value = "" if action.nargs == 0 else f" {action.metavar or 'VALUE'}"
    shown = (f"`{name}{value}`" for name in names or action.option_strings)
    return ", ".join(shown).replace("|", r"\|")


def _variable(action: argparse.Action) -> str:
    dest = action.dest
    has_none = dest == "help" or dest in arguments.WITHOUT_VARIABLE
    return "" if has_none else f"`{arguments.variable_of(dest)}`"


def _row(action: argparse.Action) -> str:
    if action.dest.startswith("hpc_"):
        meaning = (action.help or "").replace("|", r"\|")
        return f"| {_spelling(action)} | {meaning} | {_variable(action)} |\n"
    none = action.default is None or str(action.default) in {"", argparse.SUPPRESS}
    shown = "" if none or action.nargs == 0 else f"`{action.default}`"
    meaning = MEANINGS[action.dest]
    return f"| {_spelling(action)} | {meaning} | {_variable(action)} | {shown} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
