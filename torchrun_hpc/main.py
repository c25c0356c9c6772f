"""A launch, in five stages.

    preflight ──► parse ──► choose mode ──► plan ──► start

`main` walks all of them. What only wants to know stops where it has what it needs:
`describe` behind the plan, the dry run before the start, ``torchrun_hpc.sites`` behind
preflight. Torch is imported behind the choice of the mode, if the mode has an agent.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import network, sites
from torchrun_hpc.commandline import command_line
from torchrun_hpc.launching import direct, environment, signals
from torchrun_hpc.launching.abort import Known, faults_reported
from torchrun_hpc.launching.preflight import preflight
from torchrun_hpc.launching.start import start
from torchrun_hpc.launching.starters import count_workers, parse, starter_of
from torchrun_hpc.planning.inputs import Inputs
from torchrun_hpc.planning.mode import (
    Mode,
    check_started_right,
    choose_mode,
    direct_mode,
)
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.reporting import streams
from torchrun_hpc.schedulers.process import this_process

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
    # First of all: before anything else is opened.
    streams.open_closed()
    streams.forgive_at_exit(sys.stderr)
    # And this: a scheduler may send one at any time.
    signals.install()
    argv = sys.argv[1:] if argv is None else argv
    known = Known()
    with faults_reported(known):
        environment.drop_empty_options()
        command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
        seen = known.preflight = preflight(command, ask=True)
        line = parse(argv, seen)
        known.options = line.options
        mode = choose_mode(seen, line, count_workers)
        starter = starter_of(mode, seen, line, argv)
        inputs, plan = plan_of(mode, seen, starter)
        known.plan = plan
        start(inputs, plan, starter)


def plan_of(mode: Mode, seen: Preflight, starter: Starter) -> tuple[Inputs, LaunchPlan]:
    """Make the plan, and return it with what it was made from.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    host = seen.job.a_node if seen.job else seen.hostname
    inputs = Inputs(
        mode=mode,
        job=seen.job,
        site=sites.find(seen.environ, host, starter.options.get("hpc_site")),
        network=network.this_node(),
        options=starter.options,
        environ=seen.environ,
        command=seen.command,
        hostname=seen.hostname,
        **starter.measured(),
    )
    plan = make_plan(inputs)
    starter.check(plan)
    return inputs, plan


def describe(argv: Sequence[str]) -> Description:
    """Describe what would be launched; see `torchrun_hpc.describe`."""
    argv = [*argv, "SCRIPT"]
    with environment.without_empty_options():
        seen = preflight(shlex.join(["python", "-m", "torchrun_hpc", *argv]))
        line = parse(argv, seen)
        mode = choose_mode(seen, line, count_workers)
        starter = starter_of(mode, seen, line, argv, is_launch=False)
        inputs, plan = plan_of(mode, seen, starter)
        return starter.describe(inputs, plan)


def setup_environment() -> Mapping[str, str]:
    """Set the environment of a worker; see `torchrun_hpc.setup_environment`."""
    if direct.is_set_up(this_process().environ):
        return {}
    streams.open_closed()
    seen = preflight(shlex.join(["python", *sys.argv]), ask=True)
    check_started_right(seen)
    return set_up_worker(seen)


def set_up_worker(seen: Preflight) -> Mapping[str, str]:
    """Set the environment of this process, which is a worker, and return it.

    Raises:
        LaunchError: It cannot work.
    """
    job = seen.job or direct.job_of_nobody(seen.hostname)
    seen = replace(seen, job=job)
    options = command_line.parse([], seen.environ).options
    names = ("hpc_site", "hpc_omp_threads")
    ours = {name: options[name] for name in names if name in options}
    starter = direct.WorkerStarter(seen, ours)
    inputs, plan = plan_of(direct_mode(job), seen, starter)
    start(inputs, plan, starter)
    return {name: str(value.value) for name, value in plan.environment.items()}
