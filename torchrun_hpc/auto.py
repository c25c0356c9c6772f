"""An import that makes torch.distributed.run understand clusters.

Import it in programs that call ``torch.distributed.run.main`` or ``run``. torchrun_hpc
then plans and patches each launch as ``python -m torchrun_hpc`` does. It derives the
arguments that the program left at torchrun's defaults.

The command ends with an exit code. Programs get an exception instead, as from torch. A
wrong command line, ``--help``, and the end of a dry run raise `SystemExit`.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc import environment
from torchrun_hpc.agent import abort, output, signals
from torchrun_hpc.agent.abort import LaunchState
from torchrun_hpc.errors import EmbeddedLaunchError, LaunchError
from torchrun_hpc.main import Launch
from torchrun_hpc.options import values
from torchrun_hpc.options.command_line import CommandLine, VersionWanted, variable_of
from torchrun_hpc.options.options import Options, read
from torchrun_hpc.planning.mode import choose_mode
from torchrun_hpc.preload.worker import restored_after_import
from torchrun_hpc.reporting import console, streams
from torchrun_hpc.schedulers import process

with restored_after_import():
    from torch.distributed import run as torch_run

    from torchrun_hpc.agent.elastic import AgentStarter
    from torchrun_hpc.agent.patches import registry
    from torchrun_hpc.host import capabilities
    from torchrun_hpc.options import torchrun_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from torchrun_hpc.agent.start import Starter
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.planning.mode import Mode
    from torchrun_hpc.preflight import Preflight

_original_run: Any = torch_run.run
_original_parse: Any = torch_run.parse_args

_OPTIONS = "hpc_explicit"


@contextlib.contextmanager
def _faults_raised(launch: Launch | None = None) -> Iterator[None]:
    """Raise faults as exceptions, instead of reporting them.

    An `EmbeddedLaunchError` is wrong use: the command would have exit code 2. Other
    exceptions are the job's failure: exit code 1.
    """
    try:
        yield
    except LaunchError as error:
        if launch is not None:
            abort.give_up(error, launch, is_silent=True)
        raise EmbeddedLaunchError(error.code, str(error)) from None
    except SystemExit as end:
        if isinstance(end.__cause__, Exception):
            raise end.__cause__ from None
        raise


@functools.wraps(_original_parse)
def _parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if args is None else args
    environ = process.environment()
    with _faults_raised():
        torchrun_parser.parser(environ)  # torch reads its variables here
    with abort.faults_reported(LaunchState()):  # argparse ends the program
        try:
            parsed = torchrun_parser.parse(argv, environ)
        except VersionWanted:
            output.show_version(Options())
        options = torchrun_parser.explicit(parsed, argv, environ)
    setattr(parsed, _OPTIONS, options)
    return parsed


class _Embedded(Launch):
    """The launch of a program that has parsed torchrun's arguments itself."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(shlex.join(["python", *sys.argv]), asks_tasks=True)
        self._args = args

    def parse(self, facts: Preflight) -> CommandLine:
        """Return the options that the program or its user has set."""
        args = self._args
        given = getattr(args, _OPTIONS, None)
        if given is None:
            given = torchrun_parser.changed(args, facts.environ)
        words = args.training_script, *args.training_script_args
        return CommandLine(read(given, words, has_job=facts.job is not None))

    def choose_mode(self, facts: Preflight, line: CommandLine) -> Mode:
        """Return a mode with an agent: the program has called it."""
        return choose_mode(facts, line, has_agent=True)

    def collect(self, facts: Preflight, mode: Mode) -> Inputs:
        """Return what is known of this node."""
        self.prepare_agent(facts)
        return super().collect(facts, mode)

    def make_starter(self, inputs: Inputs) -> Starter:
        """Return the starter of torch's agent."""
        return AgentStarter(inputs, self._args)


@functools.wraps(_original_run)
def _run(args: argparse.Namespace) -> None:
    launch = _Embedded(args)
    with _signals_noted(), _faults_raised(launch):
        environment.drop_empty_options()
        launch.run()


@contextlib.contextmanager
def _signals_noted() -> Iterator[None]:
    streams.open_closed()
    signals.install()
    try:
        yield
    finally:
        signals.uninstall()


try:
    capabilities.check_release()
except LaunchError as _error:
    raise ImportError(f"{_error.code} {_error}") from None
# Each launch refuses an unknown patch name.
_without = values.split_names(
    process.environment().get(variable_of("hpc_without_patches"), "")
)
for _message in registry.left_out(registry.apply_patches(without=_without)):
    console.write(_message, "warning")
torch_run.parse_args = _parse_args
torch_run.run = _run
