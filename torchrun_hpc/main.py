"""A launch, in five stages.

    preflight ──► parse ──► choose mode ──► plan ──► start

`main` goes through all of them. Others stop earlier: `describe` after the plan, the dry
run where the workers would be started, ``torchrun_hpc.sites`` after preflight. Torch is
imported after the mode is chosen, and not at all in direct mode.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import sites
from torchrun_hpc.commandline.command_line import CommandLine
from torchrun_hpc.commandline.options import options_of_setup
from torchrun_hpc.host import network, topology
from torchrun_hpc.launching import direct, environment, signals
from torchrun_hpc.launching.abort import Known, faults_reported
from torchrun_hpc.launching.preflight import preflight
from torchrun_hpc.launching.start import start
from torchrun_hpc.launching.starters import count_workers, parse, starter_of
from torchrun_hpc.planning import binding, preload
from torchrun_hpc.planning.inputs import Inputs
from torchrun_hpc.planning.mode import (
    Mode,
    check_started_right,
    choose_mode,
    direct_mode,
)
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.planning.resources import likely_workers
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers import process
from torchrun_hpc.worker import SplitOff

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.launching.start import Starter
    from torchrun_hpc.planning.launch_plan import LaunchPlan
    from torchrun_hpc.planning.preflight import Preflight
    from torchrun_hpc.reporting.description import Description


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m torchrun_hpc``.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: With torchrun's exit code; 2 for a fault of environment or command
            line.
    """
    try:
        # A program that has given the arguments would go on in each worker.
        _launch(sys.argv[1:] if argv is None else argv, may_split_off=argv is None)
    except SplitOff as split:
        serve = split.serve
    else:
        return
    serve()  # outside, so that no exception of a worker has another as its context
    sys.exit()


def _launch(argv: Sequence[str], *, may_split_off: bool) -> None:
    """Walk all stages."""
    streams.open_closed()  # before anything else is opened, and gets their numbers
    streams.forgive_at_exit(sys.stderr)
    signals.install()  # a scheduler may send one at any time
    known = Known()
    with faults_reported(known):
        environment.drop_empty_options()
        command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
        seen = known.preflight = preflight(command, exchange=True)
        line = parse(argv, seen)
        known.options = line.options
        mode = known.mode = choose_mode(seen, line, count_workers)
        inputs = inputs_of(mode, seen, line)
        if not may_split_off:
            inputs = replace(inputs, preload=None)
        starter = starter_of(inputs, seen, line, argv)
        inputs, plan = plan_of(inputs, starter)
        known.plan = plan
        start(inputs, plan, starter)


def inputs_of(mode: Mode, seen: Preflight, line: CommandLine) -> Inputs:
    """Collect what a plan is made from, as far as it is known without torch.

    Raises:
        LaunchError: There is no such site, or what is to be preloaded is no module.
    """
    cpus, options = len(os.sched_getaffinity(0)), line.options
    workers, site = options.get("nproc_per_node"), options.get("hpc_site")
    gpus = 0 if mode.is_direct else topology.gpu_files()  # torch counts them, later
    known = sites.find(seen.environ, seen.site_host, site)
    inputs = Inputs(
        mode=mode,
        job=seen.job,
        site=known,
        network=network.this_node(),
        options=options,
        environ=seen.environ,
        workers=likely_workers(workers, seen.environ, cpus, gpus),
        cpus=cpus,
        gpus=0,
        command=seen.command,
        hostname=seen.hostname,
    )
    if not mode.is_direct and binding.wanted(options, known) is not None:
        inputs = replace(inputs, topology=topology.this_node())
    # Without a script, a program has called torch, and has imported it.
    planned = preload.plan(inputs, line.script) if line.script else None
    return replace(inputs, preload=planned)


def plan_of(inputs: Inputs, starter: Starter) -> tuple[Inputs, LaunchPlan]:
    """Make the plan, and return it with what it was made from.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    # Workers, GPUs, and what else there is.
    inputs = replace(inputs, options=starter.options, **starter.measure(inputs))
    plan = make_plan(inputs)
    starter.apply_options(plan)
    return inputs, plan


def describe(argv: Sequence[str]) -> Description:
    """Describe what would be launched; see `torchrun_hpc.describe`."""
    argv = [*argv, "SCRIPT"]
    with environment.without_empty_options():
        seen = preflight(shlex.join(["python", "-m", "torchrun_hpc", *argv]))
        line = parse(argv, seen)
        mode = choose_mode(seen, line, count_workers)
        inputs = inputs_of(mode, seen, line)
        starter = starter_of(inputs, seen, line, argv, is_launch=False)
        inputs, plan = plan_of(inputs, starter)
        return starter.describe(inputs, plan)


def setup_environment() -> Mapping[str, str]:
    """Set the environment of a worker; see `torchrun_hpc.setup_environment`."""
    if direct.is_set_up(process.environment()):
        return {}
    streams.open_closed()
    seen = preflight(shlex.join(["python", *sys.argv]), exchange=True)
    check_started_right(seen)
    return set_up_worker(seen)


def set_up_worker(seen: Preflight) -> Mapping[str, str]:
    """Set the environment of this process, which is a worker, and return it.

    Raises:
        LaunchError: It cannot work.
    """
    job = seen.job or direct.job_of_nobody(seen.hostname)
    seen = replace(seen, job=job)
    line = CommandLine(options_of_setup(seen.environ))
    starter = direct.WorkerStarter(seen, job, line.options)
    inputs, plan = plan_of(inputs_of(direct_mode(job), seen, line), starter)
    start(inputs, plan, starter)
    return {name: str(value.value) for name, value in plan.environment.items()}
