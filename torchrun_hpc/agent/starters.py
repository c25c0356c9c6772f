"""The starter of each mode; torch is imported as late as possible."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.agent import output
from torchrun_hpc.agent.direct import DirectStarter
from torchrun_hpc.host.resolver import ResolverCheck
from torchrun_hpc.preload import imports
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrun_hpc.agent.start import Starter
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.preload.starter import Preloaded


def starter_of(
    inputs: Inputs, argv: Sequence[str], *, is_launch: bool = True
) -> Starter:
    """Return the starter; with an agent, torch's parser has the last word.

    Change nothing in this process unless ``is_launch``. Raise `LaunchError`, or
    `SplitOff` in the process of a fork server.
    """
    if inputs.mode.is_direct:
        return DirectStarter(inputs)
    check = ResolverCheck(inputs.network) if is_launch else None
    # The search for garbage takes a sixth of the import time (measured, torch 2.13).
    gc.disable()
    try:
        preloaded = _preloaded(inputs) if is_launch else None
        imports.import_torch()
        from torchrun_hpc.agent.elastic import AgentStarter  # noqa: PLC0415
        from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415

        gc.freeze()  # modules stay: do not look at them again
    finally:
        gc.enable()
    args = torchrun_parser.parse(argv, inputs.environ)
    if is_launch:
        streams.forgive_at_exit(sys.stdout)  # --help has already exited
    return AgentStarter(
        inputs, args, preloaded=preloaded, resolver=check, is_command=True
    )


def _preloaded(inputs: Inputs) -> Preloaded | None:
    preload = inputs.preload
    if preload is None or preload.problem or inputs.options.hpc_dry_run:
        return None
    from torchrun_hpc.preload.starter import Preloaded  # noqa: PLC0415

    preloaded = Preloaded(preload)
    option = ["-m"] if inputs.options.module else []
    preloaded.start([*option, *inputs.options.words])
    return preloaded


def prepare_agent(preflight: Preflight, options: Options) -> None:
    """Prepare this process to be an agent, before torch is imported."""
    if preflight.job is not None and preflight.job.pmi_is_open:
        pmi.finalize(preflight.environ)  # the workers have no way to it
    prepare_to_debug(preflight, options)


def prepare_to_debug(preflight: Preflight, options: Options) -> None:
    """Switch ``--hpc-debug`` on before the import of torch, which reads variables."""
    if options.hpc_debug:
        job = preflight.job
        output.debug(preflight.hostname, job.node_rank if job else None)


def count_workers(options: Options) -> int:
    """Return how many workers ``--nproc-per-node`` means on this node."""
    if isinstance(options.nproc_per_node, int):
        return options.nproc_per_node
    imports.import_torch()  # to count
    from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415

    return torchrun_parser.number_of_workers(options, options.nproc_per_node)
