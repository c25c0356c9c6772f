"""The meeting: who takes part, which rank this node has, and where the nodes meet.

It is decided before torch is imported, so that a node that cannot start can tell the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import Message
from torchrun_hpc.options.values import C10D, SCHEDULER, STATIC
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options


@dataclass(frozen=True)
class Spares:
    """What is done for a job that is to outlive its nodes.

    Attributes:
        number: How many of the nodes wait to take the place of another one.
        after: Seconds until a spare takes the place of a node that has not come.
        health_check: Command that says whether a node is well; empty without.
        health_check_timeout: Seconds that it may take.
        exclude: The scheduler's option that keeps a job off some nodes; empty without.
    """

    number: int = 0
    after: int = 0
    health_check: str = ""
    health_check_timeout: int = 0
    exclude: str = ""


@dataclass(frozen=True)
class KeyFile:
    """Where the user's key is, which proves that a node belongs to the job.

    Attributes:
        path: Its path; ``~`` is the user's home. Empty if there is to be none.
        is_explicit: Whether it is not the default one: then it may be made anywhere,
            not only on a file system that nodes share.
        required: What the user has set that nothing starts without it; empty if that
            is not so.
    """

    path: str = ""
    is_explicit: bool = False
    required: str = ""


@dataclass(frozen=True)
class Meeting:
    """Who takes part, and where the nodes meet.

    Attributes:
        backend: Kind of the rendezvous: ``scheduler`` and ``direct`` are ours, the
            others are torch's.
        nodes: Number of nodes.
        node_rank: Rank of this node.
        report_rank: Rank by which it is decided who reports: that of the node; in
            direct mode that of the task.
        launch_id: Names this launch and no other; empty where one node needs none.
        started_by: As in `Job`.
        started: The command, in short, with a digest of all of it; empty if
            ``launch_id`` tells two launches apart.
        hosts: Names of the nodes by rank; empty without a scheduler.
        fast_hosts: Their names on the fast network, by the site's rule; whether these
            resolve is not checked.
        fewest: The least number of nodes to start with; 0 if all have to be there.
        may_grow: Whether agents may join that this launch does not start.
        spares: What is done for a job that is to outlive its nodes.
        key: Where this node's key is; nowhere if nobody else can connect.
        site: Name of the computing centre whose rules are used, and why it is that.
        endpoint: Where the nodes meet, for a person.
        connect_host: Address or name to connect to; empty if torch is to find out.
        ports: Where the coordinator may be, in the order in which it tries them.
        notice_ports: Where it reports that it found none of ``ports`` to use.
        coordinator: Rank of the node that hosts the rendezvous; ``None`` if only that
            node knows.
        is_coordinator: Whether this node hosts it; without ``ports``, by a coordinator
            of ours, within the agent's process.
        local_address: This node's address for the job, as a number; ``None`` if it is
            not known.
        listen: Address and port on which this process hosts the rendezvous; ``None``
            if it hosts none, or listens on all addresses.
        may_join: Whether the port of a rendezvous that is to be hosted here may be
            taken by another agent of this machine, which is then the host.
        interface: Where gloo will be, for a person; empty if that is left to it.
        options: Options of torchrun that follow, by their names in its parser.
        environment: Environment variables that follow.
        notes: What was corrected, the same on all nodes.
        advice: What is probably not meant.
        warnings: What is wrong on this node, and was worked around.
        hint: What may help where nodes do not come.
        network_hint: What may help where this node does not reach the head node.
    """

    backend: str
    nodes: int = 1
    node_rank: int = 0
    report_rank: int = 0
    launch_id: str = ""
    started_by: Launcher | None = None
    started: str = ""
    hosts: tuple[str, ...] = ()
    fast_hosts: tuple[str, ...] = ()
    fewest: int = 0
    may_grow: bool = False
    spares: Spares = field(default_factory=Spares)
    key: KeyFile = field(default_factory=KeyFile)
    site: Setting | None = None
    endpoint: str = ""
    connect_host: str = ""
    ports: tuple[int, ...] = ()
    notice_ports: tuple[int, ...] = ()
    coordinator: int | None = None
    is_coordinator: bool = False
    local_address: str | None = None
    listen: tuple[str, int] | None = None
    may_join: bool = False
    interface: str = ""
    options: Mapping[str, Setting] = field(default_factory=dict)
    environment: Mapping[str, Setting] = field(default_factory=dict)
    notes: tuple[Message, ...] = ()
    advice: tuple[Message, ...] = ()
    warnings: tuple[Message, ...] = ()
    hint: str = ""
    network_hint: str = ""

    @property
    def active(self) -> int:
        """Number of nodes that have workers at a time."""
        return self.nodes - self.spares.number

    @property
    def is_ours(self) -> bool:
        """Whether the nodes meet by our rendezvous."""
        return self.backend == SCHEDULER

    @property
    def in_process(self) -> bool:
        """Whether our coordinator serves this process only: it has no port."""
        return self.is_coordinator and not self.ports

    @property
    def has_coordinator(self) -> bool:
        """Whether our coordinator collects the failures and decides on restarts."""
        return self.is_ours or self.in_process

    def uses_ours(self, options: Options) -> bool:
        """Return whether the nodes meet by our rendezvous: in a dry run, if they can.

        There a node that refuses tells the others.
        """
        is_known = self.nodes > 1 and bool(self.hosts)
        can_meet = self.backend in {C10D, STATIC} and not options.rdzv_conf.uses_file
        return self.is_ours or (bool(options.hpc_dry_run) and is_known and can_meet)

    def by_torch(self) -> Meeting:
        """Return the same meeting by torch's c10d."""
        is_coordinator = self.is_coordinator and not self.in_process
        return replace(
            self, backend=C10D, ports=self.ports[:1], is_coordinator=is_coordinator
        )
