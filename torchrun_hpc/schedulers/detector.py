"""A launcher or scheduler: how it is recognised, and what it supplies."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import LaunchError, shortened
from torchrun_hpc.schedulers.job import Job, LaunchContext, Launcher, Task, node_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchrun_hpc.schedulers.job import Promise
    from torchrun_hpc.schedulers.process import Process

# Characters that a message quotes: of a marker or a line of a file; of a variable.
_SHOWN, _SHOWN_VALUE = 40, 200


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A launcher or a scheduler that may have started this process.

    A launcher, such as mpirun, supplies ``task_layout``. A scheduler supplies
    ``detect`` for what it starts itself, and ``allocation`` for what a launcher starts
    in its job. These functions are pure. They are called only if one of ``markers``,
    or all of ``rank``, are set. They raise `LaunchError` if variables are contradictory
    or unreadable.

    Attributes:
        markers: Variables, at least one of which it sets. The first set one of a
            scheduler is the job's number, by which `evidence` compares jobs.
        rank: Variable of a task's rank, then others that its tasks also have. Empty for
            a scheduler that does not number tasks.
        prefixes: Prefixes of the variables to remove if they are stale. Without
            ``prefixes`` and ``daemons``, a launcher's variables never count as stale.
        task_pid: Variable with the pid of the process that it started itself. It counts
            if ``node_name`` is this machine.
        detect: Describes the job; ``None`` if it did not start this process.
        allocation: Returns the job's nodes; ``None`` if there is no job.
        promise: Returns the job's CPUs, GPUs and threads, whatever started this
            process.
    """

    name: str
    markers: tuple[str, ...]
    launcher: Launcher
    rank: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    daemons: tuple[str, ...] = ()  # names of the processes with which it starts others
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
        """Return its job's number, from ``markers``; empty if none of them is set."""
        return next(filter(None, map(environ.get, self.markers)), "")

    def shown(self, environ: Mapping[str, str]) -> str:
        """Return its name and its first set variable, for a message."""
        name = next(filter(environ.get, self.markers))
        return f"{self.name} ({name}={environ[name][:_SHOWN]!r})"


# --- its variables --------------------------------------------------------------------


