"""The description of a launcher or scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.allocation import Allocation
    from torchrun_hpc.schedulers.job import Job, Launcher, Promise
    from torchrun_hpc.schedulers.process import Process
    from torchrun_hpc.schedulers.task_layout import TaskLayout

_SHOWN = 40  # characters of a value that a message quotes


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A launcher or a scheduler that may have started this process.

    A launcher, such as mpirun, supplies ``task_layout``. A scheduler supplies
    ``detect`` for what it starts itself, and ``allocation`` for what a launcher starts
    in its job. These are pure, and are called only if one of ``markers`` (or ``rank``)
    is set. They raise `LaunchError` if variables are contradictory or unreadable.

    Attributes:
        markers: Variables, at least one of which it sets. A scheduler's first set one
            is the job's number, by which `evidence` compares jobs.
        rank: Variable of a task's rank, then others that its tasks also have. Empty for
            a scheduler that does not number its tasks.
        prefixes: Prefixes of the variables to remove if they are stale. Without
            ``prefixes`` and ``daemons``, a launcher's variables never count as stale.
        task_pid: Variable with the pid of the process that it started itself, if
            ``node_name`` is this machine; or empty.
        detect: Describes the job; ``None`` if it did not start this process.
        allocation: Returns the job's nodes; ``None`` if there is no job.
        promise: Returns the job's CPUs, GPUs and threads, whoever started this process.
    """

    name: str
    markers: tuple[str, ...]
    rank: tuple[str, ...]
    prefixes: tuple[str, ...]
    daemons: tuple[str, ...]  # the processes with which it starts others
    launcher: Launcher
    node_name: str = ""  # variable with its name for this node, or empty
    task_pid: str = ""
    task_layout: Callable[[Process], TaskLayout] | None = None
    detect: Callable[[Process], Job | None] | None = None
    allocation: Callable[[Process], Allocation | None] | None = None
    promise: Callable[[Mapping[str, str]], Promise] | None = None

    def is_set(self, environ: Mapping[str, str]) -> bool:
        """Return whether one of its variables is set."""
        return any(environ.get(name) for name in self.markers)

    def has_rank(self, environ: Mapping[str, str]) -> bool:
        """Return whether its variables give this task a rank."""
        return bool(self.rank) and all(environ.get(name) for name in self.rank)

    def number(self, environ: Mapping[str, str]) -> str:
        """Return its job's number: the first set variable of ``markers``."""
        return next(filter(None, map(environ.get, self.markers)), "")

    def shown(self, environ: Mapping[str, str]) -> str:
        """Write its name and its first set variable."""
        name = next(filter(environ.get, self.markers))
        return f"{self.name} ({name}={environ[name][:_SHOWN]!r})"
