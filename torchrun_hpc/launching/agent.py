"""The second half of a launch: from the command line to torch's agent.

This is where the plan is written to ``os.environ``, and where it is handed to those who
read it. Before torch is imported, `cli` takes empty variables out of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from typing import TYPE_CHECKING

import torch
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousError

from torchrun_hpc import main, network, schedulers, sites
from torchrun_hpc.commandline import rdzv_conf, torchrun_parser, validation
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.launching import abort, debug, direct, dry_run, exit_status, signals
from torchrun_hpc.launching.abort import Known
from torchrun_hpc.planning import plan
from torchrun_hpc.planning.inputs import SCHEDULER, Inputs
from torchrun_hpc.rendezvous import handler, messages
from torchrun_hpc.reporting import description, report, streams
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches import registry

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.planning.plan import LaunchPlan
    from torchrun_hpc.reporting.description import Description
    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.setting import Setting

FAILED = 1
INTERRUPTED = 130  # as a shell says it: 128 and SIGINT


def launch(known: Known, problem: LaunchError | None, command: str) -> None:
    """Launch what a command line says.

    Args:
        known: The command line, and what the scheduler says.
        problem: Why only one node can be launched from here, if that is so.
        command: The command as typed, for messages.
    """
    args, explicit = torchrun_parser.parse(known.argv, os.environ)
    streams.forgive_at_exit(sys.stdout)  # but for --help
    if args.hpc_debug and not debug.is_on():
        debug.start_again(os.environ)
    _check_possible(problem, explicit)
    _launch(torch_run.run, args, explicit, known, command)


def launch_parsed(
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    explicit: Mapping[str, Setting] | None,
) -> None:
    """Launch for a program that has parsed its own arguments.

    Args:
        run: ``torch.distributed.run.run``.
        args: Arguments of it; filled in.
        explicit: Of these, what the user set; ``None`` to take what differs from
            torchrun's defaults.

    Raises:
        LaunchError: Wrong use.
        SystemExit: The job has failed; its cause is the exception that says why.
            Without one: a signal while there were no workers, or a dry run.
    """
    command = shlex.join(["python", *sys.argv])
    streams.open_closed()
    signals.install()
    known = Known()
    with contextlib.ExitStack() as stack, abort.others_told(known):
        stack.callback(signals.uninstall)
        known.job, problem = main.look_around(command, ask=True)
        job = known.job
        if job is not None and job.pmi_is_open:
            pmi.finalize(os.environ)
        if explicit is None:
            torchrun_parser.add_ours(args)
            explicit = torchrun_parser.changed(args, os.environ)
        _check_possible(problem, explicit)
        _launch(run, args, explicit, known, command)


def describe(argv: Sequence[str]) -> Description:
    """Describe what would be launched; see `torchrun_hpc.describe`."""
    command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
    empty = {name: value for name, value in os.environ.items() if not value}
    capabilities.check_release()
    try:
        job, problem = main.look_around(command)
        line = direct.line_of(argv, job)
        if job is not None and line is not None:
            return direct.described(line, *direct.plan_of(line, job, command))
        args, explicit = torchrun_parser.parse(argv, os.environ)
        _check_possible(problem, explicit)
        inputs, made = _plan(args, explicit, job, command)
        return _description(args, inputs, made, registry.examine())
    finally:
        os.environ.update(empty)


def _check_possible(
    problem: LaunchError | None, explicit: Mapping[str, Setting]
) -> None:
    if problem is not None and not plan.asks_for_one_node(explicit):
        raise problem


def _launch(
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    explicit: Mapping[str, Setting],
    known: Known,
    command: str,
) -> None:
    """Plan the launch, and hand over to torch."""
    job, known.options = known.job, explicit
    if getattr(args, "hpc_debug", False):
        # Before, if it is to be in time for torch; here for a program of its own.
        rank = job.node_rank if job else None
        debug.switch_on(os.environ, socket.gethostname(), rank)
    inputs, made = _plan(args, explicit, job, command)
    known.plan = made
    os.environ.update({k: str(v.value) for k, v in made.environment.items()})
    try:
        with _rendezvous(args, made):
            validation.configure(args)
            _check_port(made)
            outcomes = registry.apply_patches(made)
            if getattr(args, "hpc_dry_run", None):
                sys.exit(_dry_run(args, inputs, made, outcomes))
            _announce(made, registry.left_out(outcomes))
            signals.leave_to_torch(
                capabilities.option(args, "signals_to_handle").split(",")
            )
            signals.begin(scheduled=job is not None)
            record(run)(args)
    except ImportError as error:  # a backend's package; torch has a stub for one
        raise LaunchError(
            "HPC017",
            f"--rdzv_backend={args.rdzv_backend} needs a package that is not "
            f"installed: {error.name or error}",
        ) from None
    except handler.JobFailedError as error:  # in a dry run
        report.line(messages.failed(error.failure, made), sys.stderr, "error")
        raise SystemExit(FAILED) from error
    except handler.CoordinatorMissingError as error:
        report.line(error.said, sys.stderr, "error")
        raise SystemExit(FAILED) from error
    except RendezvousError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        text = (
            f"the rendezvous at {args.rdzv_endpoint} failed, or was lost; see also "
            f"what its host says ({type(error).__name__}): {error}{cause}"
        )
        report.line(Message("HPC085", text), sys.stderr, "error")
        raise SystemExit(FAILED) from error


def _plan(
    args: argparse.Namespace,
    explicit: Mapping[str, Setting],
    job: Job | None,
    command: str,
) -> tuple[Inputs, LaunchPlan]:
    """Make the plan, and fill it into the arguments of torchrun."""
    host = job.a_node if job else socket.gethostname()
    environ = schedulers.environment()
    inputs = Inputs(
        job=job,
        site=sites.find(environ, host, explicit.get("hpc_site")),
        network=network.this_node(),
        options=explicit,
        environ=environ,
        workers=validation.number_of_workers(args, explicit),
        cpus=len(os.sched_getaffinity(0)),
        gpus=validation.number_of_gpus(),
        command=command,
        hostname=socket.gethostname(),
        of_release=capabilities.variables(),
    )
    made = plan.make_plan(inputs)
    for name, option in made.options.items():
        setattr(args, name, option.value)
    validation.check(args, explicit)
    return inputs, made


@contextlib.contextmanager
def _rendezvous(args: argparse.Namespace, made: LaunchPlan) -> Iterator[None]:
    """Let torch find our rendezvous, if it is the one."""
    if made.backend != SCHEDULER or getattr(args, "hpc_dry_run", None):
        yield
        return
    creator = handler.register(made, args.max_restarts)
    names = capabilities.option(args, "signals_to_handle")
    backend, args.rdzv_backend = args.rdzv_backend, SCHEDULER
    try:
        with exit_status.together(made, creator, names):
            yield
    finally:
        args.rdzv_backend = backend  # a program may launch with them once more


def _check_port(made: LaunchPlan) -> None:
    if made.listen is None or len(made.ports) > 1 or made.may_join:
        return
    address, port = made.listen
    problem = network.port_problem(address, port)
    if problem:
        raise LaunchError(
            "HPC055",
            f"port {port} on {address} cannot be used: {problem}. Type another "
            f"port: --rdzv_endpoint={network.join_endpoint(address, 'PORT')}",
        )


def _dry_run(
    args: argparse.Namespace,
    inputs: Inputs,
    made: LaunchPlan,
    outcomes: Sequence[registry.Outcome],
) -> int:
    """Print what would be done, and return the exit code."""
    explicit = inputs.options.get("rdzv_conf")
    limit = rdzv_conf.seconds(explicit, made.backend, "join_timeout", dry_run.LIMIT)
    own = _description(args, inputs, made, outcomes)
    try:
        complete = dry_run.print_dry_run(args, made, own, limit)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0 if complete else FAILED


def _description(
    args: argparse.Namespace,
    inputs: Inputs,
    made: LaunchPlan,
    outcomes: Sequence[registry.Outcome],
) -> Description:
    command = torchrun_parser.plain_command(args, {**inputs.options, **made.options})
    patched = [registry.described(outcome) for outcome in outcomes]
    return description.description(inputs, made, torch.__version__, patched, command)


def _announce(made: LaunchPlan, left_out: Sequence[Message]) -> None:
    """Print the start line, and the warnings."""
    if made.is_reporter:
        report.line(report.start_line(made), sys.stderr)
    own = [*made.warnings]
    opens_store = made.listen is not None and made.backend != SCHEDULER
    is_shared = made.nodes > 1 or made.elastic
    if is_shared and opens_store and not capabilities.LISTENING_SOCKET.present:
        own.append(capabilities.warning_of_all_interfaces())
    shared = [*made.advice, *left_out] if made.is_reporter else []
    for warning in [*own, *shared]:
        report.line(warning, sys.stderr, "warning")
