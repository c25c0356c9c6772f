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
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.question import Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "torchrun_hpc"
SCRIPT_ARGS = "training_script_args"


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
    except ValueError as error:
        flags = ", ".join(f"{k}={v}" for k, v in environ.items() if k[:4] == "PET_")
        raise LaunchError(
            f"a PET_* variable cannot be read ({error}): {flags}. Flags such as "
            "PET_STANDALONE are 1 or 0"
        ) from None
    made.prog = PROGRAM
    group = made.add_argument_group("clusters", "Added to torchrun by torchrun_hpc.")
    group.add_argument(
        "--hpc-site",
        "--hpc_site",
        action=env,
        type=str,
        help="Computing centre whose rules for host names to use, or 'none'. By "
        "default it is recognised by the environment.",
    )
    # --h was an abbreviation of --help before there were two options with an h.
    group.add_argument("--h", action="help", help=argparse.SUPPRESS)
    return made


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
        LaunchError: A ``PET_*`` variable cannot be read.
        SystemExit: The command line is wrong (2), or asks for help (0).
    """
    made = parser(environ)
    own, script_args = _split(made, argv)
    args = made.parse_args(own)
    # The script's own arguments are not ours to look at: argparse would find
    # ambiguous abbreviations among them.
    setattr(args, SCRIPT_ARGS, list(script_args))
    return args, _typed(parser(environ), own, args, environ)


def _split(
    made: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line behind the script: the shortest part that parses."""
    quiet = copy.copy(made)

    def fail(message: str) -> NoReturn:
        raise _Incomplete(message)

    quiet.error = fail  # type: ignore[method-assign]
    for end in range(1, len(argv) + 1):
        try:
            quiet.parse_args(argv[:end])
        except _Incomplete:
            continue
        return argv[:end], argv[end:]
    return argv, ()


def _typed(
    made: argparse.ArgumentParser,
    own: Sequence[str],
    args: argparse.Namespace,
    environ: Mapping[str, str],
) -> dict[str, Value]:
    found = {}
    options = [a for a in made._actions if a.option_strings]
    for action in options:
        variable = f"PET_{action.dest.upper()}"
        if isinstance(action, env | check_env) and environ.get(variable):
            found[action.dest] = Value(getattr(args, action.dest), variable)
        action.default = argparse.SUPPRESS
    names = {action.dest: action.option_strings[-1] for action in options}
    for dest, value in vars(made.parse_args(own)).items():
        if dest in names:
            found[dest] = Value(value, names[dest])
    return found


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the arguments that differ from the defaults.

    For programs that call torch.distributed.run themselves: what they left alone is
    ours to fill in.
    """
    made = parser(environ)
    found = {}
    for action in made._actions:
        value = getattr(args, action.dest, action.default)
        if action.option_strings and value != action.default:
            found[action.dest] = Value(value, action.option_strings[-1])
    return found


def check(args: argparse.Namespace) -> int:
    """Find what torchrun would answer with a traceback.

    Args:
        args: Arguments as torch.distributed.run takes them; not changed.

    Returns:
        The number of workers on this node.

    Raises:
        LaunchError: A value cannot be used.
    """
    try:
        workers = int(torch_run.determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        raise LaunchError(
            f"--nproc_per_node={args.nproc_per_node}: {error}. Type a number, or gpu, "
            "cpu, auto"
        ) from None
    if workers < 1:
        raise LaunchError(f"--nproc_per_node={args.nproc_per_node} starts no worker")
    backends = getattr(rendezvous_handler_registry, "_registry", {})
    if backends and args.rdzv_backend not in backends:
        raise LaunchError(
            f"--rdzv_backend={args.rdzv_backend}: this torch has no such rendezvous. "
            f"Type one of {', '.join(sorted(backends))}, or leave the option out"
        )
    return workers


def configure(args: argparse.Namespace) -> None:
    """Let torch read all arguments once, before anything is started.

    Raises:
        LaunchError: A value cannot be used, in torch's words.
    """
    trial: Any = copy.copy(args)
    try:
        torch_run.config_from_args(trial)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"torchrun does not take this command line: {error}"
        ) from None
