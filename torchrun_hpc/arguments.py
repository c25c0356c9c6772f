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

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.inputs import Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "torchrun_hpc"
SCRIPT_ARGS = "training_script_args"

_OURS = "hpc_"

# Words in front of the script. Trying more would take seconds on a wrong line with
# thousands of arguments, and no right line has as many.
_LONGEST = 256


# Not an option with a value: that would take the script for it.
DRY_RUN = {
    "table": "Start nothing: meet the other nodes, and print on node 0 what would be "
    "done, value by value with its source, and the same with plain torchrun.",
    "json": "The same for machines.",
}


class _DryRun(env):
    """A flag of several forms, which ``PET_HPC_DRY_RUN`` names; 1 is the first."""

    def __init__(self, dest: str, const: str, **kwargs: Any) -> None:
        super().__init__(dest=dest, const=const, nargs=0, **kwargs)
        forms = {"": None, "0": None, "1": "table"}
        self.default = forms.get(self.default or "", self.default)

    def __call__(self, _parser: Any, namespace: Any, *_: Any) -> None:
        setattr(namespace, self.dest, self.const)


class _Incomplete(Exception):  # noqa: N818 - never leaves this module
    """Not a whole command line yet, or a wrong one."""


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added.

    Args:
        environ: Environment of this process, for the message.

    Raises:
        LaunchError: A ``PET_*`` variable of a flag is not a number: torch reads it
            while it makes the parser.
    """
    try:
        made = torch_run.get_args_parser()
        _add_ours(made)
    except ValueError as error:
        flags = ", ".join(f"{k}={v}" for k, v in environ.items() if k[:4] == "PET_")
        raise LaunchError(
            "HPC011",
            f"a PET_* variable cannot be read ({error}): {flags}. Flags such as "
            "PET_STANDALONE are 1 or 0",
            everywhere=True,
        ) from None
    made.prog = PROGRAM
    made.error = _wrong_line  # type: ignore[method-assign]
    return made


def _add_ours(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("clusters", "Added to torchrun by torchrun_hpc.")
    group.add_argument(
        "--hpc-site",
        "--hpc_site",
        action=env,
        type=str,
        metavar="NAME|FILE|none",
        help="Computing centre whose rules for host names and variables to use, or a "
        "file with them, or 'none'. By default it is recognised by the environment. "
        "python -m torchrun_hpc.sites lists them.",
    )
    group.add_argument(
        "--hpc-omp-threads",
        "--hpc_omp_threads",
        action=env,
        type=str,
        metavar="auto|NUMBER",
        help="OMP_NUM_THREADS of each worker where it is not set; 'auto' divides the "
        "CPUs of this process by the workers. By default 1, as torchrun does.",
    )
    group.add_argument(
        "--hpc-rendezvous",
        "--hpc_rendezvous",
        action=env,
        type=str,
        metavar="auto|scheduler|c10d",
        help="How the nodes of a job meet where torchrun would use c10d: 'scheduler' "
        "by the ranks that the scheduler gave them, 'c10d' as torch does. By default "
        "'auto': the first if the number of nodes is fixed.",
    )
    for form, meaning in DRY_RUN.items():
        names = ("--hpc-dry-run", "--hpc_dry_run")
        plain = names if form == "table" else ()
        group.add_argument(
            *plain,
            *(f"{name}={form}" for name in names),
            dest="hpc_dry_run",
            action=_DryRun,
            const=form,
            help=meaning,
        )
    group.add_argument(
        "--hpc-debug",
        "--hpc_debug",
        action=check_env,
        help="Log what torch and the launcher do, on every node, with host name and "
        "rank before each line.",
    )
    # --h was an abbreviation of --help before there were two options with an h.
    group.add_argument("--h", action="help", help=argparse.SUPPRESS)


def _wrong_line(message: str) -> NoReturn:
    raise LaunchError("HPC010", f"{message}. --help lists all options", everywhere=True)


def parse(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[argparse.Namespace, dict[str, Value]]:
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
    made = parser(environ)
    own, script_args = _split(made, argv)
    args = made.parse_args(own)
    for dest, value in vars(args).items():
        if dest.startswith(_OURS) and isinstance(value, list):
            _wrong_line(f"{dest} has no value")  # of --hpc-site=-- Python makes a list
    setattr(args, SCRIPT_ARGS, _script_args(script_args, own))
    bare = parser(environ)
    options = _options(bare)
    for action in options:
        action.default = argparse.SUPPRESS
    bare_args = vars(bare.parse_args(own))
    typed = _by_variable(options, args, environ) | {
        action.dest: Value(bare_args[action.dest], action.option_strings[-1])
        for action in options
        if action.dest in bare_args
    }
    return args, {dest: option for dest, option in typed.items() if option.value != ""}


def add_ours(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Add our options, as variables set them, to those of a program's own parser."""
    for dest, value in vars(parser(environ).parse_args(["script"])).items():
        if dest.startswith(_OURS) and not hasattr(args, dest):
            setattr(args, dest, value)


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the arguments that are set, of a program that parses its own.

    What it left at torchrun's defaults is ours to fill in. The rank of the node is
    left out: 0 is the default, so it would count as set on all nodes but the first.
    """
    made = parser(environ)
    options = _options(made)
    defaults = vars(made.parse_args(["script"]))
    return _by_variable(options, args, environ) | {
        action.dest: Value(getattr(args, action.dest), action.option_strings[-1])
        for action in options
        if action.dest != "node_rank"
        and getattr(args, action.dest, "") not in ("", defaults.get(action.dest, ""))
    }


def plain_command(
    args: argparse.Namespace, options: Mapping[str, Value], environ: Mapping[str, str]
) -> list[str]:
    """Write a command line of torchrun itself.

    Args:
        args: Has the script and its arguments.
        options: The options to write; ours are left out.
        environ: Environment of this process, for the parser.
    """
    words = ["torchrun"]
    for action in _options(parser(environ)):
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


def _options(made: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in made._actions if action.option_strings]


def _by_variable(
    options: Sequence[argparse.Action],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Value]:
    """Return the options that a ``PET_*`` variable set."""
    found = {}
    for action in options:
        variable = f"PET_{action.dest.upper()}"
        if isinstance(action, env | check_env) and environ.get(variable):
            value = getattr(args, action.dest, environ[variable])
            found[action.dest] = Value(value, variable)
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
