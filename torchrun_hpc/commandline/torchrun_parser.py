"""The command line: torch's own parser plus the ``--hpc-*`` group.

The parser is that of the installed torch, so that every option, spelling, default and
``PET_*`` variable is what torchrun has. What was typed is found by parsing once more
with every default removed, never by looking at the text.
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import run as torch_run
from torch.distributed.argparse_util import check_env, env

from torchrun_hpc.commandline import options as hpc_options
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT_ARGS = "training_script_args"

_OURS = "hpc_"

# The kinds of options that a variable can set.
BY_VARIABLE = (env, check_env, hpc_options.OrVariable)

# Words in front of the script. Trying more would take seconds on a wrong line with
# thousands of arguments, and no right line has as many.
_LONGEST = 256


class _Incomplete(Exception):  # noqa: N818 - never leaves this module
    """Not a whole command line yet, or a wrong one."""


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added.

    Raises:
        LaunchError: A ``PET_*`` variable of a flag is not a number: torch reads it
            while it makes the parser.
    """
    try:
        made = torch_run.get_args_parser()
        hpc_options.add_ours(made)
    except ValueError as error:
        hpc_options.wrong_variable(error)
    # --h was an abbreviation of --help before there were two options with an h.
    made.add_argument("--h", action="help", help=argparse.SUPPRESS)
    made.prog = hpc_options.PROGRAM
    made.error = hpc_options.wrong_line  # type: ignore[method-assign]
    return made


def parse(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[argparse.Namespace, dict[str, Setting]]:
    """Parse a command line.

    Args:
        argv: Arguments, without the program's name.
        environ: Environment of this process.

    Returns:
        The arguments as torch.distributed.run takes them, and of these the ones that
        the user set, each with the option or the variable that set it.

    Raises:
        LaunchError: The command line is wrong, or a ``PET_*`` variable cannot be read.
        SystemExit: The command line asks for help (0).
    """
    made = parser()
    own, script_args = _split(made, argv)
    args = made.parse_args(own)
    for dest, value in vars(args).items():
        if dest.startswith(_OURS) and isinstance(value, list):
            hpc_options.wrong_line(
                f"{dest} has no value"
            )  # of --hpc-site=-- Python makes a list
    setattr(args, SCRIPT_ARGS, _script_args(script_args, own))
    bare = hpc_options.without_defaults(parser())
    options = hpc_options.options_of(bare)
    bare_args = vars(bare.parse_args(own))
    explicit = _by_variable(options, args, environ) | {
        action.dest: Setting(bare_args[action.dest], action.option_strings[-1])
        for action in options
        if action.dest in bare_args
    }
    return args, {
        dest: option for dest, option in explicit.items() if option.value != ""
    }


def add_ours(args: argparse.Namespace) -> None:
    """Add our options, as variables set them, to those of a program's own parser."""
    for dest, value in vars(parser().parse_args(["script"])).items():
        if dest.startswith(_OURS) and not hasattr(args, dest):
            setattr(args, dest, value)


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the arguments that are set, of a program that parses its own.

    What it left at torchrun's defaults is ours to fill in. The rank of the node is
    left out: 0 is the default, so it would count as set on all nodes but the first.
    """
    made = parser()
    options = hpc_options.options_of(made)
    defaults = vars(made.parse_args(["script"]))
    return _by_variable(options, args, environ) | {
        action.dest: Setting(_read(action, args), action.option_strings[-1])
        for action in options
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
            hpc_options.wrong_line(f"{action.option_strings[-1]}={value}: {error}")
    return value


def plain_command(
    args: argparse.Namespace, options: Mapping[str, Setting]
) -> list[str]:
    """Write a command line of torchrun itself.

    Args:
        args: Has the script and its arguments.
        options: The options to write; ours are left out.
    """
    words = ["torchrun"]
    for action in hpc_options.options_of(parser()):
        option = options.get(action.dest)
        if option is None or action.dest.startswith(_OURS):
            continue
        if action.nargs != 0:
            words.append(f"{action.option_strings[-1]}={_written(option.value)}")
        elif option.value:
            words.append(action.option_strings[-1])
    script = [args.training_script, *getattr(args, SCRIPT_ARGS)]
    # argparse would take these for its own.
    if script[0][:1] == "-" or script[1:2] == ["--"]:
        words.append("--")
    return [*words, *script]


def _written(value: Any) -> str:
    """Write a value as it is typed; torch reads some as lists."""
    if isinstance(value, list):
        return ",".join(str(part).replace(",", ",,") for part in value)
    return str(value)


def _by_variable(
    options: Sequence[argparse.Action],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Setting]:
    """Return the options that a ``PET_*`` variable set."""
    found = {}
    for action in options:
        variable = f"PET_{action.dest.upper()}"
        if isinstance(action, env | check_env | hpc_options.OrVariable) and environ.get(
            variable
        ):
            value = getattr(args, action.dest, environ[variable])
            found[action.dest] = Setting(value, variable)
    return found


def _split(
    made: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line behind the script: the shortest part that parses.

    The script's own arguments are not ours to look at: argparse would find ambiguous
    abbreviations among them.
    """
    quiet = copy.copy(made)

    def fail(message: str) -> NoReturn:
        raise _Incomplete(message)

    quiet.error = fail  # type: ignore[method-assign]
    for end in range(1, min(len(argv), _LONGEST) + 1):
        try:
            quiet.parse_args(argv[:end])
        except _Incomplete:
            continue
        return argv[:end], argv[end:]
    return argv, ()


def _script_args(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """Treat ``--`` among the script's arguments as argparse does."""
    neutral = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    neutral.add_argument("script")
    neutral.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    before = ["--"] if "--" in own else []
    return list(getattr(neutral.parse_args([*before, "script", *words]), SCRIPT_ARGS))
