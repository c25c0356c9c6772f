"""The report of an examination, and its parts.

The nodes send each other these parts. `torchrun_hpc.doctor.examine` returns the report,
and ``--json`` writes it. `torchrun_hpc.wire` encodes them as JSON and checks received
ones.
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
    """A problem, or advice.

    Attributes:
        code: ``HPC`` and three digits; the messages page explains it.
        text: The problem, with the values.
        remedy: How to fix it.
        nodes: Ranks of the nodes at fault; empty if that is unknown, or if all are.
        is_suspect: Whether a job is likely to be slow or to fail; otherwise the
            finding is advice.
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
        addresses: Its addresses, without prefix lengths.
        is_up: Whether it is up.
        mtu: Size of the largest packet, in bytes.
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
        free: Bytes that this user can still write.
        size: Total bytes.
        problem: Why no file can be written there; empty if one can.
    """

    path: str
    free: int
    size: int
    problem: str


@dataclass(frozen=True)
class Torch:
    """PyTorch on a node, as a process that imported it sees it.

    Attributes:
        version: Its release; empty if only the launcher imported it.
        import_s: Seconds of the launch's first ``import torch`` on this node; near 0
            if a fork server imported it (``--hpc-preload``).
        libraries: Releases of ``cuda``, ``nccl``, ``hip`` and ``cudnn``, if present.
        gpus: Number of visible GPUs.
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
    """A node's description of itself.

    Attributes:
        rank: Its node rank.
        host: Its name in the job.
        address: Its address for the job; empty if unknown.
        interface: The interface with this address; empty if none has it.
        fast_host: Its name on the job's network, as it knows it itself.
        port: Port on which it listens for the other nodes; 0 if it does not listen.
        workers: Number of workers that it starts.
        interfaces: All interfaces except loopback.
        names: Addresses by node name, for this node, the head node, and the next node.
        routes: Source address by the same names; empty without a route.
        resolver_s: Seconds to resolve ``names``.
        limits: Limits of open ``files``, ``processes``, and bytes of ``locked memory``;
            -1 means unlimited.
        folders: ``/dev/shm``, TMPDIR and HOME.
        cpus: The CPUs that it may use, as a list of ranges.
        cores: Number of the machine's CPUs.
        gpus: GPUs that NVML knows.
        driver: Release of the GPU driver; empty without one.
        versions: Releases of ``python``, ``torchrun_hpc`` and the ``kernel``.
        variables: Relevant variables that are set.
        local_ports: First and last ephemeral port (``net.ipv4.ip_local_port_range``);
            0 and 0 if unknown.
        reserved_ports: Ports that the kernel gives only to programs that ask for them
            (``net.ipv4.ip_local_reserved_ports``), as a list of ranges.
        torch: PyTorch, if a launch got that far.
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
    """The measured connection between two nodes.

    Attributes:
        first: Node rank of one node.
        second: Node rank of the other one, which is higher.
        problem: Why there are no measurements; empty if there are.
        blocked: Ranks of those of the two that cannot connect to the other.
        latency_s: Round trip of a small message, in seconds: the tenth percentile.
        forward: Bytes per second from the first to the second, over TCP.
        backward: Bytes per second from the second to the first.
        lost: Share of retransmitted segments, by TCP's own count.
        clock_s: Seconds by which the second node's clock is ahead of the first's.
        lost_mtu: Size of a packet that the interface allows but that did not arrive,
            in bytes; 0 if it arrived.
        looks: How often the pair was measured; the best values count.
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
    """A collective operation on one size; bandwidths as nccl-tests define them.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``.
        scope: Empty for all workers; otherwise the node whose workers took part.
        size: Bytes; for all_gather and reduce_scatter, the sum over all ranks.
        count: Number of elements, four bytes each.
        time_s: Seconds of one operation.
        algbw: size / time, in bytes per second.
        busbw: algbw, corrected for the number of ranks.
        wrong: Number of wrong elements; -1 if the backend lacks the operation.
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

    The device multiplies the same two matrices before the collectives (first test) and
    after them (second test).

    Attributes:
        rank: Its rank in the launch.
        node: Its node's rank.
        device: Model of its GPU or CPU.
        dtype: Type of the matrices: ``float32`` or ``bfloat16``.
        flops: Floating point operations per second in each test, the best of several
            products; for a CPU, per second of CPU time of its threads.
        digests: First 16 digits of the product's SHA-256, in each test.
        norm: Frobenius norm of the first test's product; 0 if that is not finite.
        wrong: Number of elements that are not finite, in both tests.
        late_s: Median seconds that the others waited for it before an operation.
        transport: NCCL's transport, such as ``IB`` or ``Socket``; empty with gloo, or
            if unknown.
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
        launch_id: The step's launch id; empty without a scheduler.
        site: Name of the site; empty if unknown.
        scheduler: What started the tasks, such as ``Slurm`` or ``Open MPI in PBS``;
            empty if nothing did.
        started: Start time in UTC, as ISO 8601.
        seconds: Duration.
        torchrun_hpc: Version of this package.
        backend: Backend of the collectives, ``nccl`` or ``gloo``; empty without.
        hosts: Names of all nodes of the job, by rank.
        nodes: The nodes that answered, by rank.
        links: The measured pairs of nodes.
        workers: The workers that finished, by rank.
        collectives: Measured collective operations of PyTorch.
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
