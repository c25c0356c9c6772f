"""The record that describes a launcher or a scheduler, one per file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.schedulers.allocation import Allocation
    from torchrun_hpc.schedulers.job import Job, Launcher, Promise
    from torchrun_hpc.schedulers.process import Process
    from torchrun_hpc.schedulers.task_layout import TaskLayout

# How much of a value a message quotes.
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A launcher or a scheduler that may have started this process.

    A launcher (mpirun and its like) gives ``task_layout``; the nodes and the number of
    the job come from a scheduler. A scheduler gives ``detect``, for what it starts
    itself, and ``allocation``, for what a launcher starts in its job. All three are
    pure functions of a `Process`, and raise `LaunchError` where the variables
    contradict each other or cannot be read.

    Attributes:
        name: Its name, as a person writes it.
        signs: Variables of which it sets one at least. Of a scheduler, the first that
            is set is the job's number, by which `evidence` compares jobs.
        rank: Variable of a task's rank, and those that have to be set with it: it has
            started a task that has all of them. A launcher must have it; a scheduler
            has it only if it numbers its tasks.
        prefixes: Beginnings of the names of the variables to remove where they are
            left over. Each of ``signs`` begins with one of them. Only a
            launcher may have none, and no ``daemons``: then its variables are never
            taken for left over.
        daemons: Names of the processes with which it starts others.
        node_name: Variable with its name of this node; empty if there is none.
        task_pid: Variable with the number of the process that it started itself, if
            ``node_name`` is this machine; empty if there is none.
        launcher: What a person types to start tasks.
        task_layout: Says which task this is, among how many. Called if ``rank`` is set.
        detect: Describes the job; ``None`` if it did not start this. Called if one of
            ``signs`` is set.
        allocation: Returns the job's nodes; ``None`` if there is no job. Called if one
            of ``signs`` is set.
        promise: Returns what the job has of CPUs, GPUs and threads. Called if one of
            ``signs`` is set, whoever started this process.
    """

    name: str
    signs: tuple[str, ...]
    rank: tuple[str, ...]
    prefixes: tuple[str, ...]
    daemons: tuple[str, ...]
    launcher: Launcher
    node_name: str = ""
    task_pid: str = ""
    task_layout: Callable[[Process], TaskLayout] | None = None
    detect: Callable[[Process], Job | None] | None = None
    allocation: Callable[[Process], Allocation | None] | None = None
    promise: Callable[[Mapping[str, str]], Promise] | None = None

    def is_set(self, environ: Mapping[str, str]) -> bool:
        """Return whether its variables are there."""
        return any(environ.get(name) for name in self.signs)

    def has_rank(self, environ: Mapping[str, str]) -> bool:
        """Return whether it tells this task a rank."""
        return bool(self.rank) and all(environ.get(name) for name in self.rank)

    def number(self, environ: Mapping[str, str]) -> str:
        """Return the number of its job: the first of its variables that is set."""
        return next(filter(None, map(environ.get, self.signs)), "")

    def shown(self, environ: Mapping[str, str]) -> str:
        """Write its name, and the first of its variables."""
        name = next(filter(environ.get, self.signs))
        return f"{self.name} ({name}={environ[name][:_SHOWN]!r})"
