"""The plan: everything that is decided before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc.errors import count
from torchrun_hpc.planning.inputs import STATIC
from torchrun_hpc.planning.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.errors import Message
    from torchrun_hpc.planning.inputs import Preload
    from torchrun_hpc.planning.shares import Binding
    from torchrun_hpc.setting import Setting


@dataclass(frozen=True)
class World:
    """The nodes and the workers.

    Attributes:
        nodes: Number of nodes.
        node_rank: Rank of this node.
        workers: Number of workers on this node.
        report_rank: Rank by which it is decided who reports: that of the node; in
            direct mode that of the task.
        hosts: Names of the nodes by rank; empty without a scheduler.
        fast_hosts: Their names on the fast network, by the site's rule; whether these
            resolve is not checked.
        fewest: The least number of nodes to start with; 0 if all have to be there.
        may_grow: Whether agents may join that this launch does not start.
        size: Number of all workers; 0 where it is not known before the nodes meet.
        spares: How many of the nodes wait to take the place of another one.
    """

    nodes: int
    node_rank: int
    workers: int
    report_rank: int = 0
    hosts: tuple[str, ...] = ()
    fast_hosts: tuple[str, ...] = ()
    fewest: int = 0
    may_grow: bool = False
    size: int = 0
    spares: int = 0

    @property
    def active(self) -> int:
        """Number of nodes that have workers at a time."""
        return self.nodes - self.spares

    @property
    def shape(self) -> str:
        """The nodes, and the workers or tasks, as far as they are known yet."""
        nodes, workers = count(self.active, "node"), count(self.workers, "worker")
        if self.spares:
            nodes += f" and {count(self.spares, 'spare')}"
        if self.size:
            is_even = self.size == self.workers * self.nodes
            tasks = count(self.workers if is_even else self.size, "task")
            return f"{nodes} x {tasks}" if is_even else f"{nodes}, {tasks}"
        if 0 < self.fewest < self.active:
            nodes = f"{self.fewest} to {nodes}"
        return f"{nodes}, {workers}" + (" on this one" if self.nodes > 1 else "")


@dataclass(frozen=True)
class Spares:
    """What is done for a job that is to outlive its nodes.

    Attributes:
        after: Seconds until a spare takes the place of a node that has not come.
        health_check: Command that says whether a node is well; empty without.
        health_check_timeout: Seconds that it may take.
        exclude: The scheduler's option that keeps a job off some nodes; empty without.
    """

    after: int
    health_check: str = ""
    health_check_timeout: int = 0
    exclude: str = ""


@dataclass(frozen=True)
class Rendezvous:
    """Where and how the nodes meet.

    Attributes:
        backend: Kind of the rendezvous: ``scheduler`` and ``direct`` are ours, the
            others are torch's.
        endpoint: Where the nodes meet, for a person.
        connect_host: Address or name to connect to; empty if torch is to find out.
        ports: Where the coordinator may be, in the order in which it tries them.
        notice_ports: Where it reports that it found none of ``ports`` to use.
        coordinator: Rank of the node that hosts the rendezvous; ``None`` if only that
            node knows.
        is_coordinator: Whether this node hosts it.
        local_address: This node's address for the job, as a number; ``None`` if it is
            not known.
        listen: Address and port on which this process hosts the rendezvous; ``None``
            if it hosts none, or listens on all addresses.
        may_join: Whether the port of a rendezvous that is to be hosted here may be
            taken by another agent of this machine, which is then the host.
    """

    backend: str
    endpoint: str = ""
    connect_host: str = ""
    ports: tuple[int, ...] = ()
    notice_ports: tuple[int, ...] = ()
    coordinator: int | None = None
    is_coordinator: bool = False
    local_address: str | None = None
    listen: tuple[str, int] | None = None
    may_join: bool = False


@dataclass(frozen=True)
class Messages:
    """What a person reads about the plan.

    Attributes:
        title: What was started by whom, for the start line.
        notes: What was corrected, the same on all nodes.
        advice: What is probably not meant; as good as the same on all nodes.
        warnings: What is wrong on this node, and was worked around.
        hint: What may help where nodes do not come.
        network_hint: What may help where this node does not reach the head node.
    """

    title: str = ""
    notes: tuple[Message, ...] = ()
    advice: tuple[Message, ...] = ()
    warnings: tuple[Message, ...] = ()
    hint: str = ""
    network_hint: str = ""


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that is decided before anything is started.

    Attributes:
        mode: How this launch starts its workers.
        world: The nodes and the workers.
        rendezvous: Where and how the nodes meet.
        messages: What a person reads about it.
        launch_id: Names this launch and no other; empty where one node needs none.
        started_by: As in `Job`.
        started: The command, in short, with a digest of all of it; empty if
            ``launch_id`` tells two launches apart.
        site: Name of the computing centre whose rules are used, and why it is that.
        interface: Where gloo will be, for a person; empty if that is left to it.
        options: Options of torchrun to set, by their names in its parser.
        environment: Environment variables to set.
        preload: What is imported once for all workers; ``None`` if nothing is.
        binding: Which worker gets which CPUs; ``None`` if they are not bound.
        stall_report: Seconds after which workers that show the same stacks are
            reported; 0 if they are not.
        spares: What is done for a job that is to outlive its nodes; ``None`` without.
        outcome: File for the outcome of the job; empty without.
        without_patches: Names of the changes inside torch that are left out.
    """

    mode: Mode
    world: World
    rendezvous: Rendezvous
    messages: Messages = field(default_factory=Messages)
    launch_id: str = ""
    started_by: str = ""
    started: str = ""
    site: Setting | None = None
    interface: str = ""
    options: Mapping[str, Setting] = field(default_factory=dict)
    environment: Mapping[str, Setting] = field(default_factory=dict)
    preload: Preload | None = None
    binding: Binding | None = None
    stall_report: float = 0
    spares: Spares | None = None
    outcome: str = ""
    without_patches: tuple[str, ...] = ()

    @property
    def ranks_follow_scheduler(self) -> bool:
        """Whether nodes are ranked by ``node_rank``, and torch may rank otherwise."""
        is_static = self.rendezvous.backend == STATIC
        return self.mode is Mode.SEVERAL_NODES and not is_static
