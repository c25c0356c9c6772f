"""The installed torchrun's parser plus the ``--hpc-*`` group, and its checks."""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.events import handlers as event_handlers
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchrun_hpc.errors import LaunchError, Setting
from torchrun_hpc.host import capabilities
from torchrun_hpc.options import command_line, script
from torchrun_hpc.options.command_line import (
    LONGEST_ID,
    OURS,
    SCRIPT,
    SCRIPT_ARGS,
    by_variable,
    names_folder,
    names_of,
    with_ours,
    wrong_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.options.options import Options


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added; refuse a flag's wrong variable.

    Torch reads the variables of its own options from ``os.environ``.
    """
    torchrun = with_ours(torch_run.get_args_parser, environ)
    names, actions = names_of("print_completion"), torchrun._option_string_actions
    if names[0] not in actions:
        torchrun.add_argument(
            *names,
            default=argparse.SUPPRESS,
            choices=("bash", "zsh", "tcsh"),
            metavar="SHELL",
            help="Print SHELL's completion of all options, and end. Needs shtab.",
        )
    # The action of torch 2.14 and newer completes the name torchrun.
    shells = actions[names[0]].choices
    ours = _PrintCompletion(names, "print_completion", choices=shells)
    actions.update(dict.fromkeys(names, ours))
    return torchrun


class _PrintCompletion(argparse.Action):
    """An action that prints a shell's completion of the program ``torchrun_hpc``."""

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
    """Parse a command line, without the program's name; if it asks for help, end."""
    torchrun = parser(environ)
    words, script_args = command_line.split_at_script(torchrun, argv)
    args = torchrun.parse_args(words)
    setattr(args, SCRIPT_ARGS, list(script_args))
    return args


def explicit(
    args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Setting]:
    """Return the options that the user set, each with the option or variable."""
    torchrun = parser(environ)
    words, _ = command_line.split_at_script(torchrun, argv)
    return command_line.explicit_options(torchrun, words, args, environ)


def changed(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Setting]:
    """Return the options that are set in ``args``, which a program made itself.

    Arguments at torchrun's defaults are ours to fill in. So is the node rank: 0 is the
    default, so it would count as set on all nodes but the first.
    """
    torchrun = parser(environ)
    kinds: dict[str, Any] = {a.dest: a.type or str for a in torchrun._actions}
    defaults = vars(torchrun.parse_args(["script"]))
    settings = by_variable(defaults, environ)
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
        settings[dest] = Setting(value, f"--{dest}")
    return settings


def plain_command(
    args: argparse.Namespace,
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
) -> list[str]:
    """Return plain torchrun's command line: options without ours, and the script."""
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
    if script[0].startswith("-") or script[1:2] == ["--"]:
        words.append("--")
    return [*words, *script]


# --- checks of values with which torchrun would end in a traceback --------------------


def number_of_workers(options: Options, value: int | str) -> int:
    """Return the number of workers on this node; refuse GPUs that torch does not see.

    ``value`` is ``--nproc-per-node``, which a program may have changed.
    """
    try:
        return int(torch_run.determine_local_world_size(str(value)))
    except ValueError:
        name = options.given.get("nproc_per_node") or f"--nproc_per_node={value}"
        kinds = {"gpu": ("cuda", "hip"), "xpu": ("xpu",)}.get(str(value), ())
        is_for_gpus = any(getattr(torch.version, kind, None) for kind in kinds)
        fix = "Install a build for GPUs"
        if is_for_gpus:
            fix = "Request GPUs, for example with #SBATCH --gres=gpu:4"
        problem = (
            f"PyTorch {torch.__version__} sees no {str(value).upper()} on this node. "
            f"{fix}, or use --nproc_per_node=2"
        )
        if not kinds:
            words = torch_run.determine_local_world_size.__code__.co_consts
            devices = "gpu, xpu, cpu" if "xpu" in words else "gpu, cpu"
            problem = f"use a number, {devices} or auto"
        # All nodes have the same word and build, but not the same GPUs.
        text, is_everywhere = f"{name}: {problem}", not is_for_gpus
        raise LaunchError("HPC012", text, everywhere=is_everywhere) from None


def number_of_gpus() -> int:
    """Return how many GPUs torch sees on this node."""
    return int(torch.cuda.device_count() or capabilities.number_of_xpus())


def check_options(args: argparse.Namespace, options: Options) -> None:
    """Refuse a wrong value of the options whose right values only this torch knows.

    A value of which torch only warns is right.
    """
    for dest, problem in _problems(args):
        name = options.given.get(dest) or f"--{dest}={getattr(args, dest)}"
        # Each node may have other GPUs.
        is_everywhere = dest != "numa_binding"
        raise LaunchError("HPC014", f"{name}: {problem}", everywhere=is_everywhere)


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    backends = getattr(rendezvous_handler_registry, "_registry", {})
    # With --standalone, torch ignores an explicit backend and id.
    if backends and not args.standalone and args.rdzv_backend not in backends:
        yield "rdzv_backend", f"use {', '.join(sorted(backends))}, or remove the option"
    if not args.standalone and not names_folder(args.rdzv_id):
        yield "rdzv_id", f"use at most {LONGEST_ID} characters, without /"
    handlers = getattr(event_handlers, "_log_handlers", {})
    if handlers and capabilities.option(args, "event_log_handler") not in handlers:
        yield "event_log_handler", f"use {', '.join(sorted(handlers))}"
    if capabilities.option(args, "numa_binding") and not torch.cuda.is_available():
        yield (
            "numa_binding",
            "torch binds workers by GPU, and sees no GPU here. Use --hpc-bind=even",
        )


def check_configuration(
    args: argparse.Namespace, options: Options, environ: Mapping[str, str]
) -> None:
    """Let torch read all arguments, and check the log folder and the script."""
    trial: Any = copy.copy(args)
    with tempfile.TemporaryDirectory() as folder:
        # Without --log-dir, torch makes a folder for logs.
        trial.log_dir = args.log_dir or folder
        try:
            torch_run.config_from_args(trial)
            # Some releases make it only later.
            Path(trial.log_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=trial.log_dir):
                pass  # torch makes such a folder there much later
        except Exception as error:  # noqa: BLE001 - one release raises this class
            fault = "torchrun rejects this command line"
            if isinstance(error, OSError):
                fault = "torchrun cannot create its log folder"
            raise LaunchError("HPC015", f"{fault}: {error}") from None
    script.check(args.training_script, options, environ)
