"""The command line, parsed without torch.

The parser knows the options of all releases of torchrun, and reads them as torchrun's
own does, with the same library. Which of them the installed release has, and which
values it takes, is for that one to say, where there is a torch: `torchrun_parser`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import arguments
from torchrun_hpc.options.arguments import wrong_line
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT, SCRIPT_ARGS = "training_script", "training_script_args"

# Words in front of the script. Trying more would take seconds on a wrong line with
# thousands of arguments, and no right line has as many.
_LONGEST = 256


@dataclass(frozen=True)
class CommandLine:
    """What the user asks for.

    Attributes:
        options: The options that are set. An empty value, or 0 in the variable of a
            flag, counts as not set.
        script: The script, the module or the program; empty if there is none.
        arguments: Those of the script.
        unknown: Words in front of the script that are an option of no known release.
            If one takes a value, that value is mistaken for the script.
        wants_help: Whether torchrun is to print something and end. Then nothing else is
            known.
        problem: Why the command line cannot be parsed: a value is wrong or missing, an
            abbreviation has two meanings, or the variable of a flag is no number. Then
            nothing else is known.
    """

    options: Options = field(default_factory=Options)
    script: str = ""
    arguments: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    wants_help: bool = False
    problem: LaunchError | None = None


def parse(
    argv: Sequence[str], environ: Mapping[str, str], *, has_job: bool = True
) -> CommandLine:
    """Parse a command line, which has no name of a program in front.

    Args:
        argv: Arguments, without the program's name.
        environ: Environment of this process.
        has_job: As for `Options`.
    """
    try:
        parser = _parser(environ)
        own, script_args = split(parser, argv)
        args, others = parser.parse_known_args(own)
    except _HelpWanted:
        return CommandLine(wants_help=True)
    except LaunchError as problem:
        return CommandLine(problem=problem)
    found = vars(args)
    script = found.pop(SCRIPT, "")
    found.pop(SCRIPT_ARGS, None)
    settings = dict[str, Setting]()
    for dest, value in found.items():
        setting = Setting(value, arguments.variable_of(dest))
        if isinstance(value, _Typed):
            setting = Setting(value.value, f"--{dest}")
        if isinstance(setting.value, list):  # Python makes one of --hpc-site=--
            return CommandLine(problem=wrong_line(f"{dest} has no value"))
        if setting.value not in {None, ""} and setting.value is not False:
            settings[dest] = setting
    unknown = tuple(word for word in others if word != "--")
    options = read(settings, has_job=has_job)
    return CommandLine(options, script, tuple(script_args), unknown)


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line behind the script: the shortest part that has one.

    The script's own arguments are not ours to look at: argparse would find ambiguous
    abbreviations among them.

    Args:
        parser: Raises LaunchError where a command line is wrong.
        argv: Arguments, without the program's name.

    Returns:
        The words of the parser, and the arguments of the script as argparse reads them.
    """
    for end in range(1, min(len(argv), _LONGEST) + 1):
        try:
            args, _ = parser.parse_known_args(argv[:end])
        except LaunchError:
            continue  # not a whole command line yet, or a wrong one
        if hasattr(args, SCRIPT):
            return argv[:end], _script_args(argv[end:], argv[:end])
    return argv, ()


def _script_args(words: Sequence[str], own: Sequence[str]) -> list[str]:
    """Treat ``--`` among the script's arguments as argparse does."""
    if "--" not in words:
        return list(words)
    neutral = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    neutral.add_argument(SCRIPT)
    neutral.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    before = ["--"] if "--" in own else []
    return list(getattr(neutral.parse_args([*before, "script", *words]), SCRIPT_ARGS))


class _HelpWanted(Exception):  # noqa: N818 - never leaves this module
    """The parser of torchrun would print something, and end."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise wrong_line(message)


class _Typed(NamedTuple):
    """An option of the command line; of a variable, the parser has the plain value."""

    value: Any


class _Option(argparse.Action):
    """An option; without a value if it has a constant."""

    def __init__(self, const: Any = None, **kwargs: Any) -> None:
        super().__init__(nargs=None if const is None else 0, const=const, **kwargs)

    def __call__(
        self, _parser: Any, namespace: Any, values: Any, _spelling: Any = None
    ) -> None:
        value = values if self.const is None else self.const
        setattr(namespace, self.dest, _Typed(value))


class _Help(argparse.Action):
    def __call__(self, *_: Any) -> None:
        raise _HelpWanted


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser for the options of all releases of torchrun, and ours.

    Raises:
        LaunchError: The variable of a flag is not a number.
    """
    parser = _Parser(arguments.PROGRAM, add_help=False)
    group = parser.add_argument_group()  # of one, argparse tries no help texts
    # --h was an abbreviation of --help before there were two options with an h.
    group.add_argument("-h", "--help", "--h", action=_Help, nargs=0)
    try:
        for dest, kind in arguments.TORCHRUN.items():
            has_variable = dest not in arguments.WITHOUT_VARIABLE
            group.add_argument(
                *arguments.names_of(dest),
                action=_Help if dest == "print_completion" else _Option,
                const=kind is bool or None,
                type=kind,
                default=arguments.default_of(
                    dest, kind, environ if has_variable else {}
                ),
            )
        arguments.add_ours(parser, environ, _Option)
    except ValueError as error:
        raise arguments.wrong_variable(error, environ) from None
    script = group.add_argument(SCRIPT, default=argparse.SUPPRESS)
    rest = group.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    script.required = rest.required = False
    return parser
