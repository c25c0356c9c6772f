"""The report of an examination, and its parts.

The nodes send each other these parts, `torchrun_hpc.doctor.examine` returns the report,
and ``--json`` writes it. `torchrun_hpc.wire` writes them as JSON, and checks what has
arrived. Ranks of nodes are those of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import wire
from torchrun_hpc.host.nvml import Gpu  # noqa: TC001 - wire.py reads the hints

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrun_hpc.errors import Message

SCHEMA = "torchrun_hpc.doctor/2"

# Variable with the path of the file that the workers of a launch write to.
RESULTS = "HPC_DOCTOR_RESULTS"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        code: ``HPC`` and three digits, of the documentation.
        text: The problem, with the values.
        remedy: What to do about it.
        nodes: Ranks of the nodes that are to blame; empty if it is not known which one
            is, or if all are.
        is_suspect: Whether a job is likely to be slow, or to fail; otherwise it is
            advice.
    """

    code: str
    text: str
    remedy: str = ""
    nodes: tuple[int, ...] = ()
    is_suspect: bool = True

    @property
    def kind(self) -> str:
        """``suspect`` or ``advice``, for a person."""
        return "suspect" if self.is_suspect else "advice"


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: Its name.
        addresses: Its addresses, without the length of the prefix.
        is_up: Whether it is up.
        mtu: Bytes of the largest packet.
        speed_mbit: Nominal Mbit/s; 0 if the system does not know.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    mtu: int
    speed_mbit: int


@dataclass(frozen=True)
class Folder:
    """A file system that jobs write to.

    Attributes:
        path: A folder in it.
        free: Bytes that this user may still write.
        size: Bytes of all.
        problem: Why a file cannot be written there; empty if one can.
    """

    path: str
    free: int
    size: int
    problem: str


