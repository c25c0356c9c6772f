"""The examination: all tasks of a step meet, and task 0 gets a report."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrun_hpc import files
from torchrun_hpc.doctor import place, summary
from torchrun_hpc.doctor.board import met
from torchrun_hpc.doctor.conductor import Conductor
from torchrun_hpc.doctor.examiner import IMPORT_TIMEOUT, Examiner
from torchrun_hpc.doctor.link import Links
from torchrun_hpc.doctor.results import NotMetError
from torchrun_hpc.doctor.workers import Workers
from torchrun_hpc.errors import Message
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Kind
from torchrun_hpc.launching import environment
from torchrun_hpc.options import command_line
from torchrun_hpc.options.arguments import wrong_line
from torchrun_hpc.planning.endpoints import LOOPBACK
from torchrun_hpc.preflight import preflight
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.errors import CoordinatorNotFoundError, JobFailedError
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.reporting import console
from torchrun_hpc.schedulers import pmi

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrun_hpc.doctor.examiner import Options
    from torchrun_hpc.doctor.place import Place
    from torchrun_hpc.doctor.results import Report
    from torchrun_hpc.launching.abort import Known

COMMAND = "python -m torchrun_hpc.doctor"


def examine(
    argv: Sequence[str],
    options: Options,
    tell: Callable[[Message], None],
    known: Known,
    words: Sequence[str] | None = None,
) -> Report | None:
    """Examine the nodes of this step; see `torchrun_hpc.doctor.examine`.

    Args:
        argv: Options as the job's own line has them.
        options: What the user chose beside.
        tell: Shows a person how far it is.
        known: What is known where a fault is raised; filled in.
        words: The same line with the doctor's own options, to suggest another one.

    Raises:
        LaunchError: A launch would be refused, and the nodes cannot meet.
        NotMetError: This task has not met the others.
    """
    command = shlex.join([*COMMAND.split(), *(argv if words is None else words)])
    with environment.without_empty_options():
        seen = known.preflight = preflight(command, console.write)
        if seen.job is not None and seen.job.pmi_is_open:
            pmi.finalize(seen.environ)  # the workers have no way to it
        line = command_line.parse(
            [*argv, "SCRIPT"], seen.environ, has_job=seen.job is not None
        )
        if line.unknown:
            raise wrong_line(
                f"{line.unknown[0]} is no option of the doctor or torchrun"
            )
        if "hpc_dry_run" in line.options:
            raise wrong_line(
                f"{line.options['hpc_dry_run']}: the doctor has no dry run"
            )
        here = place.find(seen, line, known)
    if here.task.rank == 0:
        # Nobody waits for it: a file system may hang.
        files = [options.files, tell]
        threading.Thread(target=_try_files, args=files, daemon=True).start()
    variables = {k: str(v.value) for k, v in here.environment.items()}
    environ = {**seen.environ, **variables}
    if here.meeting.nodes == 2:  # noqa: PLR2004
        # A tree of two nodes exceeds what the interface carries: nccl-tests#196.
        environ.setdefault("NCCL_ALGO", "Ring")
    key = Key(here.meeting.key, here.meeting.launch_id)
    key.load()
    is_alone = here.task.size == 1
    address = LOOPBACK if is_alone else here.address or LOOPBACK
    with (
        contextlib.closing(Links(key, here.address)) as links,
        Workers(here.workers, environ, address) as workers,
    ):
        examiner = Examiner(here, options, links, workers)
        conductor = Conductor(examiner, tell)  # it knows when all began
        try:
            with met(here.tasks_meeting, environ, options.timeout, tell) as board:
                examiner.introduce(board, seen.environ)
                if here.task.rank == 0:
                    return conductor.conduct(board)
                examiner.follow(board)
                return None
        except (CoordinatorNotFoundError, JobFailedError, TimeoutError) as error:
            own = (examiner.own or examiner.look(seen.environ))["node"]
            if own:
                own["torch"] = workers.torch(IMPORT_TIMEOUT)
            found = summary.Found(nodes=[own] if own else [])
            report = summary.report(found, here, options.timeout)
            raise NotMetError(_why(error, here, options), report) from None


def unwritable(file: str, error: Exception) -> Message:
    """Return what there is to say of a file that cannot be written."""
    known = getattr(error, "strerror", None)
    reason = known or f"{type(error).__name__}: {error}"
    return Message("HPC197", f"{file} cannot be written: {reason}")


def _try_files(files: Sequence[str], tell: Callable[[Message], None]) -> None:
    """Name those that cannot be written: the examination may take minutes."""
    for problem in filter(None, map(_problem_of, files)):
        text = f"{problem.text}; the report is printed all the same"
        tell(replace(problem, text=text))


def _problem_of(file: str) -> Message | None:
    """Find out whether a file can be written; it is not opened, nor made."""
    path, number = Path(file), 0
    try:
        if path.is_dir():
            number = errno.EISDIR
        elif not path.parent.is_dir():
            number = errno.ENOENT
        elif not os.access(path if files.is_of_system(path) else path.parent, os.W_OK):
            number = errno.EACCES
    except OSError as error:
        return unwritable(file, error)
    return unwritable(file, OSError(number, os.strerror(number))) if number else None


def _why(error: Exception, here: Place, options: Options) -> Message:
    if isinstance(error, CoordinatorNotFoundError):
        return messages.coordinator_missing(
            str(error), options.timeout, here.tasks_meeting, "--timeout"
        )
    failure = error.failure if isinstance(error, JobFailedError) else None
    if failure is not None and failure.kind is not Kind.COORDINATOR:
        return report.failed(failure, here.tasks_meeting)
    rank = here.tasks_meeting.coordinator
    text = f"node {rank} does not answer any more, so that this is all there is"
    return Message("HPC198", text)
