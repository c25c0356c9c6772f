"""The order of the stages, from the environment to torch's agent, and exit codes.

This is the one place that writes ``os.environ``, and that hands it to those who read.
Torch is imported by the second half only: a fault that the environment alone shows is
reported before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import socket
import sys
from typing import TYPE_CHECKING

from torchrun_hpc import network, plan, report, schedulers, sites
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.inputs import Inputs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrun_hpc.inputs import Value
    from torchrun_hpc.job import Job

WRONG_USE = 2
FAILED = 1

# With these a user asks for one node, whatever the scheduler says.
_ONE_NODE = ("--standalone", "--nnodes")
_SHORTEST_ABBREVIATION = len("--x")


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m torchrun_hpc``.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: With torchrun's exit code; 2 for a fault of environment or command
            line.
    """
    argv = sys.argv[1:] if argv is None else argv
    with faults_reported():
        job, problem = _look_around(_command(argv))
        if problem is not None and not _may_be_one_node(argv):
            raise problem
        with _without_collection():
            # Here, and not above: importing torch takes a second or more.
            from torch.distributed import run as torch_run  # noqa: PLC0415

            from torchrun_hpc import arguments, checks, patching  # noqa: F401, PLC0415
        args, typed = arguments.parse(argv, os.environ)
        _launch(torch_run.run, args, typed, job, problem, _command(argv))


def launch(
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    typed: Mapping[str, Value] | None,
) -> None:
    """Launch for a program that has parsed its own arguments.

    Args:
        run: ``torch.distributed.run.run``.
        args: Arguments of it; filled in.
        typed: Of these, what the user set; ``None`` to take what differs from
            torchrun's defaults.
    """
    from torchrun_hpc import arguments  # noqa: PLC0415

    command = shlex.join(["python", *sys.argv])
    with faults_reported():
        job, problem = _look_around(command)
        if typed is None:
            typed = arguments.changed(args, os.environ)
        _launch(run, args, typed, job, problem, command)


@contextlib.contextmanager
def faults_reported() -> Iterator[None]:
    """Turn a fault into one message and exit code 2."""
    try:
        yield
    except LaunchError as error:
        if not error.everywhere or schedulers.is_first_task(os.environ):
            report.line(f"error: {error}", sys.stderr)
        sys.exit(WRONG_USE)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Import without looking for garbage: there is none among so many objects.

    Measured: it takes a sixth of the time that importing torch takes.
    """
    gc.disable()
    yield
    gc.freeze()  # nor will there be: not to be looked at again
    gc.enable()


def _look_around(command: str) -> tuple[Job | None, LaunchError | None]:
    """Return the job, and why more than one node cannot be launched from here."""
    # An empty variable is unset, to us as to the workers.
    for name in [n for n in os.environ if n.startswith("PET_") and not os.environ[n]]:
        del os.environ[name]
    terminal = sys.stdin is not None and sys.stdin.isatty()
    try:
        job = schedulers.detect(
            os.environ, socket.gethostname(), terminal=terminal, pid=os.getpid()
        )
    except LaunchError as fault:
        return None, fault
    return job, plan.refusal(job, command) if job else None


def _may_be_one_node(argv: Sequence[str]) -> bool:
    """Say whether the user may have asked for one node, or for help.

    Only torch's parser can tell, and what looks like it waits for that. This decides
    how soon a fault is reported, and nothing else.
    """
    if argv[:1] in (["-h"], ["--help"]):
        return True
    if os.environ.get("PET_STANDALONE", "0") != "0" or os.environ.get("PET_NNODES"):
        return True
    words = (word.partition("=")[0].replace("_", "-") for word in argv)
    return any(
        len(word) > _SHORTEST_ABBREVIATION and option.startswith(word)
        for word in words
        for option in _ONE_NODE
    )


def _launch(  # noqa: PLR0913, PLR0917 - the stages hand on what they found
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    typed: Mapping[str, Value],
    job: Job | None,
    problem: LaunchError | None,
    command: str,
) -> None:
    """Plan the launch, and hand over to torch."""
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415

    if problem is not None and not plan.one_node_is_typed(typed):
        raise problem
    _prepare(args, typed, job, command)
    try:
        record(run)(args)
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"--rdzv_backend={args.rdzv_backend} needs a package that is not "
            f"installed: {error.name}"
        ) from None
    except RendezvousError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        report.line(
            f"error: the rendezvous at {args.rdzv_endpoint} failed, or was lost; see "
            f"also what its host says ({type(error).__name__}): {error}{cause}",
            sys.stderr,
        )
        sys.exit(FAILED)


def _prepare(
    args: argparse.Namespace,
    typed: Mapping[str, Value],
    job: Job | None,
    command: str,
) -> None:
    """Make the plan, and put it into torch, its arguments and the environment."""
    from torchrun_hpc import checks, patching  # noqa: PLC0415

    made = plan.make_plan(
        Inputs(
            job=job,
            site=sites.find(os.environ, typed.get("hpc_site")),
            network=network.this_node(),
            options=typed,
            environ=os.environ,
            workers=checks.number_of_workers(args, typed),
            command=command,
        )
    )
    checks.check(args, typed)
    for name, option in made.options.items():
        setattr(args, name, option.value)
    os.environ.update({k: str(v.value) for k, v in made.environment.items()})
    checks.configure(args)
    if made.listen is not None:
        address, port = made.listen
        problem = network.port_problem(address, port)
        if problem:
            raise LaunchError(
                f"port {port} on {address} cannot be used: {problem}. Type another "
                f"port: --rdzv_endpoint={address}:PORT"
            )
    left_out = patching.apply_patches(made)
    if made.speaks:
        report.line(report.start_line(made), sys.stderr)
    for warning in [*made.warnings, *(left_out if made.speaks else ())]:
        report.line(f"warning: {warning}", sys.stderr)


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "torchrun_hpc", *argv])
