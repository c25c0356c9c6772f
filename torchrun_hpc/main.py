"""The first half of a launch: what the environment alone shows, and exit codes.

Torch is imported by the second half, `launching`, only: a fault that no option can
cure is reported before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import socket
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message, count
from torchrun_hpc.launching import abort, debug, direct, signals
from torchrun_hpc.launching.abort import Known
from torchrun_hpc.planning import plan
from torchrun_hpc.reporting import report, streams
from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.process import BOOT_ID, read, this_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrun_hpc.schedulers.job import Job

WRONG_USE = 2

# With these a user asks for one node, whatever the scheduler says.
_ONE_NODE = ("--standalone", "--nnodes")
_SHORTEST_ABBREVIATION = len("--x")

# How many names of nodes a message quotes.
_SHOWN = 10


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
    known = Known(argv)
    with faults_reported(known):
        command = shlex.join(["python", "-m", "torchrun_hpc", *argv])
        job, problem = look_around(command, ask=True)
        known.job = job
        if problem is not None and not _may_be_one_node(argv):
            raise problem
        line = direct.line_of(argv, job)
        if job is not None and line is not None:
            direct.launch(line, job, command)
        if job is not None and job.pmi_is_open:
            pmi.finalize(os.environ)  # the workers have no way to it
        if debug.is_wanted(os.environ):
            rank = job.node_rank if job else None
            debug.switch_on(os.environ, socket.gethostname(), rank)
        _second_half().launch(known, problem, command)


def setup_environment() -> dict[str, str]:
    """Set the environment of a worker; see `torchrun_hpc.setup_environment`."""
    if direct.is_set_up(os.environ):
        return {}
    streams.open_closed()
    command = shlex.join(["python", *sys.argv])
    job, problem = look_around(command, ask=True)
    if problem is not None:
        raise problem
    return direct.set_up(job, socket.gethostname(), command)


@contextlib.contextmanager
def faults_reported(known: Known | None = None) -> Iterator[None]:
    """Turn a fault into one message and exit code 2; let the other nodes know.

    Args:
        known: What the launch has found out, by then.
    """
    try:
        yield
    except LaunchError as fault:
        abort.give_up(fault, known or Known())
        sys.exit(WRONG_USE)


def look_around(
    command: str, *, ask: bool = False
) -> tuple[Job | None, LaunchError | None]:
    """Return the job, and why more than one node cannot be launched from here.

    Args:
        command: The command as typed, for the message.
        ask: Whether to ask the process manager, as all other tasks do.
    """
    # An empty variable is unset, to us as to the workers.
    for name in [n for n in os.environ if n.startswith("PET_") and not os.environ[n]]:
        del os.environ[name]
    try:
        process = this_process(_exchange if ask else None, command)
        job = schedulers.detect(schedulers.weigh(process))
    except LaunchError as fault:
        return None, fault
    return job, plan.refusal(job, command) if job else None


def _exchange(environ: Mapping[str, str]) -> pmi.Exchanged | None:
    """Ask the process manager, and say so if others are late.

    Raises:
        LaunchError: There should be one, and it does not answer.
    """

    def wait(seconds: float) -> None:
        waited = f"for {_other_tasks(environ)} to start, for {seconds:.0f} s"
        if seconds > plan.JOIN_TIMEOUT:
            raise LaunchError(
                "HPC166",
                f"waited {waited}: one of them has ended, or its node does not answer. "
                "Look at what each node said. The launcher has to start torchrun_hpc "
                "in all of its tasks",
            )
        if not schedulers.task_rank(environ):
            text = f"waiting {waited}; the limit is {plan.JOIN_TIMEOUT} s"
            report.line(Message("HPC131", text), sys.stderr)

    boot = read(BOOT_ID) or ""  # for machines that are all called localhost
    said = pmi.exchange(environ, socket.gethostname(), wait, boot)
    if said is None and pmi.is_announced(environ):
        name = pmi.DESCRIPTOR if environ.get(pmi.DESCRIPTOR) else pmi.PORT
        raise LaunchError(
            "HPC138",
            f"{name}={environ[name]} does not lead to a process manager that answers, "
            "so that the tasks cannot tell each other where they are: has a container "
            "or a wrapper closed it? Let it through; or unset it, and export "
            "MASTER_ADDR",
        )
    return said


def _other_tasks(environ: Mapping[str, str]) -> str:
    """Say how many other tasks there are, and on which nodes they may be."""
    tasks = count(int(environ[pmi.SIZE]) - 1, "other task")
    nodes = schedulers.nodes_of_job(schedulers.weigh(this_process()))
    if not nodes:
        return tasks
    shown = ", ".join(nodes[:_SHOWN]) + (", ..." if len(nodes) > _SHOWN else "")
    return f"{tasks} on the nodes of the job ({shown})"


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


def _second_half() -> Any:
    """Import the module that imports torch, which takes a second or more.

    Raises:
        LaunchError: There is no torch, or it is too old.
    """
    # Without looking for garbage: there is none among so many objects, and it takes
    # a sixth of the time (measured).
    gc.disable()
    try:
        import torch  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - a library of its own may be missing
        raise LaunchError(
            "HPC018",
            f"torch cannot be imported by {sys.executable}: {error}. Load the module, "
            "or activate the environment, that has it",
        ) from None
    from torchrun_hpc.torch_compat import capabilities  # noqa: PLC0415

    capabilities.check_release()
    from torchrun_hpc.launching import agent  # noqa: PLC0415

    gc.freeze()  # nor will there be: not to be looked at again
    gc.enable()
    return agent
