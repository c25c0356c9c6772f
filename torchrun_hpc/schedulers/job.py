"""A job as one of its processes sees it, whichever launcher or scheduler started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torchrun_hpc.errors import COPIED
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence


# The provenance of a node's rank that is its index in the list of nodes.
BY_NAME = "host name"

_NO_NUMBER, _NO_TEXT = Setting(0, ""), Setting("", "")


class LaunchContext(Enum):
    """How this process was started inside the job."""

    STEP = "step"  # once per task, by srun, mpirun or their like
    BATCH_SCRIPT = "batch script"  # once, on the job's first node
    INTERACTIVE_STEP = "interactive step"  # a shell on one of the job's nodes
    ALLOCATION_SHELL = "allocation shell"  # a shell outside the job's nodes


@dataclass(frozen=True)
class Promise:
    """A scheduler's promises for this node, with the variable of each.

    Attributes:
        cpus_per_task: CPUs of each task, if the launcher did not pass it on; 0
            if there is no such number.
        cpus_on_node: CPUs of the job on the node that has the fewest; 0 if not known.
        gpus_on_node: GPUs of the job on this node; 0 if not known.
        threads: The ``OMP_NUM_THREADS`` that the scheduler sets by itself; empty if it
            sets none. The source says whose it is.
        hook_port: The ``MASTER_PORT`` that a container's hook exports, which is the
            same for all steps of a job; empty if there is no such hook.
    """

    cpus_per_task: Setting = _NO_NUMBER
    cpus_on_node: Setting = _NO_NUMBER
    gpus_on_node: Setting = _NO_NUMBER
    threads: Setting = _NO_TEXT
    hook_port: str = ""


@dataclass(frozen=True)
class Launcher:
    """A program that starts tasks, and its command line.

    Attributes:
        name: Its name.
        template: How to start ``{command}`` once on each of ``{nodes}`` nodes; without
            ``{nodes}`` on all that there are.
        cpu_option: Option with which a task may use ``{cpus}`` CPUs, or all of them;
            empty if there is none. One without ``{cpus}`` is right wherever one task
            is started on each node, and is added there: many launchers bind to a core.
        block_option: Option that puts ``{tasks}`` neighbouring ranks on each node.
        host_file_option: Option for a file of hosts; empty if it asks the scheduler in
            any case.
        fills_all_nodes: Whether it uses all nodes of the job without other options.
            The others fill one node after the other.
        fail_together: Command and option with which one task that fails ends all; empty
            where it does so by itself, or has no such option.
        exclude: Option before the names of nodes that a job must avoid; empty
            if there is none.
        forward_option: Option that passes a variable on to other nodes, before its
            name; empty if the launcher passes all on.
        bind_option: Options that give each task ``N`` CPUs of its own; empty if they
            are not known.
        all_gpus_option: Option with which a task sees all GPUs of its node; empty if
            there is none.
        forgets_cpus: Why a task may have fewer CPUs than the scheduler promises, and
            what to do; empty if it cannot.
        takes_from: The commands that make a job and also take ``cpu_option``; empty
            if the job's CPUs are no limit.
        node_variable: Variable of a task that has the rank of its node; empty if there
            is none.
        network_hint: How to name the network of the nodes, with ``{interface}``; empty
            if it shows one address at most.
        ends_others: Whether it ends all tasks of a job that has failed.
        may_wait: Whether it may wait forever for a node that is lost.
        other_template: A second line, for another MPI with the same command.
    """

    name: str
    template: str
    cpu_option: str
    block_option: str
    host_file_option: str = ""
    fills_all_nodes: bool = False
    fail_together: str = ""
    exclude: str = ""
    forward_option: str = ""
    bind_option: str = ""
    all_gpus_option: str = ""
    forgets_cpus: str = ""
    takes_from: str = ""
    node_variable: str = ""
    network_hint: str = ""
    ends_others: bool = True
    may_wait: bool = False
    other_template: str = ""

    @property
    def takes_number(self) -> bool:
        """Whether a person can type any number of nodes."""
        return "{nodes}" in self.template

    def once_per_node(
        self, nodes: int | str, command: str, host_file: str = "", options: str = ""
    ) -> str:
        """Write how to start a command once on each node, with more options."""
        has_file = self.host_file_option and host_file
        hosts = f"{self.host_file_option} {host_file}" if has_file else ""
        has_cpus = "{cpus}" in self.cpu_option or self.cpu_option == options
        cpus = "" if has_cpus else self.cpu_option
        words = " ".join(filter(None, (hosts, cpus, options, command)))
        lines = filter(None, (self.template, self.other_template))
        return COPIED.join(t.format(nodes=nodes, command=words) for t in lines)


@dataclass(frozen=True)
class Task:
    """One of the processes that a launcher started together.

    Attributes:
        rank: Its rank among all of them, from 0.
        size: Number of all of them.
        local_rank: Its rank among those of its node, from 0.
        local_size: Number of those of its node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(frozen=True)
