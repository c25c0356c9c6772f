"""A launch, in five stages.

    preflight ──► parse ──► choose mode ──► plan ──► start

`describe` stops after the plan, the dry run before the start of the workers.

A plan has two parts. The meeting needs no torch, so that a node without torch can
inform the others. The rest needs torch, except in direct mode.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc import environment, wire
from torchrun_hpc.agent import direct, signals, starters
from torchrun_hpc.agent.abort import LaunchState, faults_reported
from torchrun_hpc.agent.death_signals import interrupt_kills
from torchrun_hpc.agent.inputs import inputs_of
from torchrun_hpc.agent.start import start
from torchrun_hpc.options import command_line
from torchrun_hpc.options.options import read
from torchrun_hpc.options.values import NONE
from torchrun_hpc.planning.mode import (
    check_started_right,
    choose_mode,
    direct_mode,
)
from torchrun_hpc.planning.plan import meet
from torchrun_hpc.preflight import preflight
from torchrun_hpc.preload import SplitOff, imports, keep, read_ahead
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.agent.start import Starter
    from torchrun_hpc.options.command_line import CommandLine
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.schedulers.job import Job

# Libraries take longest. Torch's also imports numpy's, which no bytecode shows.
_READ_FIRST = ("torch._C", "numpy._core.umath", "torchrun_hpc.agent.elastic")


def main(argv: Sequence[str] | None = None, job: Job | None = None) -> None:
    """Run ``python -m torchrun_hpc``, by default with this process's arguments.

    It ends with torchrun's exit code, or 2 for a wrong environment or command line. If
    ``job`` is not known, it is detected.
    """
    try:
        # If a program passed the arguments, it would continue in each worker.
        words = sys.argv[1:] if argv is None else argv
        _launch(words, job, may_split_off=argv is None)
    except SplitOff as split:
        serve = split.serve
        keep(split.__traceback__)  # it refers to the agent's objects, such as processes
        read_ahead.end()  # only its end of the pipe: the launcher still uses it
        signals.uninstall()
    else:
        return
    serve()  # outside, so that a worker's exception has no other as its context
    sys.exit()


def _launch(argv: Sequence[str], job: Job | None, *, may_split_off: bool) -> None:
    known = LaunchState()
    with faults_reported(known):
        with interrupt_kills():
            streams.open_closed()  # first: the next opened file gets their numbers
            streams.forgive_at_exit(sys.stderr)
            signals.install()  # a scheduler may send one at any time
            environment.drop_empty_options()
            planned = _planned(argv, known, job, may_split_off=may_split_off)
        start(*planned)


def _planned(
    argv: Sequence[str],
    known: LaunchState,
    job: Job | None = None,
    *,
    may_split_off: bool = True,
    is_launch: bool = True,
) -> tuple[LaunchPlan, Starter]:
    """Go through the stages up to the plan; only a launch changes this process."""
    command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
    seen = preflight(command, console.write if is_launch and job is None else None)
    if job is not None:
        seen = replace(seen, job=job, problem=None)
    known.preflight = seen
    line = parse(argv, seen, known)
    known.options = line.options
    mode = known.mode = choose_mode(seen, line, starters.count_workers)
    if is_launch and not mode.is_direct:
        starters.prepare_agent(seen, line.options)
    may_preload = may_split_off and not mode.is_direct
    inputs = inputs_of(mode, seen, line.options, may_preload=may_preload)
    if inputs.options.hpc_read_ahead == NONE or mode.is_direct:
        read_ahead.end()
    read_ahead.ask(*_READ_FIRST, *(inputs.preload.modules if inputs.preload else ()))
    meeting = known.meeting = meet(inputs)
    starter = starters.starter_of(inputs, argv, is_launch=is_launch)
    plan = starter.plan(meeting)
    read_ahead.end()  # everything is imported
    known.meeting = plan.meeting  # torch can force another way to meet
    return plan, starter


def parse(argv: Sequence[str], seen: Preflight, known: LaunchState) -> CommandLine:
    """Parse the command line, without torch if possible; fill in ``known``.

    Help needs torch. So does an unknown option, which may be newer, or an abbreviation
    that only an older release accepts.
    """
    has_job = seen.job is not None
    line = command_line.parse(argv, seen.environ, has_job=has_job)
    known.options = line.options  # its key proves a fault to the other nodes
    may_be_direct = seen.job is not None and seen.job.has_several_tasks
    if line.unknown and any(word.startswith(("--nn", "--stand")) for word in argv):
        may_be_direct = False  # the next word may be the unknown option's value
    is_clear = not (line.unknown or line.problem)
    if line.wants_version:
        from torchrun_hpc.agent import output  # noqa: PLC0415 - rarely needed

        output.show_version(line.options)
    if not line.wants_help and (may_be_direct or is_clear):
        return line
    if line.problem:
        check_started_right(seen)  # more helpful than a wrong word, and without torch
    starters.prepare_to_debug(seen, line.options)
    imports.import_torch()
    from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415

    args = torchrun_parser.parse(argv, seen.environ)
    given = torchrun_parser.explicit(args, argv, seen.environ)
    words = args.training_script, *args.training_script_args
    return replace(line, options=read(given, words, has_job=has_job), problem=None)


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """Return the plan of a launch; see `torchrun_hpc.describe`."""
    with environment.without_empty_options():
        plan, starter = _planned([*argv, "SCRIPT"], LaunchState(), is_launch=False)
        described = wire.encode(starter.describe(plan))
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
    """Set the environment of this worker, and return it."""
    job = seen.job or direct.local_job(seen.hostname)
    seen = replace(seen, job=job)
    options = command_line.of_setup(seen.environ)
    if options.problem is not None:
        raise options.problem
    inputs = inputs_of(direct_mode(job), seen, options)
    starter = direct.WorkerStarter(inputs)
    plan = starter.plan(meet(inputs))
    start(plan, starter)
    return {name: str(value.value) for name, value in plan.environment.items()}
