"""Direct mode: this process becomes the script, and needs no torch for that."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torchrun_hpc.agent import signals
from torchrun_hpc.agent.start import Starter
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options import script
from torchrun_hpc.planning.messages import NO_SCHEDULER
from torchrun_hpc.preload import imports
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.job import (
    Job,
    LaunchContext,
    Launcher,
    Task,
    as_identifier,
)
from torchrun_hpc.variables import PYTHON_EXEC, RANK, RUN_ID

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description

_NO_LAUNCHER = Launcher(name="", template="{command}")


class WorkerStarter(Starter):
    """Keeps this process as the worker."""

    def run(self, _plan: LaunchPlan) -> None:
        """Tell the process manager when this process ends."""
        job = self.inputs.direct_job
        if job is not None and job.pmi_is_open:
            pmi.finalize_at_end(self.inputs.environ)


class DirectStarter(WorkerStarter):
    """Turns this process into the script."""

    def ready(self, plan: LaunchPlan) -> AbstractContextManager[LaunchPlan]:
        """Raise `LaunchError` if the script does not exist; return a context."""
        options = self.inputs.options
        script.check(options.script, options, self.inputs.environ)
        return super().ready(plan)

    def describe(self, plan: LaunchPlan) -> Description:
        """Describe what this task would do."""
        from torchrun_hpc.reporting import description  # noqa: PLC0415 - slow to import

        torch = imports.torch_version() or "unknown"
        job = self.inputs.job
        return description.description(job, plan, torch, [], self.command())

    def command(self) -> list[str]:
        """Return the command line, as torchrun would build it."""
        options = self.inputs.options
        if options.no_python:
            return [*options.words]
        python = [self.inputs.environ.get(PYTHON_EXEC) or sys.executable, "-u"]
        return [*python, *(["-m"] if options.module else []), *options.words]

    def run(self, plan: LaunchPlan) -> None:
        """Become the script. Raise `LaunchError` if the system cannot run it."""
        super().run(plan)
        words = self.command()
        signals.uninstall()
        try:
            with streams.default_signals():
                os.execvp(words[0], words)  # noqa: S606
        except OSError as error:
            text = f"{words[0]} cannot be run: {error.strerror}"
            raise LaunchError("HPC016", text) from None


def is_set_up(environ: Mapping[str, str]) -> bool:
    """Return whether an agent, or direct mode, has already set the environment."""
    return bool(environ.get(RUN_ID) and environ.get(RANK))


def local_job(hostname: str) -> Job:
    """Describe a process that no scheduler or launcher has started."""
    return Job(
        scheduler=NO_SCHEDULER,
        launch_id=as_identifier(f"{hostname.partition('.')[0]}.{os.getpid()}"),
        context=LaunchContext.STEP,
        launcher=_NO_LAUNCHER,
        nodes=(hostname,),
        node_rank=0,
        task=Task(),
        allocated_nodes=1,
        provenance={},
    )
