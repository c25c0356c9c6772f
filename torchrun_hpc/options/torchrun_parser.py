"""The installed torchrun's parser plus the ``--hpc-*`` group."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import run as torch_run

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import command_line
from torchrun_hpc.options.arguments import (
    OURS,
    SCRIPT,
    SCRIPT_ARGS,
    by_variable,
    names_of,
    with_ours,
    wrong_line,
)
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added; refuse wrong flags.

    Of its own options, torch reads the variables from ``os.environ``.
    """
    torchrun = with_ours(torch_run.get_args_parser, environ)
    names, known = names_of("print_completion"), torchrun._option_string_actions
    if names[0] not in known:
        torchrun.add_argument(
            *names,
            default=argparse.SUPPRESS,
            choices=("bash", "zsh", "tcsh"),
            metavar="SHELL",
            help="Print SHELL's completion of all options, and end. Needs shtab.",
        )
    # Torch 2.14 and newer complete the name torchrun.
    shells = known[names[0]].choices
    ours = _PrintCompletion(names, "print_completion", choices=shells)
    known.update(dict.fromkeys(names, ours))
    return torchrun


class _PrintCompletion(argparse.Action):
    """Prints a shell's completion of the program ``torchrun_hpc``."""

    def __call__(self, parser: Any, *arguments: Any) -> NoReturn:
        try:
            import shtab  # noqa: PLC0415 - optional
        except ImportError:
            text = "--print-completion needs shtab. Install it: pip install shtab"
            raise LaunchError("HPC246", text, everywhere=True) from None
        for action in (each for each in parser._actions if each.nargs != 0):
            action.complete = shtab.FILE  # most values without choices are files
        text = shtab.complete(parser, arguments[1])
        parser._print_message(f"{text}\n", sys.stdout)
        sys.exit(0)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse a command line, without the program's name; it ends if it asks for help."""
    torchrun = parser(environ)
    own, script_args = command_line.split(torchrun, argv)
    args = torchrun.parse_args(own)
    setattr(args, SCRIPT_ARGS, list(script_args))
    return args


def explicit(
    args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the options that the user set, each with the option or variable."""
    torchrun = parser(environ)
    own, _ = command_line.split(torchrun, argv)
    return command_line.explicit(torchrun, own, args, environ)


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the arguments that are set, of a program that parses its own.

    Arguments at torchrun's defaults are ours to fill in. So is the node rank: 0 is the
    default, so it would count as set on all nodes but the first.
    """
    torchrun = parser(environ)
    kinds: dict[str, Any] = {a.dest: a.type or str for a in torchrun._actions}
    defaults = vars(torchrun.parse_args(["script"]))
    found = by_variable(defaults, environ)
    for dest, default in defaults.items():
        value = getattr(args, dest, None)
        if value in ("", None, default) or dest in ("node_rank", SCRIPT, SCRIPT_ARGS):
            continue
        try:
            # Accelerate's port is text. Others set the number of nodes as a number.
            if isinstance(value, str) or (kinds[dest] is str and type(value) is int):
                value = kinds[dest](value)
        except ValueError as error:
            raise wrong_line(f"--{dest}={value}: {error}. Correct it") from None
        found[dest] = Setting(value, f"--{dest}")
    return found


def plain_command(
    args: argparse.Namespace,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
) -> list[str]:
    """Return the line for plain torchrun: the options without ours, and the script."""
    words = ["torchrun"]
    for dest in vars(parser(environ).parse_args(["script"])):
        if dest not in settings or dest in OURS:
            continue
        value = settings[dest].value
        if isinstance(value, list):  # torch reads some as lists
            value = ",".join(str(part).replace(",", ",,") for part in value)
        if not isinstance(value, bool):
            words.append(f"--{dest}={value}")
        elif value:
            words.append(f"--{dest}")
    script = [args.training_script, *getattr(args, SCRIPT_ARGS)]
    # argparse would take these for its own options.
    if script[0][:1] == "-" or script[1:2] == ["--"]:
        words.append("--")
    return [*words, *script]
