"""Processes with changed variables, and the jobs to which they belong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc import schedulers
from torchrun_hpc.errors import LaunchError, Message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.schedulers.job import Job
    from torchrun_hpc.schedulers.process import Process


def changed(
    environ: Mapping[str, str], changes: Mapping[str, str | None]
) -> dict[str, str]:
    """Return a copy of an environment; a value of None removes the variable."""
    return {k: v for k, v in {**environ, **changes}.items() if v is not None}


def with_changes(process: Process, changes: Mapping[str, str | None]) -> Process:
    """Return a process with changed variables; a value of None removes one."""
    return replace(process, environ=changed(process.environ, changes))


def outcome(process: Process) -> Job | str | None:
    """Return the job by the variables that are not left over, or the refusal."""
    try:
        return schedulers.detect(schedulers.weigh(process))
    except LaunchError as error:
        return str(Message(error.code, str(error)))


def detected(process: Process) -> Job:
    """Return the job of a process that has one."""
    job = schedulers.detect(schedulers.weigh(process))
    assert job is not None
    return job


def refusal(process: Process) -> str:
    """Return the code and the message with which a process is refused."""
    text = outcome(process)
    assert isinstance(text, str), text
    assert text.isprintable()
    return text
