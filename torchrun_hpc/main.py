"""A launch, in five stages.

    preflight ──► parse ──► choose mode ──► plan ──► start

A `Launch` stops after the stage at which its user has enough: `describe` after the
plan, the doctor where the nodes meet, ``sites`` after the options.

A plan has two parts. The meeting needs no torch, so that a node without torch can
inform the others. The rest needs torch, except in direct mode.
"""

from __future__ import annotations

import gc
import shlex
import sys
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from torchrun_hpc import environment, wire
from torchrun_hpc.agent import direct, signals
from torchrun_hpc.agent.abort import LaunchState, faults_reported
from torchrun_hpc.agent.inputs import inputs_of
from torchrun_hpc.agent.signals import interrupt_kills
from torchrun_hpc.agent.start import start
from torchrun_hpc.host.resolver import ResolverCheck
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import CommandLine
from torchrun_hpc.options.options import read
from torchrun_hpc.options.values import NONE
from torchrun_hpc.planning.mode import check_started_right, choose_mode, direct_mode
from torchrun_hpc.planning.plan import meet
from torchrun_hpc.preflight import preflight
from torchrun_hpc.preload import SplitOff, imports, keep, read_ahead
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import pmi, process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.agent.start import Starter
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.mode import Mode
    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.preflight import Preflight
    from torchrun_hpc.preload.starter import Preloaded
    from torchrun_hpc.schedulers.job import Job

# Libraries take longest. Torch's also imports numpy's, which no bytecode shows.
_READ_FIRST = ("torch._C", "numpy._core.umath", "torchrun_hpc.agent.elastic")


class Stage(Enum):
    """What a user of a launch needs of it."""

    PARSE = "the options"
    MEET = "where the nodes meet"
    PLAN = "the whole plan"
    START = "the workers"


class Launch(LaunchState):
    """A launch, which stops after the stage at which its user has enough.

    Launches differ in the steps below. Each raises `LaunchError` for wrong use. With
    ``asks_tasks``, the tasks of a process manager exchange their hosts, so all of them
    must launch. ``command`` is the user's, for messages.

    Attributes:
        inputs: The inputs of the plan.
        plan: All decisions.
        starter: What starts the workers.
    """

    inputs: Inputs
    plan: LaunchPlan
    starter: Starter

    def __init__(self, command: str, *, asks_tasks: bool = False) -> None:
        super().__init__()
        self._command, self._asks_tasks = command, asks_tasks

    def run(self, *, upto: Stage = Stage.START) -> None:
        """Go through the stages, up to one of them."""
        facts = self.facts = self.preflight()
        line = self.parse(facts)
        self.options = line.options
        if upto is Stage.PARSE:
            return
        mode = self.mode = self.choose_mode(facts, line)
        inputs = self.inputs = self.collect(facts, mode)
        self.meeting = meet(inputs)
        if upto is Stage.MEET:
            return
        self.starter = self.make_starter(inputs)
        self.plan = self.starter.plan(self.meeting)
        self.meeting = self.plan.meeting  # torch can force another way to meet
        if upto is Stage.PLAN:
            return
        start(self.plan, self.starter)

    def preflight(self) -> Preflight:
        """Return the facts of this process."""
        return preflight(self._command, console.write if self._asks_tasks else None)

    def parse(self, facts: Preflight) -> CommandLine:
        """Return the options, of which some can have no effect."""
        return CommandLine(command_line.of_setup(facts.environ))

    def choose_mode(self, facts: Preflight, line: CommandLine) -> Mode:
        """Return how the workers are started."""
        raise NotImplementedError

    def collect(self, facts: Preflight, mode: Mode) -> Inputs:
        """Return what is known of this node without torch."""
        return inputs_of(mode, facts, self.options)

    def make_starter(self, inputs: Inputs) -> Starter:
        """Return what starts the workers in this mode."""
        raise NotImplementedError

    def prepare_agent(self, facts: Preflight) -> None:
        """Prepare this process to be an agent, before torch is imported."""
        if facts.job is not None and facts.job.pmi_is_open:
            pmi.finalize(facts.environ)  # the workers have no way to it
        self.prepare_to_debug(facts)

    def prepare_to_debug(self, facts: Preflight) -> None:
        """Switch ``--hpc-debug`` on, before torch reads its variables."""
        if self.options.hpc_debug:
            from torchrun_hpc.agent import output  # noqa: PLC0415 - rarely needed

            node_rank = facts.job.node_rank if facts.job else None
            output.switch_on_debug(facts.hostname, node_rank)


