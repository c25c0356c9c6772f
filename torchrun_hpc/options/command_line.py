"""The command line, parsed without torch: ours and all torchrun releases' options.

`torchrun_parser` then checks it with the installed release.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from torchrun_hpc.errors import LaunchError, Setting, near
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.options.values import DRY_RUN, dry_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# Words up to the script. Trying more would take seconds on a wrong line with thousands
# of arguments, and no right line has as many.
_LONGEST = 256


@dataclass(frozen=True)
class CommandLine:
    """The user's request.

    Attributes:
        options: The options that are set. An empty value, or 0 in the variable of a
            flag, counts as unset.
        unknown: Words before the script that are an option of no known release. If one
            takes a value, that value is mistaken for the script.
        wants_help: Whether torchrun must print something and end. In this case, nothing
            else is known.
        wants_version: Whether the launcher must print the versions and end.
        problem: Why the command line cannot be parsed. In this case, ``options`` are
            only those of `of_setup`.
    """

    options: Options = field(default_factory=Options)
    unknown: tuple[str, ...] = ()
    wants_help: bool = False
    wants_version: bool = False
    problem: LaunchError | None = None


def parse(
    argv: Sequence[str], environ: Mapping[str, str], *, has_job: bool = True
) -> CommandLine:
    """Parse a command line, without the program's name.

    With ``has_job``, a scheduler knows the number of nodes.
    """
    try:
        parser = _parser(environ)
        words, script_args = split_at_script(parser, argv)
        args, others = parser.parse_known_args(words)
        given = explicit_options(parser, words, args, environ)
    except _HelpWanted:
        return CommandLine(wants_help=True)
    except VersionWanted:  # perhaps by an abbreviation
        others = [word for word in argv if not "--version".startswith(word)]
        return CommandLine(parse(others, environ).options, wants_version=True)
    except LaunchError as problem:
        return CommandLine(of_setup(environ), problem=problem)
    given = {name: each for name, each in given.items() if each.value is not False}
    unknown = tuple(word for word in others if word != "--")
    script = getattr(args, SCRIPT, ""), *script_args
    return CommandLine(read(given, script, has_job=has_job), unknown)


def explicit_options(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Setting]:
    """Return the options that the user set, each with the option or variable.

    ``words`` are those up to the script, and ``args`` their parsed values.
    """
    given = by_variable(vars(args), environ)
    # argparse does not replace existing values of a namespace with defaults.
    unset = object()
    namespace = argparse.Namespace(**dict.fromkeys(vars(args), unset))
    for dest, value in vars(parser.parse_known_args(words, namespace)[0]).items():
        if value is unset or dest in (SCRIPT, SCRIPT_ARGS):
            continue
        if value == []:  # from --hpc-site=--
            raise wrong_line(f"--{dest} has no value. Add one, or remove the option")
        given[dest] = Setting(value, f"--{dest}")
    return {dest: setting for dest, setting in given.items() if setting.value != ""}


def split_at_script(
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
            has_mark = "--" in argv[:end]
            return argv[:end], _script_args(argv[end:], has_mark=has_mark)
    return argv, ()


def _script_args(words: Sequence[str], *, has_mark: bool) -> list[str]:
    """Return the script's arguments, of which argparse removes some ``--``.

    ``has_mark`` is whether there also is one before the script.
    """
    if "--" not in words:
        return list(words)
    neutral = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    neutral.add_argument(SCRIPT)
    neutral.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    line = ["--", "script", *words] if has_mark else ["script", *words]
    return list(getattr(neutral.parse_args(line), SCRIPT_ARGS))


# --- the options: torchrun's, and ours ------------------------------------------------

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
_SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
SCRIPT, SCRIPT_ARGS = "training_script", "training_script_args"
WITHOUT_VARIABLE = (
    *("logs_specs", "numa_binding", "print_completion", "version", SCRIPT, SCRIPT_ARGS),
)

# Options whose variables count in a script that calls setup_environment().
_OF_SETUP = ("hpc_site", "hpc_omp_threads", "hpc_bind", "hpc_auth", "hpc_key_file")

_OURS = tuple(each for each in fields(Options) if "about" in each.metadata)
OURS = (*(each.name for each in _OURS), "hpc_dry_run")

# Bytes of --rdzv-id. Torch adds nine and names a folder, whose name can have 255.
LONGEST_ID = 246


def names_of(dest: str) -> tuple[str, ...]:
    """Return the spellings of an option: short, with dashes, with underscores."""
    short = (_SHORT[dest],) if dest in _SHORT else ()
    return (*short, *dict.fromkeys((f"--{dest.replace('_', '-')}", f"--{dest}")))


def variable_of(dest: str) -> str:
    """Return the variable of an option, by torchrun's rule: ``PET_NNODES``."""
    return f"PET_{dest.upper()}"


