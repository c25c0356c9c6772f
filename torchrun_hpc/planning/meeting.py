"""The meeting: the nodes, this node's rank, and the endpoint.

It is decided before torch is imported, so that a node that cannot start can notify the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.names import placed
from torchrun_hpc.options.values import C10D, NONE, REQUIRE, SCHEDULER, STATIC
from torchrun_hpc.planning import network_env
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.variables import CONFIG_HOME

if TYPE_CHECKING:
    from torchrun_hpc.options.options import Options
    from torchrun_hpc.planning.inputs import Inputs
    from torchrun_hpc.schedulers.job import Job


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
    """The nodes, and where they meet."""

    # --- who takes part ---
    # ``scheduler`` and ``direct`` are ours, the others are torch's.
    backend: str
    # Number of nodes, with the spares.
    nodes: int = 1
    # Rank of this node.
    node_rank: int = 0
    # Rank that decides who reports: the node's, or the task's in direct mode.
    report_rank: int = 0
    # Unique name of this launch; can be empty on one node.
    launch_id: str = ""
    # The program that started the tasks, if known.
    started_by: Launcher | None = None
    # The end of what must be equal in the command, with a digest of all of it; empty if
    # ``launch_id`` identifies a launch.
    started: str = ""
    # Names of the nodes by rank; unknown ones are empty. Without a scheduler, none.
    hosts: tuple[str, ...] = ()
    # Their names on the fast network, by the site's rule, unresolved.
    fast_hosts: tuple[str, ...] = ()
    # Number of nodes that is enough to start; 0 if all are needed.
    fewest: int = 0
    # Whether agents of other launches can join.
    may_grow: bool = False
    # Seconds that an agent may be silent, if the rendezvous is ours.
    silence_timeout: int = 0
    # How spare nodes replace lost ones; their number is 0 without any.
    spares: Spares = field(default_factory=Spares)
    # File of the user's key; its path is empty if nobody else can connect.
    key: KeyFile = field(default_factory=KeyFile)
    # Name of the site, with the variable that identifies it.
    site: Setting | None = None
    # Values that should be equal on all nodes, for a message.
    compared: str = ""

    # --- where they meet ---
    # Host and port, for messages.
    endpoint: str = ""
    # Address or name to connect to; empty if torch finds it.
    connect_host: str = ""
    # Ports of the coordinator, in the order in which it tries them.
    ports: tuple[int, ...] = ()
    # Ports on which it reports that ``ports`` are taken.
    notice_ports: tuple[int, ...] = ()
    # Rank of the node that hosts the rendezvous; ``None`` if only that node knows.
    coordinator: int | None = None
    # Whether this node hosts it; without ``ports``, in the agent's process.
    is_coordinator: bool = False
    # This node's address for the job, as a number; ``None`` if unknown.
    local_address: str | None = None
    # Address and port on which this process hosts the rendezvous; ``None`` if it hosts
    # none, or listens on all addresses.
    listen: tuple[str, int] | None = None
    # Whether another agent of this machine can have the port and be the host.
    may_join: bool = False
    # Interfaces of gloo and NCCL, for messages; empty if gloo chooses its own.
    interface: str = ""

    # --- what follows from it ---
    # Derived options of torchrun, by their names in its parser.
    options: Mapping[str, Setting] = field(default_factory=dict)
    # Variables to set, by name.
    environment: Mapping[str, Setting] = field(default_factory=dict)
    # Corrections, the same on all nodes.
    notes: tuple[Message, ...] = ()
    # Probable mistakes.
    advice: tuple[Message, ...] = ()
    # Problems of this node that the launch survives.
    warnings: tuple[Message, ...] = ()
    # Advice about nodes that do not join.
    hint: str = ""
    # Advice to a node that does not reach the head node.
    network_hint: str = ""

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


# --- parts that several modes share ---------------------------------------------------


def meeting_of(inputs: Inputs, job: Job, backend: str) -> Meeting:
    """Return the nodes of a step, with this node's rank, and the launch."""
    node_rank, _ = place_of(job)
    hosts = hosts_of(job)
    return Meeting(
        backend=backend,
        nodes=len(job.nodes),
        node_rank=node_rank,
        report_rank=node_rank,
        launch_id=job.launch_id,
        hosts=hosts,
        fast_hosts=tuple(map(inputs.rewrite, hosts)),
    )


def with_environment(
    inputs: Inputs, meeting: Meeting, environment: Mapping[str, Setting]
) -> Meeting:
    """Return the meeting with variables to set, and the interfaces that they name."""
    interface = network_env.interface_name(inputs.environ, environment)
    return replace(meeting, environment=environment, interface=interface)


def place_of(job: Job) -> tuple[int, int]:
    """Return the rank of this node, and its index in the job's nodes."""
    if job.node_rank is None or job.index is None:
        text = "this process is not on one of the job's nodes. Start it with "
        raise LaunchError("HPC068", text + job.launcher.name)
    return job.node_rank, job.index


def hosts_of(job: Job) -> tuple[str, ...]:
    """Return the names of the nodes by rank; unknown ones are empty.

    Only this node's name is certain: under Slurm, a rank may be no place in the list.
    """
    certain = {} if job.node_rank is None else {job.node_rank: job.own_name}
    return placed(job.nodes, certain)


# --- the proof of ownership -----------------------------------------------------------


def key_file(inputs: Inputs) -> KeyFile:
    """Return the file of the user's key, by default in the XDG configuration folder.

    The XDG Base Directory Specification ignores relative paths.
    """
    options, folder = inputs.options, inputs.environ.get(CONFIG_HOME, "")
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
