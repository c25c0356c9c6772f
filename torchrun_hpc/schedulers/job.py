"""A job as one of its processes sees it, under any launcher or scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence


# The provenance of a node rank that comes from this host's place in the list of nodes.
BY_NAME = "host name"

_NO_NUMBER, _NO_TEXT = Setting(0, ""), Setting("", "")


class LaunchContext(Enum):
    """How this process was started inside the job."""

    STEP = "step"  # once per task, by srun, mpirun or the like
    BATCH_SCRIPT = "batch script"  # once, on the head node
    INTERACTIVE_STEP = "interactive step"  # a shell on one of the job's nodes
    ALLOCATION_SHELL = "allocation shell"  # a shell outside the job's nodes


@dataclass(frozen=True)
class Promise:
    """A scheduler's promises for this node, each with its variable.

    A missing promise is 0 or empty. ``threads`` is the ``OMP_NUM_THREADS`` that the
    scheduler itself sets. ``hook_port`` is the ``MASTER_PORT`` that a container hook
    exports; it is equal for all steps of a job.
    """

    cpus_per_task: Setting = _NO_NUMBER  # if the launcher did not forward it
    cpus_on_node: Setting = _NO_NUMBER  # on the node with the fewest
    gpus_on_node: Setting = _NO_NUMBER
    threads: Setting = _NO_TEXT
    hook_port: str = ""


@dataclass(frozen=True)
class Launcher:
    """A program that starts tasks, and its command line; an empty text means none.

    Attributes:
        template: A command that starts ``{command}`` once on each of ``{nodes}`` nodes,
            or on all nodes.
        cpu_option: Option that gives a task ``{cpus}`` CPUs, or all. If it lacks
            ``{cpus}``, it is always part of a command with one task per node, because
            many launchers bind a task to a core.
        fills_all_nodes: Whether it uses all nodes of the job by default. Others fill
            one node after another.
        fail_together: Command and option with which one failed task ends all; empty if
            that is the default.
        forgets_cpus: Why a task may have fewer CPUs than promised.
        remembers_cpus: A shell command that corrects this.
        takes_from: The commands that make a job and also accept ``cpu_option``; empty
            if the job's CPUs do not limit a task's.
        network_hint: How the user can name the nodes' network, with ``{interface}``;
            empty if the launcher shows at most one address of the head node.
    """

    name: str
    template: str
    cpu_option: str = ""
    block_option: str = ""  # puts ``{tasks}`` neighbouring ranks on each node
    host_file_option: str = ""  # empty if it always asks the scheduler
    fills_all_nodes: bool = False
    fail_together: str = ""
    exclude: str = ""  # option before the names of nodes that a job must avoid
    forward_option: str = ""  # before a variable's name; empty if it forwards all
    bind_option: str = ""  # gives each task ``N`` CPUs of its own
    all_gpus_option: str = ""  # shows a task all GPUs of its node
    forgets_cpus: str = ""
    remembers_cpus: str = ""
    takes_from: str = ""
    node_variable: str = ""  # variable with the rank of a task's node
    network_hint: str = ""
    ends_others: bool = True  # whether it ends all tasks of a failed job
    may_wait: bool = False  # whether it may wait forever for a lost node
    other_template: str = ""  # for another MPI with the same command

    @property
    def takes_number(self) -> bool:
        """Whether it accepts a number of nodes."""
        return "{nodes}" in self.template

    def once_per_node(
        self, nodes: int | str, command: str, host_file: str = "", options: str = ""
    ) -> str:
        """Return the line that starts a command once on each node, or two alternatives.

        ``options`` come before the command.
        """
        has_file = self.host_file_option and host_file
        hosts = f"{self.host_file_option} {host_file}" if has_file else ""
        has_cpus = "{cpus}" in self.cpu_option or self.cpu_option == options
        cpus = "" if has_cpus else self.cpu_option
        words = " ".join(filter(None, (hosts, cpus, options, command)))
        lines = filter(None, (self.template, self.other_template))
        return "\n".join(t.format(nodes=nodes, command=words) for t in lines)


@dataclass(frozen=True)
class Task:
    """One of the processes that a launcher started together; all ranks count from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Job:
    """A job, seen from one of its processes.

    Attributes:
        launch_id: Unique name of this launch, equal on all nodes. It has job, array
            element, step and restart: ``123456_7.0-r1``. Characters ``[A-Za-z0-9._-]``.
        nodes: Node names, in rank order if ``is_ranked``; an unknown name is empty. In
            a step, these are the step's nodes; in an interactive step, only this node;
            otherwise, the job's.
        head_candidates: Probable place of rank 0: one name, or addresses of one
            machine, which rank 0 can compare with its own. Empty if ``nodes`` has it.
        nodelist_is_shared: Whether all nodes find the same ``nodes``. Over ssh, Open
            MPI forwards the scheduler's variables to no other node.
        pmi_is_open: Whether the tasks have exchanged their hosts, and the connection to
            the process manager (PMI) is still open.
        host_file: Host file for a launcher that does not ask the scheduler; or empty.
        names_instance: Whether ``launch_id`` differs between two simultaneous launches
            in one job.
        listed_at: Index of this node in ``nodes`` if these are not in rank order.
    """

    scheduler: str  # what started this process: ``Slurm``, ``Open MPI in PBS``
    launch_id: str
    context: LaunchContext
    launcher: Launcher
    nodes: tuple[str, ...]
    node_rank: int | None  # ``None`` outside the nodes
    task: Task  # this process in the step; outside a step, the only task
    allocated_nodes: int  # number of the job's nodes
    provenance: Mapping[str, str]  # for each field, the variable that it came from
    head_candidates: tuple[str, ...] = ()
    hostname: str = ""  # of this machine, to compare with ``head_candidates``
    nodelist_is_shared: bool = True
    pmi_is_open: bool = False
    host_file: str = ""
    started_by: Launcher | None = None  # the program that started the tasks, if known
    names_instance: bool = True
    listed_at: int | None = None

    @property
    def index(self) -> int | None:
        """Index of this node in ``nodes``; ``None`` outside the nodes."""
        return self.node_rank if self.listed_at is None else self.listed_at

    @property
    def is_ranked(self) -> bool:
        """Whether ``nodes`` are in rank order."""
        return self.listed_at is None

    @property
    def own_name(self) -> str:
        """Name of this node."""
        name = "" if self.index is None else self.nodes[self.index]
        return name or self.hostname

    @property
    def has_several_tasks(self) -> bool:
        """Whether the step has more than one task on any node."""
        return self.task.size > len(self.nodes)

    @property
    def first_known_node(self) -> str:
        """The first known name of a node; usually the same on all nodes."""
        return next(filter(None, self.nodes), self.hostname)

    def once_per_node(
        self, command: str, options: str = "", nodes: int | None = None
    ) -> str:
        """Return the line that starts a command once on each node.

        If the launcher has put several tasks on the first nodes, the line uses all
        nodes of the job.
        """
        if nodes is None:
            filled = self.has_several_tasks and not self.launcher.fills_all_nodes
            nodes = self.allocated_nodes if filled else len(self.nodes)
        return self.launcher.once_per_node(nodes, command, self.host_file, options)


def same_host(one: str, other: str) -> bool:
    """Return whether two names mean the same host; either may lack its domain."""
    if one == other:
        return True
    label, _, domain = one.partition(".")
    other_label, _, other_domain = other.partition(".")
    return label == other_label and not (domain and other_domain)


def node_index(host: str, nodes: Sequence[str]) -> int | None:
    """Return the index of a host in a list of nodes; ``None`` outside the list."""
    return next((i for i, node in enumerate(nodes) if same_host(node, host)), None)


def as_identifier(text: str) -> str:
    """Replace characters that a launch id, or a value of PMI, must not contain."""
    return re.sub("[^A-Za-z0-9._-]", "-", text)
