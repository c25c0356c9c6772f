"""Which starter a mode has, and where torch is imported: as late as possible."""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.commandline import command_line
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host.resolver import ResolverCheck
from torchrun_hpc.launching import debug
from torchrun_hpc.launching.direct import DirectStarter
from torchrun_hpc.planning.mode import check_started_right
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.commandline.command_line import CommandLine
    from torchrun_hpc.launching.preloading import Preloaded
    from torchrun_hpc.launching.start import Starter
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.preflight import Preflight
    from torchrun_hpc.setting import Setting


def parse(argv: Sequence[str], preflight: Preflight) -> CommandLine:
    """Parse the command line, without torch if that is possible.

    It is not for help, nor for what is not understood here: an option may be newer, or
    an abbreviation that only an older release accepts.

    Raises:
        LaunchError: It is wrong; or there is no torch.
        SystemExit: It asks for help.
    """
    line = command_line.parse(argv, preflight.environ)
    job = preflight.job
    may_be_direct = job is not None and job.has_several_tasks
    if line.unknown and any(word.startswith(("--nn", "--stand")) for word in argv):
        may_be_direct = False  # what follows an unknown option may be its value
    is_clear = not (line.unknown or line.problem)
    if not line.wants_help and (may_be_direct or is_clear):
        return line
    if line.problem:
        check_started_right(preflight)  # rather than a wrong word, and without torch
    _switch_debug_on(preflight, line.options)
    import_torch()
    from torchrun_hpc.commandline import torchrun_parser  # noqa: PLC0415

    _, options = torchrun_parser.parse(argv, preflight.environ)
    return replace(line, options=options, problem=None)


def starter_of(
    inputs: Inputs,
    preflight: Preflight,
    line: CommandLine,
    argv: Sequence[str],
    *,
    is_launch: bool = True,
) -> Starter:
    """Return what starts the workers; torch's own parser has the last word on an agent.

    Args:
        inputs: What is known without torch.
        preflight: What this process shows.
        line: The command line, as far as it is understood without torch.
        argv: The same in words.
        is_launch: Whether anything may be changed in this process.

    Raises:
        LaunchError: The command line is wrong, or there is no torch.
        SplitOff: In the process of a fork server.
    """
    job = preflight.job
    if inputs.mode.is_direct and job is not None:
        return DirectStarter(preflight, job, line)
    check = None
    if is_launch:
        prepare_agent(preflight, line.options)
        check = ResolverCheck(inputs.network)
    with _without_garbage_collection():
        preloaded = _preloaded(inputs, line) if is_launch else None
        import_torch()
        from torchrun_hpc.commandline import torchrun_parser  # noqa: PLC0415
        from torchrun_hpc.launching.agent import AgentStarter  # noqa: PLC0415

    args, options = torchrun_parser.parse(argv, preflight.environ)
    if is_launch:
        streams.forgive_at_exit(sys.stdout)  # but for --help
    return AgentStarter(
        preflight,
        args,
        options,
        preloaded=preloaded,
        resolver=check,
        is_command=True,
    )


def _preloaded(inputs: Inputs, line: CommandLine) -> Preloaded | None:
    """Preload what is to be preloaded, unless this is a dry run, or it is useless."""
    preload = inputs.preload
    if preload is None or preload.problem or "hpc_dry_run" in inputs.options:
        return None
    from torchrun_hpc.launching.preloading import Preloaded  # noqa: PLC0415

    preloaded = Preloaded(preload)
    option = ["-m"] if "module" in inputs.options else []
    preloaded.start([*option, line.script, *line.arguments])
    return preloaded


def prepare_agent(preflight: Preflight, options: Mapping[str, Setting]) -> None:
    """Prepare this process to be an agent: leave PMI, and switch ``--hpc-debug`` on."""
    if preflight.job is not None and preflight.job.pmi_is_open:
        pmi.finalize(preflight.environ)  # the workers have no way to it
    _switch_debug_on(preflight, options)


def _switch_debug_on(preflight: Preflight, options: Mapping[str, Setting]) -> None:
    """Switch ``--hpc-debug`` on before torch is imported, which reads variables."""
    if "hpc_debug" in options:
        job = preflight.job
        debug.switch_on(preflight.hostname, job.node_rank if job else None)


def count_workers(setting: Setting) -> int:
    """Return how many workers ``--nproc-per-node`` means on this node.

    Raises:
        LaunchError: It is no number, or counts what is not there.
    """
    if re.fullmatch("[1-9][0-9]{0,5}", setting.value):
        return int(setting.value)
    import_torch()  # to count
    from torchrun_hpc.commandline import validation  # noqa: PLC0415

    args = argparse.Namespace(nproc_per_node=setting.value)
    return validation.number_of_workers(args, {"nproc_per_node": setting})


def import_torch() -> None:
    """Import torch, which takes a second or more.

    Raises:
        LaunchError: There is no torch, or it is too old.
    """
    try:
        import torch  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - a library of its own may be missing
        raise LaunchError(
            "HPC018",
            f"torch cannot be imported by {sys.executable}: {error}. Load the module, "
            "or activate the environment, that has it",
        ) from None
    from torchrun_hpc.torch_compat import capabilities  # noqa: PLC0415

    capabilities.check_release()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import many modules: there is no garbage, and looking takes a sixth of the time.

    Measured with torch 2.13.
    """
    gc.disable()
    try:
        yield
        gc.freeze()  # nor will there be: not to be looked at again
    finally:
        gc.enable()
