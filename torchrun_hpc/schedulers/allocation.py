"""The nodes of a job, as its scheduler lists them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.job import Job, LaunchContext, Launcher, Task, node_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HOST = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")

# A host can have one line per slot.
_MOST_LINES = 2**20

_SHOWN = 40  # characters of a line that a message quotes


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, whoever starts the tasks there.

    ``provenance`` has the variables of ``nodes`` and ``launch_id``. ``host_file`` is
    for a launcher that does not ask this scheduler.
    """

    scheduler: str
    launch_id: str  # number, array element and restart of the job
    nodes: tuple[str, ...]  # in the order of the launchers; empty if unknown
    provenance: Mapping[str, str]
    host_file: str = ""

    def job_of_script(self, hostname: str, launcher: Launcher) -> Job:
        """Describe the job of a script that only the scheduler started.

        This machine may be outside the job's nodes.
        """
        if not self.nodes:
            raise LaunchError(
                "HPC035",
                f"{self.provenance['nodes']} names the nodes of {self.scheduler} job "
                f"{self.launch_id} and cannot be read here. In a container, mount the "
                "file's folder and pass the variables on. Or start this with mpirun or "
                "mpiexec. For one node, pass --standalone",
            )
        rank = node_index(hostname, self.nodes)
        context = LaunchContext.BATCH_SCRIPT
        if rank is None and len(self.nodes) > 1:
            context = LaunchContext.ALLOCATION_SHELL
        return Job(
            scheduler=self.scheduler,
            launch_id=self.launch_id,
            context=context,
            launcher=launcher,
            nodes=self.nodes,
            node_rank=rank,
            task=Task(),
            allocated_nodes=len(self.nodes),
            provenance=self.provenance,
            host_file=self.host_file if launcher.host_file_option else "",
        )


def as_identifier(text: str) -> str:
    """Replace characters that are not allowed in a launch id, or a value of PMI."""
    return re.sub("[^A-Za-z0-9._-]", "-", text)


def hosts_in(lines: Iterable[str], source: str, *, counts: bool = False) -> list[str]:
    """Read hosts, one per line; blank lines and comments (``# ...``) are skipped.

    With ``counts``, a number of slots can follow the name.
    """
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        host, *others = line.partition("#")[0].split() or [""]
        if not host:
            continue
        is_known = not others or (counts and len(others) == 1 and others[0].isdecimal())
        if not (is_known and _HOST.fullmatch(host)) or len(hosts) == _MOST_LINES:
            shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
            raise LaunchError(
                "HPC140",
                f"{source} does not list the job's hosts: entry {number} is "
                f"{shown!a}, which is not a host name. The scheduler writes one per "
                f"line, and {_MOST_LINES:,} at most. Unset the variable, or pass "
                "--standalone for one node",
                everywhere=True,
            )
        hosts.append(host)
    return hosts