def by_variable(
    values: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the values that come from a set variable, with this variable.

    A flag of ours that is off does not count.
    """
    return {
        dest: Setting(value, variable_of(dest))
        for dest, value in values.items()
        if environ.get(variable_of(dest))
        and dest not in WITHOUT_VARIABLE
        and (value or dest not in OURS)
    }


def of_setup(environ: Mapping[str, str]) -> Options:
    """Return the options for a script that calls ``setup_environment()``."""
    values = {dest: environ.get(variable_of(dest)) for dest in _OF_SETUP}
    return read(by_variable(values, environ))


def names_folder(run_id: str) -> bool:
    """Return whether ``--rdzv-id`` can be in the name of torch's folder for logs."""
    return "/" not in run_id and len(os.fsencode(run_id)) <= LONGEST_ID


# --- the parser -----------------------------------------------------------------------

USAGE = "torchrun_hpc [options] script.py [arguments]"
NO_SCRIPT = f"no script given. Usage: {USAGE}"
_ALL_OPTIONS = "--help lists all options"
EXAMPLES = """torchrun for HPC clusters. Start it once per node.

examples:
  srun --ntasks-per-node=1 python -m torchrun_hpc --nproc_per_node=gpu train.py
  mpiexec -ppn 1 python -m torchrun_hpc --nproc_per_node=gpu train.py
  python -m torchrun_hpc --hpc-dry-run --nproc_per_node=2 train.py

tools:
  python -m torchrun_hpc.doctor   find slow nodes and links of an allocation
  python -m torchrun_hpc.stacks   show what the workers of a running job are doing
  python -m torchrun_hpc.sites    list the known computing centres
  python -m torchrun_hpc.explain  explain a message: explain HPC125"""


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = with_ours(lambda: _torchrun_parser(environ), environ)
    parser.print_help = _want_help  # type: ignore[assignment, method-assign]
    return parser


def _torchrun_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group()  # argparse checks no help texts of a group
    group.add_argument("-h", "--help", action="help")
    for dest, kind in TORCHRUN.items():
        is_help = dest == "print_completion"
        add_option(group, dest, _want_help if is_help else kind, environ)
    script = group.add_argument(SCRIPT, default=argparse.SUPPRESS)
    rest = group.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER)
    script.required = rest.required = False
    return parser


def with_ours(
    make: Callable[[], argparse.ArgumentParser], environ: Mapping[str, str]
) -> argparse.ArgumentParser:
    """Return torchrun's parser with our options as its first group.

    ``make`` returns torchrun's parser. The result raises `LaunchError`.
    """
    try:
        parser = make()
        add_ours(parser, environ)
    except ValueError as error:
        raise wrong_variable(error, environ) from None
    groups = parser._action_groups  # noqa: SLF001 - argparse has no other way
    groups.insert(0, groups.pop())
    # Without our options, --h is an abbreviation of --help.
    group = parser.add_argument_group()
    group.add_argument("--h", action="help", help=argparse.SUPPRESS)
    parser.prog, parser.usage, parser.description = "torchrun_hpc", USAGE, EXAMPLES
    parser.formatter_class = _Formatter
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    return parser