class CommandLaunch(Launch):
    """The launch of ``python -m torchrun_hpc``, with its arguments.

    Unless ``is_launch``, it changes nothing in this process. If it ``may_split_off``, a
    fork server can be split off. If the caller passes a ``job``, none is detected.
    """

    def __init__(
        self,
        argv: Sequence[str],
        job: Job | None = None,
        *,
        may_split_off: bool = True,
        is_launch: bool = True,
    ) -> None:
        command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
        super().__init__(command, asks_tasks=is_launch and job is None)
        self._argv, self._job = argv, job
        self._may_split_off, self._is_launch = may_split_off, is_launch

    def preflight(self) -> Preflight:
        """Return the facts of this process, with the job that the caller has passed."""
        facts = super().preflight()
        return replace(facts, job=self._job, problem=None) if self._job else facts

    def parse(self, facts: Preflight) -> CommandLine:
        """Parse the command line, without torch if possible.

        Help needs torch. So does an unknown option, which may be newer, or an
        abbreviation that only an older release accepts.
        """
        argv, job = self._argv, facts.job
        line = command_line.parse(argv, facts.environ, has_job=job is not None)
        self.options = line.options  # its key proves a fault to the other nodes
        may_be_direct = job is not None and job.has_several_tasks
        if line.unknown and any(word.startswith(("--nn", "--stand")) for word in argv):
            may_be_direct = False  # the next word may be the unknown option's value
        is_clear = not (line.unknown or line.problem)
        if line.wants_version:
            from torchrun_hpc.agent import output  # noqa: PLC0415 - rarely needed

            output.show_version(line.options)
        if not line.wants_help and (may_be_direct or is_clear):
            return line
        if line.problem:
            check_started_right(facts)  # clearer than a wrong word, and without torch
        if self._is_launch:
            self.prepare_to_debug(facts)
        imports.import_torch()
        from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415 - needs torch

        args = torchrun_parser.parse(argv, facts.environ)
        given = torchrun_parser.explicit(args, argv, facts.environ)
        words = args.training_script, *args.training_script_args
        options = read(given, words, has_job=job is not None)
        return replace(line, options=options, problem=None)

    def choose_mode(self, facts: Preflight, line: CommandLine) -> Mode:
        """Return how the workers are started, which the whole step decides."""
        return choose_mode(facts, line, _count_workers)

    def collect(self, facts: Preflight, mode: Mode) -> Inputs:
        """Return what is known of this node, and read the coming imports ahead."""
        if self._is_launch and not mode.is_direct:
            self.prepare_agent(facts)
        may_preload = self._may_split_off and not mode.is_direct
        inputs = inputs_of(mode, facts, self.options, may_preload=may_preload)
        if inputs.options.hpc_read_ahead == NONE or mode.is_direct:
            read_ahead.end()
        modules = inputs.preload.modules if inputs.preload else ()
        read_ahead.ask(*_READ_FIRST, *modules)
        return inputs

    def make_starter(self, inputs: Inputs) -> Starter:
        """Return the starter; with an agent, torch's parser has the last word.

        Torch is imported as late as possible. Raise `SplitOff` in the process of a fork
        server.
        """
        if inputs.mode.is_direct:
            return direct.DirectStarter(inputs)
        check = ResolverCheck(inputs.network) if self._is_launch else None
        # The search for garbage takes a sixth of the import (measured, torch 2.13).
        gc.disable()
        try:
            preloaded = _preloaded(inputs) if self._is_launch else None
            imports.import_torch()
            from torchrun_hpc.agent.elastic import AgentStarter  # noqa: PLC0415
            from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415

            gc.freeze()  # modules stay: do not look at them again
        finally:
            gc.enable()
        args = torchrun_parser.parse(self._argv, inputs.environ)
        if self._is_launch:
            streams.forgive_at_exit(sys.stdout)  # --help has already exited
        return AgentStarter(
            inputs, args, preloaded=preloaded, resolver=check, is_command=True
        )


