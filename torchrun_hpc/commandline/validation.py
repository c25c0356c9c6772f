"""What torchrun would answer with a traceback, found before anything is started."""

from __future__ import annotations

import copy
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.events import handlers as event_handlers
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchrun_hpc.commandline import script
from torchrun_hpc.commandline.options import DRY_RUN, LONGEST_ID, names_folder
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.setting import Setting

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)


def number_of_workers(args: argparse.Namespace, options: Mapping[str, Setting]) -> int:
    """Return the number of workers on this node.

    Raises:
        LaunchError: ``--nproc-per-node`` is no number, or counts what is not there.
    """
    name = options.get("nproc_per_node") or f"--nproc_per_node={args.nproc_per_node}"
    try:
        workers = int(torch_run.determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        raise LaunchError(
            "HPC012",
            f"{name}: {str(error).rstrip('.')}. Type a number, or gpu, cpu, auto",
        ) from None
    if workers < 1:
        raise LaunchError("HPC013", f"{name} starts no worker")
    return workers


def number_of_gpus() -> int:
    """Return how many GPUs torch sees on this node."""
    return int(torch.cuda.device_count() or capabilities.number_of_xpus())


def check_options(args: argparse.Namespace, options: Mapping[str, Setting]) -> None:
    """Look at the options that torch uses without checking them.

    Raises:
        LaunchError: A value cannot be used.
    """
    for dest, problem in _problems(args):
        name = options.get(dest) or f"--{dest}={getattr(args, dest)}"
        # The GPUs may be others on each node.
        everywhere = dest != "numa_binding"
        raise LaunchError("HPC014", f"{name}: {problem}", everywhere=everywhere)


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the names of options, and what is wrong with them.

    Torchrun ends of each of these. What it only warns of, such as a signal that there
    is not, or ignores, is no problem.
    """
    if getattr(args, "hpc_dry_run", None) not in {None, *DRY_RUN}:
        yield "hpc_dry_run", f"type one of {', '.join(DRY_RUN)}"
    backends = getattr(rendezvous_handler_registry, "_registry", {})
    # With --standalone torch takes a backend and an id of its own.
    if backends and not args.standalone and args.rdzv_backend not in backends:
        known = ", ".join(sorted(backends))
        yield "rdzv_backend", f"this torch has only {known}; or leave the option out"
    if args.max_restarts < 0:
        yield "max_restarts", "type 0 or more"
    if not 0 < args.monitor_interval < threading.TIMEOUT_MAX:
        yield "monitor_interval", "type seconds, above 0"
    if not args.standalone and not names_folder(args.rdzv_id):
        yield "rdzv_id", f"type at most {LONGEST_ID} characters, without /"
    handlers = getattr(event_handlers, "_log_handlers", {})
    if handlers and capabilities.option(args, "event_log_handler") not in handlers:
        yield "event_log_handler", f"type one of {', '.join(sorted(handlers))}"
    for name in capabilities.option(args, "signals_to_handle").split(","):
        number = getattr(signal, name.strip(), signal.SIGTERM)
        if number in _UNCATCHABLE or not isinstance(number, int):
            yield "signals_to_handle", f"{name.strip()} cannot be handled"
    if capabilities.option(args, "numa_binding") and not torch.cuda.is_available():
        yield "numa_binding", "no GPU is visible here, and torch binds by GPU"


def check_configuration(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Let torch read all arguments once, and look at the script, before the start.

    Raises:
        LaunchError: A value cannot be used, in torch's words.
    """
    trial: Any = copy.copy(args)
    with tempfile.TemporaryDirectory() as folder:
        # torch makes a folder for logs where none was typed.
        trial.log_dir = args.log_dir or folder
        try:
            torch_run.config_from_args(trial)
            # Not every torch has made it by now.
            Path(trial.log_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=trial.log_dir):
                pass  # torch makes one there, much later
        except Exception as error:  # noqa: BLE001 - one release raises just that
            fault = "torchrun does not take this command line"
            if isinstance(error, OSError):
                fault = "torchrun cannot make its folder for logs"
            raise LaunchError("HPC015", f"{fault}: {error}") from None
    script.check(args.training_script, vars(args), environ)
