"""What a scheduler tells to those that another launcher has started in its job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.job import Job, Launcher, Start, Task, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, whoever starts the tasks there.

    Attributes:
        scheduler: Its name, as a person writes it.
        identity: Names the job: number, array element, restart.
        nodes: Names of its nodes in the order in which launchers use them; empty if
            they are not known here.
        sources: For ``nodes`` and ``identity`` the variable that they came from.
        host_file: What to tell a launcher that does not ask this scheduler; empty if
            each does.
    """

    scheduler: str
    identity: str
    nodes: tuple[str, ...]
    sources: Mapping[str, str]
    host_file: str = ""


def in_identity(text: str) -> str:
    """Replace what an identity must not have."""
    return re.sub("[^A-Za-z0-9._-]", "-", text)


def unique(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return each host once, in the order of first appearance."""
    return tuple(dict.fromkeys(hosts))


def script(found: Allocation, hostname: str, launcher: Launcher) -> Job:
    """Describe the job of a script that nothing but the scheduler has started.

    Args:
        found: The job. It has nodes.
        hostname: Name of this machine, which may be outside of them.
        launcher: What starts tasks there.
    """
    rank = place_of(hostname, found.nodes)
    outside = Start.ALLOCATION_SHELL if len(found.nodes) > 1 else Start.BATCH_SCRIPT
    return Job(
        scheduler=found.scheduler,
        identity=found.identity,
        start=Start.BATCH_SCRIPT if rank is not None else outside,
        launcher=launcher,
        nodes=found.nodes,
        node_rank=rank,
        task=Task(),
        allocated_nodes=len(found.nodes),
        sources=found.sources,
        host_file=found.host_file if launcher.hosts else "",
    )