def _preloaded(inputs: Inputs) -> Preloaded | None:
    preload = inputs.preload
    if preload is None or preload.problem or inputs.options.hpc_dry_run:
        return None
    from torchrun_hpc.preload.starter import Preloaded  # noqa: PLC0415 - rarely needed

    preloaded = Preloaded(preload)
    option = ["-m"] if inputs.options.module else []
    preloaded.start([*option, *inputs.options.words])
    return preloaded


def _count_workers(options: Options) -> int:
    """Return how many workers ``--nproc-per-node`` means on this node."""
    if isinstance(options.nproc_per_node, int):
        return options.nproc_per_node
    imports.import_torch()  # to count
    from torchrun_hpc.options import torchrun_parser  # noqa: PLC0415 - needs torch

    return torchrun_parser.number_of_workers(options, options.nproc_per_node)


class WorkerLaunch(Launch):
    """The launch of a script that becomes a worker by `setup_environment`."""

    def preflight(self) -> Preflight:
        """Return the facts of this process, which is alone without a launcher."""
        facts = super().preflight()
        check_started_right(facts)
        return replace(facts, job=facts.job or direct.local_job(facts.hostname))

    def choose_mode(self, facts: Preflight, line: CommandLine) -> Mode:
        """Return direct mode, on one or several nodes."""
        if line.options.problem is not None:
            raise line.options.problem
        return direct_mode(facts.job)

    def make_starter(self, inputs: Inputs) -> Starter:
        """Return the starter that keeps this process."""
        return direct.WorkerStarter(inputs)


def main(argv: Sequence[str] | None = None, job: Job | None = None) -> None:
    """Run ``python -m torchrun_hpc``, by default with this process's arguments.

    It ends with torchrun's exit code, or 2 for a wrong environment or command line. If
    the caller passes no ``job``, it is detected.
    """
    try:
        # If a program passed the arguments, it would continue in each worker.
        words = sys.argv[1:] if argv is None else argv
        _launch(CommandLaunch(words, job, may_split_off=argv is None))
    except SplitOff as split:
        serve = split.serve
        keep(split.__traceback__)  # it refers to the agent's objects, such as processes
        read_ahead.end()  # only its end of the pipe: the launcher still uses it
        signals.uninstall()
    else:
        return
    serve()  # outside, so that a worker's exception has no other as its context
    sys.exit()


def _launch(launch: Launch) -> None:
    with faults_reported(launch):
        with interrupt_kills():
            streams.open_closed()  # first: the next opened file gets their numbers
            streams.forgive_at_exit(sys.stderr)
            signals.install()  # a scheduler may send one at any time
            environment.drop_empty_options()
            launch.run(upto=Stage.PLAN)
            read_ahead.end()  # everything is imported
        start(launch.plan, launch.starter)


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """Return the plan of a launch; see `torchrun_hpc.describe`."""
    launch = CommandLaunch([*argv, "SCRIPT"], is_launch=False)
    with environment.without_empty_options():
        launch.run(upto=Stage.PLAN)
        described = wire.encode(launch.starter.describe(launch.plan))
    plain: dict[str, Any] = wire.from_json(wire.to_line(described))
    return plain


def setup_environment() -> Mapping[str, str]:
    """Set the environment of a worker; see `torchrun_hpc.setup_environment`."""
    if direct.is_set_up(process.environment()):
        return {}
    streams.open_closed()
    launch = WorkerLaunch(shlex.join(["python", *sys.argv]), asks_tasks=True)
    launch.run()
    return {name: str(value.value) for name, value in launch.plan.environment.items()}
