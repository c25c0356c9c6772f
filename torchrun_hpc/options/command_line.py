"""The command line, parsed without torch, with the options of all torchrun releases.

`torchrun_parser` then checks them with the installed release.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.arguments import (
    SCRIPT,
    SCRIPT_ARGS,
    TORCHRUN,
    VersionWanted,
    add_option,
    by_variable,
    of_setup,
    with_ours,
    wrong_line,
)
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Words before the script. Trying more would take seconds on a wrong line with
# thousands of arguments, and no right line has as many.
_LONGEST = 256


@dataclass(frozen=True)
class CommandLine:
    """The user's request.

    Attributes:
        options: The options that are set. An empty value, or 0 in the variable of a
            flag, counts as not set.
        unknown: Words before the script that are an option of no known release. If one
            takes a value, that value is mistaken for the script.
        wants_help: Whether torchrun will print something and end. Then nothing else is
            known.
        wants_version: Whether the versions are printed, and the launcher ends.
        problem: Why the command line cannot be parsed. Then only some variables are
            known.
    """

    options: Options = field(default_factory=Options)
    unknown: tuple[str, ...] = ()
    wants_help: bool = False
    wants_version: bool = False
    problem: LaunchError | None = None


def parse(
    argv: Sequence[str], environ: Mapping[str, str], *, has_job: bool = True
) -> CommandLine:
    """Parse a command line; ``has_job``: a scheduler knows the number of nodes."""
    try:
        parser = _parser(environ)
        own, script_args = split(parser, argv)
        args, others = parser.parse_known_args(own)
        given = explicit(parser, own, args, environ)
    except _HelpWanted:
        return CommandLine(wants_help=True)
    except VersionWanted:  # perhaps by an abbreviation
        others = [word for word in argv if not "--version".startswith(word)]
        return CommandLine(parse(others, environ).options, wants_version=True)
    except LaunchError as problem:
        return CommandLine(of_setup(environ), problem=problem)
    given = {name: each for name, each in given.items() if each.value is not False}
    unknown = tuple(word for word in others if word != "--")
    words = getattr(args, SCRIPT, ""), *script_args
    return CommandLine(read(given, words, has_job=has_job), unknown)


def explicit(
    parser: argparse.ArgumentParser,
    own: Sequence[str],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Setting]:
    """Return the options that the user set, each with the option or variable.

    ``own`` are the words before the script's arguments, ``args`` their parsed values.
    """
    given = by_variable(vars(args), environ)
    # argparse does not replace existing values of a namespace with defaults.
    unset = object()
    namespace = argparse.Namespace(**dict.fromkeys(vars(args), unset))
    for dest, value in vars(parser.parse_known_args(own, namespace)[0]).items():
        if value is unset or dest in (SCRIPT, SCRIPT_ARGS):
            continue
        if value == []:  # Python makes one of --hpc-site=--
            raise wrong_line(f"--{dest} has no value. Add one, or remove the option")
        given[dest] = Setting(value, f"--{dest}")
    return {dest: setting for dest, setting in given.items() if setting.value != ""}


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line into the words up to the script, and its arguments.

    The parser, which raises `LaunchError`, must not see the script's arguments:
    argparse would find ambiguous abbreviations among them.
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
    """Return the script's arguments, with argparse's meaning of ``--``."""
    if "--" not in words:
        return list(words)
    neutral = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    neutral.add_argument(SCRIPT)
    neutral.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    before = ["--"] if "--" in own else []
    return list(getattr(neutral.parse_args([*before, "script", *words]), SCRIPT_ARGS))


class _HelpWanted(Exception):  # noqa: N818 - never leaves this module
    """A request for help, after which torchrun ends."""


def _want_help(*_: Any) -> NoReturn:
    raise _HelpWanted


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = with_ours(functools.partial(_torchruns, environ), environ)
    parser.print_help = _want_help  # type: ignore[assignment, method-assign]
    return parser


def _torchruns(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group()  # of one, argparse tries no help texts
    group.add_argument("-h", "--help", action="help")
    for dest, kind in TORCHRUN.items():
        is_help = dest == "print_completion"
        add_option(group, dest, _want_help if is_help else kind, environ)
    script = group.add_argument(SCRIPT, default=argparse.SUPPRESS)
    rest = group.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    script.required = rest.required = False
    return parser
