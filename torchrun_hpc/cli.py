"""The order of the stages, from the environment to torch's agent, and exit codes.

This is the one place that reads ``os.environ``, and the one that writes it. Torch is
imported by the second half only: a fault that the environment alone shows is reported
before.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from typing import TYPE_CHECKING

from torchrun_hpc import network, plan, report, schedulers, sites
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.question import Question

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.job import Job
    from torchrun_hpc.question import Value

WRONG_USE = 2


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
        job = this_job()
        _refuse_early(job, argv)
        _launch(job, argv)


def this_job() -> Job | None:
    """Return what the scheduler says about this process."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    return schedulers.detect(os.environ, socket.gethostname(), terminal=terminal)


@contextlib.contextmanager
def faults_reported() -> Iterator[None]:
    """Turn a fault into one message and exit code 2."""
    try:
        yield
    except LaunchError as error:
        if error.here or schedulers.is_first_task(os.environ):
            report.line(f"error: {error}", sys.stderr)
        sys.exit(WRONG_USE)


def _refuse_early(job: Job | None, argv: Sequence[str]) -> None:
    """Refuse what the environment alone shows, within a moment.

    Only --standalone and --nnodes can change the verdict. Whether one of them was
    typed is for torch's parser to say; where something looks like it, we wait for it.
    """
    typed = [word for word in argv if word.startswith(("--st", "--nn"))]
    typed += [n for n in ("PET_STANDALONE", "PET_NNODES") if os.environ.get(n)]
    problem = plan.refusal(job, _command(argv)) if job and not typed else None
    if problem is not None and not {"-h", "--help"}.intersection(argv):
        raise problem


def _launch(job: Job | None, argv: Sequence[str]) -> None:
    # Here, and not above: importing torch takes a second or more.
    from torch.distributed import run as torch_run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousError  # noqa: PLC0415

    from torchrun_hpc import arguments  # noqa: PLC0415

    args, typed = arguments.parse(argv, os.environ)
    prepare(job, args, typed, _command(argv))
    try:
        record(torch_run.run)(args)
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"--rdzv_backend={args.rdzv_backend} needs a package that is not "
            f"installed: {error.name}"
        ) from None
    except RendezvousError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        report.line(
            f"error: the nodes did not meet ({type(error).__name__}): {error}{cause}",
            sys.stderr,
        )
        sys.exit(1)


def prepare(
    job: Job | None,
    args: argparse.Namespace,
    typed: Mapping[str, Value],
    command: str,
) -> None:
    """Make the plan, and put it into torch, its arguments and the environment.

    Args:
        job: What the scheduler says.
        args: Arguments of torch.distributed.run; filled in.
        typed: Of these, what the user set.
        command: The command as typed, for messages.

    Raises:
        LaunchError: Environment or command line cannot work.
    """
    from torchrun_hpc import arguments, patching  # noqa: PLC0415

    site_option = typed.get("hpc_site")
    made = plan.make_plan(
        Question(
            job=job,
            site=sites.find(os.environ, site_option.value if site_option else None),
            network=network.this_node(),
            options=typed,
            environ=os.environ,
            workers=arguments.check(args),
            command=command,
        )
    )
    for name, option in made.options.items():
        setattr(args, name, option.value)
    os.environ.update({k: str(v.value) for k, v in made.environment.items()})
    arguments.configure(args)
    if made.listen is not None and network.port_is_taken(*made.listen):
        address, port = made.listen
        raise LaunchError(
            f"port {port} on {address} is taken by {network.port_holder(port)}. End "
            f"it, or type another port: --rdzv_endpoint={address}:PORT",
            here=True,
        )
    left_out = patching.apply_patches(made)
    if made.speaks:
        report.line(report.start_line(made), sys.stderr)
    for warning in [*made.warnings, *(left_out if made.speaks else ())]:
        report.line(f"warning: {warning}", sys.stderr)


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "torchrun_hpc", *argv])