class Job:
    """A job, seen from one of its processes.

    Attributes:
        scheduler: What started this process, as a person writes it (``Slurm``,
            ``Open MPI in PBS``).
        launch_id: Names this launch and no other: job, array element, step, restart,
            for example ``123456_7.0-r1``. Characters ``[A-Za-z0-9._-]``. The same
            text on all nodes.
        context: How this process was started.
        launcher: What starts tasks in this job.
        nodes: The names of the nodes, in rank order if ``is_ranked``; an empty text
            for one that is not known. In a step, the step's nodes; in an interactive
            step, only this one; elsewhere, the job's.
        node_rank: Rank of this node; ``None`` outside of them.
        task: This process in the step; outside a step, a task alone.
        allocated_nodes: Number of nodes of the whole job, of which ``nodes`` may be
            a part.
        provenance: For each field the variable that it came from.
        head_candidates: Where rank 0 probably is: one name, or addresses of one
            machine. Rank 0 can see whether they are its own. Empty where it is known.
        hostname: Name of this machine, to compare with ``head_candidates``.
        nodelist_is_shared: Whether all nodes find the same ``nodes``. Open MPI over ssh
            passes the scheduler's variables to no node but the one where it runs.
        pmi_is_open: Whether the tasks have told each other where they are, on a
            connection to their process manager (PMI) that is still open.
        host_file: File of hosts for a launcher that does not ask the scheduler; empty
            if each does, or if there is none.
        started_by: The program that started the tasks, if it is known.
        names_instance: Whether ``launch_id`` differs between two launches that run at
            the same time in one job.
        listed_at: Index of this node in ``nodes`` where these are in an order of
            their own, so that nobody knows the rank of another node; ``None`` where
            it is ``node_rank``.
    """

    scheduler: str
    launch_id: str
    context: LaunchContext
    launcher: Launcher
    nodes: tuple[str, ...]
    node_rank: int | None
    task: Task
    allocated_nodes: int
    provenance: Mapping[str, str]
    head_candidates: tuple[str, ...] = ()
    hostname: str = ""
    nodelist_is_shared: bool = True
    pmi_is_open: bool = False
    host_file: str = ""
    started_by: Launcher | None = None
    names_instance: bool = True
    listed_at: int | None = None

    @property
    def index(self) -> int | None:
        """Index of this node in ``nodes``; ``None`` outside of them."""
        return self.node_rank if self.listed_at is None else self.listed_at

    @property
    def is_ranked(self) -> bool:
        """Whether ``nodes`` are in the order of their ranks."""
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
    def a_node(self) -> str:
        """Name of a node, the same on all where possible: the first that is known."""
        return next(filter(None, self.nodes), self.hostname)

    def once_per_node(
        self, command: str, options: str = "", nodes: int | None = None
    ) -> str:
        """Write how to start a command once on each node, with options of the launcher.

        By default on the nodes that were meant: all of ``nodes``, or all of the job
        where the launcher has filled the first ones.
        """
        if nodes is None:
            filled = self.has_several_tasks and not self.launcher.fills_all_nodes
            nodes = self.allocated_nodes if filled else len(self.nodes)
        return self.launcher.once_per_node(nodes, command, self.host_file, options)


def same_host(one: str, other: str) -> bool:
    """Return whether two names mean one host, where either may lack its domain."""
    if one == other:
        return True
    label, _, domain = one.partition(".")
    other_label, _, other_domain = other.partition(".")
    return label == other_label and not (domain and other_domain)


def node_index(host: str, nodes: Sequence[str]) -> int | None:
    """Return the index of a host in a list of nodes; ``None`` if it is not there."""
    return next((i for i, node in enumerate(nodes) if same_host(node, host)), None)