@dataclass(frozen=True)
class Torch:
    """Torch on a node, as a process sees it that has imported it.

    Attributes:
        version: Its release; empty if only the launcher has imported it.
        import_s: Seconds of the first ``import torch`` of the launch on this node; near
            0 if a fork server has imported it (``--hpc-preload``).
        libraries: Releases of ``cuda``, ``nccl``, ``hip``, ``cudnn``, as far as there
            are any.
        gpus: How many GPUs it sees.
    """

    version: str = ""
    import_s: float = 0.0
    libraries: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0

    def after(self, earlier: Torch | None) -> Torch:
        """Return what is known of both: a second import finds the files in memory."""
        if earlier is None:
            return self
        slowest = max(self.import_s, earlier.import_s)
        return replace(self if self.version else earlier, import_s=slowest)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node's record of itself.

    Attributes:
        rank: Its rank.
        host: Its name in the job.
        address: Its address for the job; empty if it is not known.
        interface: The interface that has this address; empty if none has.
        fast_host: Its name on the job's network, by which it knows itself.
        port: Port on which it listens for the other nodes; 0 if it does not.
        workers: How many workers it starts.
        interfaces: All interfaces but loopback.
        names: Addresses by name of a node: of this one, the first, and the next one.
        routes: By the same names: from which address it sends there; empty if it
            has no route.
        resolver_s: Seconds that it took to resolve ``names``.
        limits: Of open ``files``, ``processes``, and bytes of ``locked memory``; -1
            if there is none.
        folders: ``/dev/shm``, TMPDIR and HOME.
        cpus: The CPUs that it may run on, as a list of ranges.
        cores: How many CPUs the machine has.
        gpus: GPUs that NVML knows.
        driver: Release of the GPUs' driver; empty without.
        versions: Of ``python``, ``torchrun_hpc`` and the ``kernel``.
        variables: Those that matter, which somebody has set.
        local_ports: The first and the last port that the system gives to connections
            (``net.ipv4.ip_local_port_range``); 0 and 0 if not known.
        reserved_ports: Ports that the system gives to nobody who does not ask for them
            (``net.ipv4.ip_local_reserved_ports``), as a list of ranges.
        torch: Torch, if a launch has got as far as that.
    """

    rank: int
    host: str
    address: str
    interface: str
    fast_host: str
    port: int = 0
    workers: int
    interfaces: tuple[Interface, ...]
    names: Mapping[str, tuple[str, ...]]
    routes: Mapping[str, str]
    resolver_s: float
    limits: Mapping[str, int]
    folders: tuple[Folder, ...]
    cpus: str
    cores: int
    gpus: tuple[Gpu, ...]
    driver: str
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    local_ports: tuple[int, int] = (0, 0)
    reserved_ports: str = ""
    torch: Torch | None = None


@dataclass(frozen=True)
class Link:
    """Two nodes that have measured what is between them.

    Attributes:
        first: Rank of one node.
        second: Rank of the other one, which is higher.
        problem: Why there are no figures; empty if there are.
        blocked: Ranks of those of the two that cannot open a connection to the other.
        latency_s: Seconds there and back of a small message: the tenth percentile.
        forward: Bytes per second from the first to the second, over TCP.
        backward: The same from the second to the first.
        lost: Share of the segments that had to be sent again, by TCP's own count.
        clock_s: Seconds that the second one's clock is ahead of the first one's.
        lost_mtu: Bytes of a packet that the interface allows, and that did not arrive;
            0 if it did.
        looks: How often they were looked at; the figures are the best ones.
    """

    first: int
    second: int
    problem: str = ""
    blocked: tuple[int, ...] = ()
    latency_s: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    lost: float = 0.0
    clock_s: float = 0.0
    lost_mtu: int = 0
    looks: int = 1


@dataclass(frozen=True)
class Collective:
    """One operation of torch's on one size; bandwidths as nccl-tests define them.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``.
        scope: Empty for all workers; otherwise the node whose workers it is of.
        size: Bytes; of all_gather and reduce_scatter, those of all ranks together.
        count: Elements, of four bytes each.
        time_s: Seconds of one operation.
        algbw: size / time, in bytes per second.
        busbw: The same, corrected by the number of ranks.
        wrong: Elements with a wrong result; -1 if the backend has no such operation.
    """

    operation: str
    scope: str
    size: int
    count: int
    time_s: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True)
class Worker:
    """A worker of the launch: how its device computes, and when it arrives.

    The device multiplies the same two matrices before the collectives, and after them:
    that is the first and the second test.

    Attributes:
        rank: Its rank in the launch.
        node: Rank of its node in the job.
        device: Model of its GPU or CPU.
        dtype: Type of the matrices: ``float32`` or ``bfloat16``.
        flops: Floating point operations per second, in each test the best of several
            products; of a CPU, per second that its threads have computed.
        digests: The first 16 digits of the SHA-256 of the product, in each test.
        norm: Frobenius norm of the first test's product; 0 if that is not finite.
        wrong: Elements that are not finite, of both tests.
        late_s: Seconds that the others waited for it before an operation: the median.
        transport: Transport of NCCL, such as ``IB`` or ``Socket``; empty with gloo, or
            if that is not known.
    """

    rank: int
    node: int
    device: str
    dtype: str
    flops: tuple[float, ...]
    digests: tuple[str, ...]
    norm: float
    wrong: int
    late_s: float
    transport: str


@dataclass(frozen=True)
class Report:
    """An examination.

    Attributes:
        schema: `SCHEMA`.
        launch_id: Of the step; empty without a scheduler.
        site: Name of the computing centre; empty if it is not known.
        scheduler: What started the tasks, such as ``Slurm`` or ``Open MPI in PBS``;
            empty if nothing did.
        started: When, in UTC, as ISO 8601.
        seconds: How long it took.
        torchrun_hpc: Version of this package.
        backend: ``nccl`` or ``gloo``, of the collectives; empty without.
        hosts: Names of all nodes of the job, by rank.
        nodes: Those that have come, by rank.
        links: The pairs that were looked at.
        workers: Those of the launch that came to its end, by rank.
        collectives: Torch's own operations.
        findings: Findings, the worst first.
    """

    schema: str
    launch_id: str
    site: str
    scheduler: str
    started: str
    seconds: float
    torchrun_hpc: str
    backend: str
    hosts: tuple[str, ...]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    workers: tuple[Worker, ...]
    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]


class NotMetError(Exception):
    """This task has not met the others.

    Attributes:
        message: Why, for a person.
        report: Of its own node.
    """

    def __init__(self, message: Message, report: Report) -> None:
        super().__init__(str(message))
        self.message = message
        self.report = report


def printable(value: _T) -> _T:
    """Return a part of a report, with escapes for what a terminal would act on."""
    return wire.decode(type(value), _escaped(wire.encode(value)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    if isinstance(value, dict):
        return dict(map(_escaped, value.items()))
    return [*map(_escaped, value)] if isinstance(value, list | tuple) else value


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in the order of a report: what is suspect, then advice."""
    return tuple(sorted(findings, key=lambda each: not each.is_suspect))


def suspects(report: Report) -> list[int]:
    """Return the ranks of the nodes that are to blame for something."""
    return sorted({r for f in report.findings if f.is_suspect for r in f.nodes})


def exclude(report: Report) -> str:
    """Return the option that leaves the suspect nodes out; empty if there is none.

    It is Slurm's. If most nodes are suspect, it is of no use: the cause is another.
    """
    names = [report.hosts[rank] for rank in suspects(report)]
    is_few = 0 < 2 * len(names) <= len(report.hosts)
    is_useful = is_few and all(names) and "Slurm" in report.scheduler
    return f"--exclude={','.join(names)}" if is_useful else ""


def exit_code(report: Report) -> int:
    """Return 1 if anything is suspect, otherwise 0."""
    return int(any(finding.is_suspect for finding in report.findings))
