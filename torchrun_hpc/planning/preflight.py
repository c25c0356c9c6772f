"""What this process shows before its command line is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.errors import LaunchError
    from torchrun_hpc.schedulers.job import Job


@dataclass(frozen=True)
class Preflight:
    """What this process shows: its environment, and the job that started it.

    Attributes:
        job: What the scheduler says; ``None`` without one.
        problem: Why the job could not be found out; not raised yet, because a user who
            asks for one node needs no job.
        environ: Environment of this process, without the variables that another job
            or launcher has left over.
        hostname: Name of this machine.
        command: The command as typed, for messages.
        task_rank: Rank of this task; ``None`` without one, and where it is unclear.
    """

    job: Job | None
    problem: LaunchError | None
    environ: Mapping[str, str]
    hostname: str
    command: str
    task_rank: int | None = None

    @property
    def site_host(self) -> str:
        """Name by which the site is recognised: all nodes of a job have the same."""
        return self.job.a_node if self.job else self.hostname
