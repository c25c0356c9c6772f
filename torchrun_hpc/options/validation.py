"""Checks of what would end torchrun with a traceback, before anything is started."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.events import handlers as event_handlers
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import script
from torchrun_hpc.options.arguments import LONGEST_ID, names_folder
from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from torchrun_hpc.options.options import Options


def number_of_workers(options: Options, value: int | str) -> int:
    """Return the number of workers on this node; refuse devices that are not there.

    A program may have changed ``value``, which is ``--nproc-per-node``.
    """
    try:
        return int(torch_run.determine_local_world_size(str(value)))
    except ValueError:
        name = options.given.get("nproc_per_node") or f"--nproc_per_node={value}"
        knows_xpu = "xpu" in torch_run.determine_local_world_size.__code__.co_consts
        problem = f"use a number, gpu, {'xpu, ' * knows_xpu}cpu or auto"
        is_for_gpus = False
        if value in {"gpu", "xpu"}:
            kinds = ("cuda", "hip") if value == "gpu" else ("xpu",)
            is_for_gpus = any(getattr(torch.version, kind, None) for kind in kinds)
            fix = "Request GPUs, for example with #SBATCH --gres=gpu:4"
            problem = (
                f"PyTorch {torch.__version__} sees no {str(value).upper()} on this "
                f"node. {fix if is_for_gpus else 'Install a build for GPUs'}, or use "
                "--nproc_per_node=2"
            )
        # All nodes have the same word and build, but not the same GPUs.
        text, is_everywhere = f"{name}: {problem}", not is_for_gpus
        raise LaunchError("HPC012", text, everywhere=is_everywhere) from None


def number_of_gpus() -> int:
    """Return how many GPUs torch sees on this node."""
    return int(torch.cuda.device_count() or capabilities.number_of_xpus())


def check_options(args: argparse.Namespace, options: Options) -> None:
    """Check the options whose right values only this torch knows.

    A value that torch only warns of is right.
    """
    for dest, problem in _problems(args):
        name = options.given.get(dest) or f"--{dest}={getattr(args, dest)}"
        # Each node may have other GPUs.
        is_everywhere = dest != "numa_binding"
        raise LaunchError("HPC014", f"{name}: {problem}", everywhere=is_everywhere)


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    backends = getattr(rendezvous_handler_registry, "_registry", {})
    # With --standalone torch takes a backend and an id of its own.
    if backends and not args.standalone and args.rdzv_backend not in backends:
        known = ", ".join(sorted(backends))
        yield "rdzv_backend", f"use {known}, or remove the option"
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
    """Let torch read all arguments, and check the script, before the start."""
    trial: Any = copy.copy(args)
    with tempfile.TemporaryDirectory() as folder:
        # Without --log-dir, torch makes a folder for logs.
        trial.log_dir = args.log_dir or folder
        try:
            torch_run.config_from_args(trial)
            # Some releases have not made it by now.
            Path(trial.log_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=trial.log_dir):
                pass  # torch makes one there much later
        except Exception as error:  # noqa: BLE001 - one release raises just that
            fault = "torchrun rejects this command line"
            if isinstance(error, OSError):
                fault = "torchrun cannot create its log folder"
            raise LaunchError("HPC015", f"{fault}: {error}") from None
    script.check(args.training_script, options, environ)
