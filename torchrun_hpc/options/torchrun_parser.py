"""The command line: torch's own parser plus the ``--hpc-*`` group.

The parser is that of the installed torch, so that every option, spelling, default and
``PET_*`` variable is what torchrun has. What was typed is found by parsing once more
with every default removed, never by looking at the text.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import run as torch_run
from torch.distributed.argparse_util import check_env, env

from torchrun_hpc.options import arguments
from torchrun_hpc.options.command_line import SCRIPT_ARGS, split
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OURS = "hpc_"


def reads_variable(action: argparse.Action) -> bool:
    """Say whether a variable can set an option."""
    return isinstance(action, env | check_env) or action.dest.startswith(_OURS)


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added.

    Args:
        environ: Environment of this process. Of its own options, torch reads the
            variables from ``os.environ``.

    Raises:
        LaunchError: A ``PET_*`` variable of a flag is not a number: torch reads it
            while it makes the parser.
    """
    try:
        torchrun = torch_run.get_args_parser()
        arguments.add_ours(torchrun, environ)
    except ValueError as error:
        raise arguments.wrong_variable(error, environ) from None
    # --h was an abbreviation of --help before there were two options with an h.
    torchrun.add_argument("--h", action="help", help=argparse.SUPPRESS)
    torchrun.prog = arguments.PROGRAM
    torchrun.error = _refuse  # type: ignore[method-assign]
    return torchrun


def _refuse(message: str) -> NoReturn:
    raise arguments.wrong_line(message)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse a command line, which has no name of a program in front.

    Raises:
        LaunchError: The command line is wrong, or a ``PET_*`` variable cannot be read.
        SystemExit: The command line asks for help (0).
    """
    torchrun = parser(environ)
    own, script_args = split(torchrun, argv)
    args = torchrun.parse_args(own)
    for dest, value in vars(args).items():
        if dest.startswith(_OURS) and isinstance(value, list):
            _refuse(f"{dest} has no value")  # of --hpc-site=-- Python makes a list
    setattr(args, SCRIPT_ARGS, list(script_args))
    return args


def explicit(
    args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the options that the user set, each with the option or variable.

    Args:
        args: What ``argv`` was parsed to.
        argv: Arguments, without the program's name.
        environ: Environment of this process.
    """
    torchrun = parser(environ)
    found = _by_variable(torchrun, args, environ)
    for action in _options_of(torchrun):
        action.default = argparse.SUPPRESS
    bare = vars(torchrun.parse_args(split(torchrun, argv)[0]))
    for action in _options_of(torchrun):
        if action.dest in bare:
            setting = Setting(bare[action.dest], action.option_strings[-1])
            found[action.dest] = setting
    return {name: setting for name, setting in found.items() if setting.value != ""}


def add_ours(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Add our options, as variables set them, to those of a program's own parser."""
    for dest, value in vars(parser(environ).parse_args(["script"])).items():
        if dest.startswith(_OURS) and not hasattr(args, dest):
            setattr(args, dest, value)


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the arguments that are set, of a program that parses its own.

    What it left at torchrun's defaults is ours to fill in. The rank of the node is
    left out: 0 is the default, so it would count as set on all nodes but the first.
    """
    torchrun = parser(environ)
    defaults = vars(torchrun.parse_args(["script"]))
    return _by_variable(torchrun, args, environ) | {
        action.dest: Setting(_read(action, args), action.option_strings[-1])
        for action in _options_of(torchrun)
        if action.dest != "node_rank"
        and getattr(args, action.dest, "")
        not in ("", None, defaults.get(action.dest, ""))
    }


def _read(action: argparse.Action, args: argparse.Namespace) -> Any:
    """Read what a program has left as text, as Accelerate does with its port."""
    value = getattr(args, action.dest)
    if isinstance(value, str) and callable(action.type):
        try:
            return action.type(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            _refuse(f"{action.option_strings[-1]}={value}: {error}")
    return value


def plain_command(
    args: argparse.Namespace,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
) -> list[str]:
    """Write a command line of torchrun: these options without ours, and the script."""
    words = ["torchrun"]
    for action in _options_of(parser(environ)):
        if action.dest not in settings or action.dest.startswith(_OURS):
            continue
        value = settings[action.dest].value
        if isinstance(value, list):  # torch reads some as lists
            value = ",".join(str(part).replace(",", ",,") for part in value)
        if action.nargs != 0:
            words.append(f"{action.option_strings[-1]}={value}")
        elif value:
            words.append(action.option_strings[-1])
    script = [args.training_script, *getattr(args, SCRIPT_ARGS)]
    # argparse would take these for its own.
    if script[0][:1] == "-" or script[1:2] == ["--"]:
        words.append("--")
    return [*words, *script]


def _options_of(torchrun: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in torchrun._actions if action.option_strings]


def _by_variable(
    torchrun: argparse.ArgumentParser,
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Setting]:
    """Return the options set by ``PET_*`` variables, but ours that these switch off."""
    found = {}
    for action in _options_of(torchrun):
        variable = arguments.variable_of(action.dest)
        if reads_variable(action) and environ.get(variable):
            value = getattr(args, action.dest, environ[variable])
            if value or not action.dest.startswith(_OURS):
                found[action.dest] = Setting(value, variable)
    return found