def add_ours(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the group of our options; raise ``ValueError`` like `add_option`."""
    group = parser.add_argument_group("options for clusters")
    for each in _OURS:
        about = each.metadata["about"]
        kind = str if "metavar" in about else bool
        add_option(group, each.name, kind, environ, **about)
    text = environ.get(variable_of("hpc_dry_run"), "")
    default = {"": None, "0": None, "1": "table"}.get(text, text)
    names = names_of("hpc_dry_run")
    for form, about in DRY_RUN.items():
        group.add_argument(
            *(names if form == "table" else ()),
            *(f"{name}={form}" for name in names),
            dest="hpc_dry_run",
            action="store_const",
            const=form,
            default=default,
            help=about,
        )
    group.add_argument(
        "--version",
        action=_WantVersion,
        nargs=0,
        default=argparse.SUPPRESS,
        help="Print the versions of torchrun_hpc, torch and Python, and end. With "
        "--hpc-debug, also list each change inside PyTorch, and whether it fits.",
    )


def add_option(
    group: Any, dest: str, kind: Any, environ: Mapping[str, str], **about: Any
) -> None:
    """Add an option, whose variable gives the default if it is set.

    If ``kind`` is ``bool``, the option is a flag. ``about`` is for argparse.

    Raises:
        ValueError: The variable of a flag is not a number.
    """
    text = None if dest in WITHOUT_VARIABLE else environ.get(variable_of(dest)) or None
    value: dict[str, Any] = {"type": kind, "default": text}
    if kind is bool:
        value = {"action": "store_true", "default": bool(int(text or 0))}
    group.add_argument(*names_of(dest), **value, **about)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps the examples' lines, and breaks no option at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # noqa: PLC0415 - slow to import

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _HelpWanted(Exception):  # noqa: N818 - never leaves this module
    """A request for help, after which torchrun ends."""


def _want_help(*_: Any) -> NoReturn:
    raise _HelpWanted


class VersionWanted(Exception):  # noqa: N818 - ends no launch
    """A request for the versions."""


class _WantVersion(argparse.Action):
    """An action that raises `VersionWanted`, whatever is wrong with later words."""

    def __call__(self, *_: Any) -> NoReturn:
        raise VersionWanted


# --- refusals -------------------------------------------------------------------------


def wrong_line(message: str) -> LaunchError:
    """Return the refusal of a command line."""
    return LaunchError("HPC010", message, everywhere=True)


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if unknown:
        names = parser._option_string_actions  # noqa: SLF001 - the names of all options
        message = unknown_option(unknown[0], names)
    elif message.startswith("the following arguments are required: "):
        message = f"{NO_SCRIPT}. {_ALL_OPTIONS}"
    elif match := re.match(r"argument --hpc-dry-run\b.* '(.*)'$", message):
        dry_run(Setting(match[1], "--hpc-dry-run"))
    else:
        message += f". {_ALL_OPTIONS}"
    raise wrong_line(message)


def unknown_option(word: str, names: Iterable[str]) -> str:
    """Return the message for an unknown option; it may suggest one of ``names``."""
    name = word.partition("=")[0]
    return f"unknown option {name}. {near(name, names) or _ALL_OPTIONS}"


def wrong_variable(error: ValueError, environ: Mapping[str, str]) -> LaunchError:
    """Return the refusal of a flag's variable that is not a number."""
    flags = ", ".join(f"{k}={v}" for k, v in environ.items() if k.startswith("PET_"))
    return LaunchError(
        "HPC011",
        f"the PET_* variable of a flag is not a number ({error}): {flags}. Set a flag "
        "such as PET_STANDALONE to 1 or 0",
        everywhere=True,
    )
