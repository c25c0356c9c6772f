"""Write options.md from the parser: ``python docs/write_options.py``."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path

from torchrun_hpc.options import arguments, torchrun_parser

FILE = Path(__file__).with_name("options.md")

HEAD = """# Options

<!-- Written by docs/write_options.py from the parser. Do not edit. -->

All options of torchrun, in both spellings (`--nproc-per-node`, `--nproc_per_node`), and
those that begin with `--hpc-`. The parser is that of the installed torch, so another
release may have others; these are torch 2.13's. An option is taken from the command
line, otherwise from its variable, otherwise derived. Only what is in front of the
script is read; everything behind it is the script's.

## Added by torchrun_hpc

"""

TORCH = """
## torchrun's own

What they mean is in torchrun's documentation, and in `--help`. The defaults are
torchrun's; in a job of several nodes most of them are [derived](plan.md) instead.

| option | variable | default |
|---|---|---|
"""


def text() -> str:
    """Return the whole page."""
    parser = torchrun_parser.parser(os.environ)
    lines = {True: "", False: ""}
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            ours = action.dest.startswith("hpc_")
            lines[ours] += _described(action) if ours else _row(action)
    return HEAD + lines[True].rstrip("\n") + "\n" + TORCH + lines[False]


def _spelling(action: argparse.Action) -> str:
    """Return the options with dashes; each is there with underscores, too."""
    names = [name for name in action.option_strings if "_" not in name]
    value = "" if action.nargs == 0 else f" {action.metavar or 'VALUE'}"
    return ", ".join(f"`{name}{value}`" for name in names or action.option_strings)


def _variable(action: argparse.Action) -> str:
    dest = action.dest
    has_none = dest == "help" or dest in arguments.WITHOUT_VARIABLE
    return "" if has_none else f"`{arguments.variable_of(dest)}`"


def _described(action: argparse.Action) -> str:
    paragraph = textwrap.fill(action.help or "", 88, break_on_hyphens=False)
    return f"### {_spelling(action)}\n\n{paragraph}\nVariable: {_variable(action)}.\n\n"


def _row(action: argparse.Action) -> str:
    none = action.default is None or str(action.default) in {"", argparse.SUPPRESS}
    shown = "" if none or action.nargs == 0 else f"`{action.default}`"
    return f"| {_spelling(action)} | {_variable(action)} | {shown} |\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
