"""The command line: torch's own parser plus the ``--hpc-*`` group.

The parser is that of the installed torch, so that every option, spelling, default and
``PET_*`` variable is what torchrun has. What was typed is found by parsing once more
with every default removed, never by looking at the text.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import run as torch_run
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.events import handlers as event_handlers
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.question import Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = "torchrun_hpc"
SCRIPT_ARGS = "training_script_args"

# Words in front of the script; behind more, nobody finds his own mistake.
_LONGEST = 256


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


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the arguments that are set, of a program that parses its own.

    What it left at torchrun's defaults is ours to fill in.
    """
    made = parser(environ)
    options = _options(made)
    defaults = vars(made.parse_args(["script"]))
    return _by_variable(options, args, environ) | {
        action.dest: Value(getattr(args, action.dest), action.option_strings[-1])
        for action in options
        if getattr(args, action.dest, "") not in ("", defaults.get(action.dest, ""))
    }


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
            found[action.dest] = Value(getattr(args, action.dest), variable)
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
            f"--nproc_per_node={args.nproc_per_node}: {str(error).rstrip('.')}. Type a "
            "number, or gpu, cpu, auto"
        ) from None
    if workers < 1:
        raise LaunchError(f"--nproc_per_node={args.nproc_per_node} starts no worker")
    backends = getattr(rendezvous_handler_registry, "_registry", {})
    if backends and args.rdzv_backend not in backends:
        raise LaunchError(
            f"--rdzv_backend={args.rdzv_backend}: this torch has no such rendezvous. "
            f"Type one of {', '.join(sorted(backends))}, or leave the option out"
        )
    if args.monitor_interval <= 0:
        raise LaunchError(
            f"--monitor_interval={args.monitor_interval}: type seconds above 0"
        )
    if "/" in args.rdzv_id or "\0" in args.rdzv_id:
        raise LaunchError(
            f"--rdzv_id={args.rdzv_id}: it names a folder for logs, and cannot have a /"
        )
    handler = getattr(args, "event_log_handler", None)
    handlers = getattr(event_handlers, "_log_handlers", {})
    if handler and handlers and handler not in handlers:
        raise LaunchError(
            f"--event_log_handler={handler}: type one of {', '.join(sorted(handlers))}"
        )
    return workers


def configure(args: argparse.Namespace) -> None:
    """Let torch read all arguments once, before anything is started.

    Raises:
        LaunchError: A value cannot be used, in torch's words.
    """
    trial: Any = copy.copy(args)
    with tempfile.TemporaryDirectory() as folder:
        # torch makes a folder for logs where none was typed.
        trial.log_dir = trial.log_dir or folder
        try:
            torch_run.config_from_args(trial)
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise LaunchError(
                f"torchrun does not take this command line: {error}"
            ) from None
