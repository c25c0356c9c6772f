"""A launch, in five stages.

    preflight ──► parse ──► choose mode ──► plan ──► start

`main` goes through all of them. Others stop earlier: `describe` after the plan, the dry
run where the workers would be started, ``torchrun_hpc.sites`` after preflight.

A plan has two parts. Where the nodes meet is decided without torch, so that a node that
has none can tell the others there. The rest needs torch, but for direct mode.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import wire
from torchrun_hpc.launching import direct, environment, signals, starters
from torchrun_hpc.launching.abort import Known, faults_reported
from torchrun_hpc.launching.inputs import inputs_of, node_of
from torchrun_hpc.launching.start import start
from torchrun_hpc.options import arguments, command_line
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import read
from torchrun_hpc.planning import preload
from torchrun_hpc.planning.mode import (
    Mode,
    check_started_right,
    choose_mode,
    direct_mode,
)
from torchrun_hpc.planning.plan import make_plan, meet
from torchrun_hpc.preflight import preflight
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process
from torchrun_hpc.worker import SplitOff

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.launching.start import Starter
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.preflight import Preflight


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
        seen = known.preflight = preflight(command, console.write)
        line = parse(argv, seen)
        known.options = line.options
        mode = known.mode = choose_mode(seen, line, starters.count_workers)
        if not mode.is_direct:
            starters.prepare_agent(seen, line.options)
        inputs = planned_from(mode, seen, line)
        meeting = known.meeting = meet(inputs)
        if not may_split_off:
            inputs = replace(inputs, preload=None)
        starter = starters.starter_of(inputs, seen, line, argv)
        start(plan_of(inputs, meeting, starter), starter)


def parse(argv: Sequence[str], seen: Preflight) -> CommandLine:
    """Parse the command line, without torch if that is possible.

    It is not for help, nor for what is not understood here: an option may be newer, or
    an abbreviation that only an older release accepts.

    Raises:
        LaunchError: It is wrong; or there is no torch.
        SystemExit: It asks for help.
    """
    has_job = seen.job is not None
    line = command_line.parse(argv, seen.environ, has_job=has_job)
    may_be_direct = seen.job is not None and seen.job.has_several_tasks
    if line.unknown and any(word.startswith(("--nn", "--stand")) for word in argv):
        may_be_direct = False  # what follows an unknown option may be its value
    is_clear = not (line.unknown or line.problem)
    if not line.wants_help and (may_be_direct or is_clear):
        return line
    if line.problem:
        check_started_right(seen)  # rather than a wrong word, and without torch
    starters.prepare_to_debug(seen, line.options)
    starters.import_torch()
    from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415

    args = torchrun_parser.parse(argv, seen.environ)
    given = torchrun_parser.explicit(args, argv, seen.environ)
    return replace(line, options=read(given, has_job=has_job), problem=None)


def planned_from(mode: Mode, seen: Preflight, line: CommandLine) -> Inputs:
    """Collect what a plan is made from, as far as it is known without torch.

    Raises:
        LaunchError: There is no such site.
    """
    inputs = inputs_of(mode, seen, line.options, seen.command)
    inputs = replace(inputs, node=node_of(inputs))
    # Without a script, a program has called torch, and has imported it.
    planned = preload.plan(inputs, line.script) if line.script else None
    return replace(inputs, preload=planned)


def plan_of(inputs: Inputs, meeting: Meeting, starter: Starter) -> LaunchPlan:
    """Make the plan; torch is imported, if there is to be an agent.

    Raises:
        LaunchError: Something that the user typed, or set, cannot work.
    """
    inputs = replace(inputs, node=starter.measured(inputs))
    plan = make_plan(inputs, meeting)
    starter.apply_options(plan)
    return plan


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """Describe what would be launched; see `torchrun_hpc.describe`."""
    argv = [*argv, "SCRIPT"]
    with environment.without_empty_options():
        seen = preflight(shlex.join(["python", "-m", "torchrun_hpc", *argv]))
        line = parse(argv, seen)
        mode = choose_mode(seen, line, starters.count_workers)
        inputs = planned_from(mode, seen, line)
        meeting = meet(inputs)
        starter = starters.starter_of(inputs, seen, line, argv, is_launch=False)
        described = wire.encode(starter.describe(plan_of(inputs, meeting, starter)))
    found: dict[str, Any] = wire.from_json(wire.to_line(described))
    return found


def setup_environment() -> Mapping[str, str]:
    """Set the environment of a worker; see `torchrun_hpc.setup_environment`."""
    if direct.is_set_up(process.environment()):
        return {}
    streams.open_closed()
    seen = preflight(shlex.join(["python", *sys.argv]), console.write)
    check_started_right(seen)
    return set_up_worker(seen)


def set_up_worker(seen: Preflight) -> Mapping[str, str]:
    """Set the environment of this process, which is a worker, and return it.

    Raises:
        LaunchError: It cannot work.
    """
    job = seen.job or direct.local_job(seen.hostname)
    seen = replace(seen, job=job)
    line = CommandLine(arguments.of_setup(seen.environ))
    if line.options.problem is not None:
        raise line.options.problem
    inputs = planned_from(direct_mode(job), seen, line)
    starter = direct.WorkerStarter(seen, job)
    plan = plan_of(inputs, meet(inputs), starter)
    start(plan, starter)
    return {name: str(value.value) for name, value in plan.environment.items()}
