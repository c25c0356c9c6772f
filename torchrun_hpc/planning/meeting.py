"""The meeting: the nodes, this node's rank, and the endpoint.

It is decided before torch is imported, so that a node that cannot start can notify the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.options.values import C10D, NONE, REQUIRE, SCHEDULER, STATIC
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.setting import Setting

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs


@dataclass(frozen=True)
class Spares:
    """The spare nodes of a job, which replace lost nodes."""

    number: int = 0
    after: int = 0  # seconds until a spare replaces a node that has not joined
    health_check: str = ""  # command that checks a node; empty without one
    health_check_timeout: int = 0  # its limit in seconds
    exclude: str = ""  # the scheduler's option that excludes nodes; empty without one


@dataclass(frozen=True)
class KeyFile:
    """The file with the user's key, which proves that a node belongs to the job."""

    path: str = ""  # ``~`` is the user's home; empty without a key
    source: str = ""  # the option that sets the path; empty for the default path
    required: str = ""  # the option that requires a key; empty without it
    may_make: bool = True  # whether a node makes the file if it does not exist


@dataclass(frozen=True)
class Meeting:
    """The nodes, and where they meet.

    Attributes:
        report_rank: Rank that decides who reports: the node's, or the task's in direct
            mode.
        started: The end of what must be equal in the command, with a digest of all of
            it; empty if ``launch_id`` identifies a launch.
        fast_hosts: Their names on the fast network, by the site's rule, unresolved.
        site: Name of the site, with the variable that identifies it.
        compared: Values that should be equal on all nodes, for a message.
        ports: Ports of the coordinator, in the order in which it tries them.
        notice_ports: Ports on which it reports that ``ports`` are taken.
        coordinator: Rank of the node that hosts the rendezvous; ``None`` if only that
            node knows.
        is_coordinator: Whether this node hosts it; without ``ports``, in the agent's
            process.
        local_address: This node's address for the job, as a number; ``None`` if
            unknown.
        listen: Address and port on which this process hosts the rendezvous; ``None`` if
            it hosts none, or listens on all addresses.
        may_join: Whether another agent of this machine can have the port and be the
            host.
        options: Derived options of torchrun, by their names in its parser.
    """

    backend: str  # ``scheduler`` and ``direct`` are ours, the others are torch's
    nodes: int = 1
    node_rank: int = 0
    report_rank: int = 0
    launch_id: str = ""  # of this launch alone; can be empty on one node
    started_by: Launcher | None = None  # as in `Job`
    started: str = ""
    hosts: tuple[str, ...] = ()  # by rank; empty without a scheduler
    fast_hosts: tuple[str, ...] = ()
    fewest: int = 0  # number of nodes that is enough to start; 0 if all are needed
    may_grow: bool = False  # whether agents of other launches can join
    silence_timeout: int = 0  # seconds that an agent may be silent, if ours
    spares: Spares = field(default_factory=Spares)
    key: KeyFile = field(default_factory=KeyFile)  # empty if nobody else can connect
    site: Setting | None = None
    compared: str = ""
    endpoint: str = ""  # for messages
    connect_host: str = ""  # address or name to connect to; empty if torch finds it
    ports: tuple[int, ...] = ()
    notice_ports: tuple[int, ...] = ()
    coordinator: int | None = None
    is_coordinator: bool = False
    local_address: str | None = None
    listen: tuple[str, int] | None = None
    may_join: bool = False
    interface: str = ""  # of gloo, for messages; empty if gloo chooses it
    options: Mapping[str, Setting] = field(default_factory=dict)
    environment: Mapping[str, Setting] = field(default_factory=dict)
    notes: tuple[Message, ...] = ()  # corrections, the same on all nodes
    advice: tuple[Message, ...] = ()  # probable mistakes
    warnings: tuple[Message, ...] = ()  # problems of this node that the launch survives
    hint: str = ""  # for nodes that do not join
    network_hint: str = ""  # for a node that does not reach the head node

    @property
    def active(self) -> int:
        """Number of nodes with workers."""
        return self.nodes - self.spares.number

    @property
    def is_ours(self) -> bool:
        """Whether the nodes meet by our rendezvous."""
        return self.backend == SCHEDULER

    @property
    def in_process(self) -> bool:
        """Whether our coordinator serves only this process, without a port."""
        return self.is_coordinator and not self.ports

    @property
    def has_coordinator(self) -> bool:
        """Whether our coordinator collects the failures and decides on restarts."""
        return self.is_ours or self.in_process

    def uses_ours(self, options: Options) -> bool:
        """Return whether the nodes meet by our rendezvous.

        A dry run uses it if possible, because a refusing node notifies the others.
        """
        is_known = self.nodes > 1 and bool(self.hosts)
        can_meet = self.backend in {C10D, STATIC} and not options.rdzv_conf.uses_file
        return self.is_ours or (bool(options.hpc_dry_run) and is_known and can_meet)


# --- the proof of ownership -----------------------------------------------------------


def key_file(inputs: Inputs) -> KeyFile:
    """Return the file of the user's key, by default in the XDG configuration folder.

    The XDG Base Directory Specification ignores relative paths.
    """
    options, folder = inputs.options, inputs.environ.get("XDG_CONFIG_HOME", "")
    if options.hpc_auth == NONE:
        return KeyFile()
    default = f"{folder if folder.startswith('/') else '~/.config'}/torchrun_hpc/key"
    required = str(options["hpc_auth"]) if options.hpc_auth == REQUIRE else ""
    path = options.hpc_key_file
    source = str(options["hpc_key_file"]) if path else ""
    return KeyFile(path or default, source, required, not options.hpc_dry_run)


def check_key(inputs: Inputs, meeting: Meeting) -> None:
    """Check that a required proof is possible."""
    options = inputs.options
    if options.hpc_auth == REQUIRE and not meeting.has_coordinator:
        how = "direct mode" if inputs.mode.is_direct else meeting.backend
        text = f"{options['hpc_auth']}, but {how} cannot check a key. Start one task "
        text += "per node in a job, without --rdzv-backend, or pass --hpc-auth=auto"
        raise LaunchError("HPC239", text, everywhere=True)