def whole_number(text: str) -> int | None:
    """Read a number of at most nine digits; return ``None`` for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


class Variables:
    """The variables of one launcher or scheduler; an empty one counts as unset.

    Messages name the launcher or scheduler (``source``) and its variables (``family``):
    ``PBS``, ``PBS_*``.
    """

    def __init__(self, environ: Mapping[str, str], source: str, family: str) -> None:
        self.environ = environ
        self._source = source
        self._family = family

    def first(self, *names: str) -> str:
        """Return the value of the first set variable, or an empty text."""
        return next(filter(None, map(self.environ.get, names)), "")

    def name(self, *names: str) -> str:
        """Return the name of the first set variable; if none is set, raise HPC020."""
        name = next(filter(self.environ.get, names), "")
        if name:
            return name
        raise LaunchError(
            "HPC020",
            f"{names[0]} is not set, but other variables show that {self._source} "
            "started this process. A container or a wrapper has removed it, or the "
            "others come from another job. "
            f"Pass all {self._family} variables on, or unset them. "
            "For one node, pass --standalone",
            everywhere=True,
        )

    def shown(self, *names: str) -> str:
        """Return name and value of the first set variable, for a message."""
        name = next(filter(self.environ.get, names), names[0])
        return f"{name}={shortened(self.first(name), _SHOWN_VALUE)!r}"

    def integer(self, *names: str) -> int:
        """Return the first set variable as a whole number; refuse any other text."""
        name = self.name(*names)
        number = whole_number(self.environ[name])
        if number is None:
            raise self.damaged(name, "is not a whole number")
        return number

    def damaged(self, name: str, problem: str) -> LaunchError:
        """Return the refusal of a variable whose value was changed."""
        text = f"{self.shown(name)} {problem}. Find what has changed it"
        return LaunchError("HPC021", text, everywhere=True)

    def integer_or_zero(self, *names: str) -> int:
        """Return the value of the first set variable as a number; 0 if none is set."""
        return self.integer(*names) if self.first(*names) else 0


# --- what a scheduler supplies --------------------------------------------------------

_HOST = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")

# A host can have one line per slot.
_MOST_LINES = 2**20


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, whatever starts the tasks there.

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

        This machine may be outside the job's nodes. Raise `LaunchError` if these are
        unknown.
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


def hosts_in(lines: Iterable[str], source: str, *, counts: bool = False) -> list[str]:
    """Read hosts, one per line; skip blank lines and comments (``# ...``).

    ``source`` names the variable or the file, for a message. With ``counts``, a number
    of slots can follow the name.

    Raises:
        LaunchError: A line is not a host name, or there are too many lines.
    """
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *count = words
        is_count = counts and len(count) == 1 and count[0].isdecimal()
        is_host = _HOST.fullmatch(host) and (not count or is_count)
        if not is_host or len(hosts) == _MOST_LINES:
            raise LaunchError(
                "HPC140",
                f"{source} does not list the job's hosts: entry {number} is "
                f"{shortened(line, _SHOWN)!a}, which is not a host name. The "
                f"scheduler writes one per line, and {_MOST_LINES:,} at most. Unset "
                "the variable, or pass --standalone for one node",
                everywhere=True,
            )
        hosts.append(host)
    return hosts


# --- what a launcher supplies ---------------------------------------------------------


@dataclass(frozen=True)
class TaskLayout:
    """The launcher's placement of the tasks; an unknown number is ``None``.

    Attributes:
        provenance: The variable of each field, and of ``tasks``. Without an entry,
            ``local_rank`` and ``local_size`` come from the variable of ``tasks``.
        head_candidates: Probable place of node 0: one name, or addresses of one
            machine. Empty if unknown.
        nodelist_is_shared: Whether all nodes have the scheduler's variables. If not,
            values that must be equal on all nodes do not depend on them.
    """

    task: Task
    provenance: Mapping[str, str]
    nodes: int | None = None
    most_nodes: int | None = None
    node_rank: int | None = None
    nodes_before: int | None = None  # maximum number of nodes before this one
    instance: str = ""  # unique name of this launch in its job
    head_candidates: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # for each node, if the tasks have exchanged them
    pmi_is_open: bool = False  # ``head_candidates`` came from rank 0 by PMI
    nodelist_is_shared: bool = True


def read_layout(
    variables: Variables, names: Sequence[str], sources: Mapping[str, str], **more: Any
) -> TaskLayout:
    """Return the layout in the launcher's variables.

    ``names`` are the variables of rank, size, local rank, and local size. The local
    size can have several, of which the first set one counts. ``more`` are further
    fields of the layout, and ``sources`` is their provenance.
    """
    rank, size, local_rank, *local_size = names
    read = variables.integer
    provenance = {"tasks": size, "task": rank, "local_rank": local_rank}
    provenance["local_size"] = variables.name(*local_size)
    task = Task(read(rank), read(size), read(local_rank), read(*local_size))
    return TaskLayout(task, {**provenance, **sources}, **more)


def with_exchanged(layout: TaskLayout, process: Process) -> TaskLayout:
    """Add the facts that the tasks exchange by PMI; they replace the variables."""
    exchanged = process.exchange(process.environ)
    if exchanged is None:
        return layout
    changes: dict[str, Any] = {}
    provenance = {**layout.provenance, "head": "PMI"}
    if not layout.instance:
        changes["instance"] = exchanged.instance
        provenance["launch_id"] = "PMI"
    task, nodes = layout.task, exchanged.node_of_rank
    if task.rank < len(nodes):
        node = nodes[task.rank]
        local_size = nodes.count(node)
        if local_size != task.local_size:  # one host, counted as several nodes
            local_rank = nodes[: task.rank].count(node)
            task = replace(task, local_rank=local_rank, local_size=local_size)
        changes |= {"task": task, "nodes": len(set(nodes)), "node_rank": node}
        changes["hosts"] = exchanged.hosts
        provenance |= dict.fromkeys(("node_rank", "local_rank", "local_size"), "PMI")
    return replace(
        layout,
        head_candidates=(exchanged.first_host,),
        pmi_is_open=True,
        provenance=provenance,
        **changes,
    )
