"""The report of an examination, and its parts.

Nodes send each other these parts as JSON, which `torchrun_hpc.wire` writes and checks.
Node ranks are the job's. docs/write_report.py writes the fields into reference.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torchrun_hpc import wire
from torchrun_hpc.variables import DOCTOR_RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchrun_hpc.errors import Message

    Write = Callable[[str, Any], object]  # gets a field of `LaunchEnd`, as plain data

SCHEMA = "torchrun_hpc.doctor/2"

# The remedy for a defect of a single node.
EXCLUDE = "exclude the node, and report it to the administrator"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """A problem.

    Attributes:
        code: ``HPC`` and three digits; messages.md explains each code.
        text: The problem, with the values.
        remedy: What to do about the problem.
        nodes: Ranks of the nodes to blame; empty if these are unknown, or if all nodes
            have the problem.
        is_suspect: Whether the problem is likely to slow a job down or to make it fail;
            otherwise the finding is advice.
    """

    code: str
    text: str
    remedy: str = ""
    nodes: tuple[int, ...] = ()
    is_suspect: bool = True

    @property
    def kind(self) -> str:
        """``suspect`` or ``advice``."""
        return "suspect" if self.is_suspect else "advice"


@dataclass(frozen=True)
class InterfaceReport:
    """A network interface.

    Attributes:
        name: The interface's name.
        addresses: The interface's addresses, without the prefix length.
        is_up: Whether the interface is up.
        mtu: Size of the largest packet in bytes.
        speed_mbit: Nominal speed in Mbit/s; 0 if unknown.
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
        path: A folder in this file system.
        free: Bytes that this user can still write.
        size: Bytes in total.
        problem: Why no file can be written to this folder; empty without a problem.
    """

    path: str
    free: int
    size: int
    problem: str


@dataclass(frozen=True)
class GpuReport:
    """A GPU that NVML lists.

    Attributes:
        model: The GPU's model, or ``unknown``.
        ecc_errors: Uncorrected errors since the driver was loaded; -1 if unknown.
        processes: Pids of the processes that compute on this GPU.
        memory_used: Bytes of the GPU's memory that are in use; 0 if unknown.
        memory: Size of the GPU's memory in bytes; 0 if unknown.
    """

    model: str
    ecc_errors: int = -1
    processes: tuple[int, ...] = ()
    memory_used: int = 0
    memory: int = 0


@dataclass(frozen=True)
class Torch:
    """PyTorch on a node, as seen by a process that has imported it.

    Attributes:
        version: PyTorch's release; empty if only the launcher has imported PyTorch.
        import_s: Seconds that the launch's first ``import torch`` took on this node;
            near 0 if a fork server had imported torch before.
        libraries: Releases of ``cuda``, ``nccl``, ``hip`` and ``cudnn``, if present.
        gpus: Number of visible GPUs.
    """

    version: str = ""
    import_s: float = 0.0
    libraries: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0

    def after(self, earlier: Torch | None) -> Torch:
        """Merge two records. A second import is faster: the files are in memory."""
        if earlier is None:
            return self
        slowest = max(self.import_s, earlier.import_s)
        return replace(self if self.version else earlier, import_s=slowest)


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """A node's record of itself.

    Attributes:
        rank: The node's rank.
        host: The node's name in the job.
        address: The node's address for the job; empty if unknown.
        interface: The interface with this address; empty if there is none.
        fast_host: The node's name on the job's network.
        port: The port on which the node listens for the other nodes; 0 without one.
        workers: Number of workers that the node starts.
        interfaces: All interfaces except loopback.
        names: Addresses of this node, the head node, and the next node, by node name.
        routes: Source address of packets to the nodes in ``names``; empty without a
            route.
        resolver_s: Seconds to resolve ``names``.
        limits: Limits on open ``files``, on ``processes``, and on bytes of ``locked
            memory``; -1 means no limit.
        folders: ``/dev/shm``, TMPDIR and HOME.
        cpus: CPUs in the affinity mask, as a list of ranges.
        cores: Number of the machine's CPUs.
        gpus: GPUs that NVML lists.
        driver: Release of the GPU driver; empty without a driver.
        versions: Versions of ``python``, ``torchrun_hpc`` and the ``kernel``.
        variables: Relevant environment variables that are set.
        local_ports: First and last port that Linux assigns to outgoing connections
            (``net.ipv4.ip_local_port_range``); 0 and 0 if unknown.
        reserved_ports: Ports that Linux assigns only to programs that request them
            (``net.ipv4.ip_local_reserved_ports``), as a list of ranges.
        torch: PyTorch on this node; ``None`` if no process of a launch has imported it.
    """

    rank: int
    host: str
    address: str
    interface: str
    fast_host: str
    port: int = 0
    workers: int
    interfaces: tuple[InterfaceReport, ...]
    names: Mapping[str, tuple[str, ...]]
    routes: Mapping[str, str]
    resolver_s: float
    limits: Mapping[str, int]
    folders: tuple[Folder, ...]
    cpus: str
    cores: int
    gpus: tuple[GpuReport, ...]
    driver: str
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    local_ports: tuple[int, int] = (0, 0)
    reserved_ports: str = ""
    torch: Torch | None = None

    @property
    def job_interface(self) -> InterfaceReport:
        """The interface with the node's address; an empty one if there is none."""
        none = InterfaceReport("", (), is_up=False, mtu=0, speed_mbit=0)
        return {each.name: each for each in self.interfaces}.get(self.interface, none)


@dataclass(frozen=True)
class Link:
    """The measured link between two nodes.

    Attributes:
        first: Rank of one node.
        second: Rank of the other node, which is higher.
        problem: Why the link was not measured; empty if it was measured.
        blocked: Ranks of the nodes of this pair that cannot connect to the other node.
        latency_s: Round-trip time of a small message in seconds (tenth percentile).
        forward: Bytes per second from the first node to the second, over TCP.
        backward: Bytes per second from the second node to the first, over TCP.
        lost: Share of the TCP segments that were sent again.
        clock_s: Seconds by which the second node's clock is ahead of the first node's
            clock.
        lost_mtu: Size in bytes of a packet that the MTU allows, but that did not
            arrive; 0 if no such packet was lost.
        looks: Number of measurements of this link. The other values are the best of
            these measurements.
        steady: Lowest rate of these measurements as a share of the highest rate, in
            the slower direction.
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
    steady: float = 1.0

    @property
    def pair(self) -> tuple[int, int]:
        """Ranks of both nodes."""
        return self.first, self.second

    @property
    def is_measured(self) -> bool:
        """Whether it has figures: bytes arrive in both directions."""
        return not self.problem and not self.lost_mtu

    @property
    def slower(self) -> float:
        """The rate in the slower direction."""
        return min(self.forward, self.backward)


@dataclass(frozen=True)
class Collective:
    """A collective operation with data of one size; bandwidths are as in nccl-tests.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
        scope: Empty for all workers; otherwise the node whose workers took part.
        size: Size of the data in bytes; for all_gather and reduce_scatter, of all ranks
            together.
        count: Number of elements. Each element has four bytes.
        time_s: Duration of one operation in seconds.
        algbw: ``size`` / ``time_s``, in bytes per second.
        busbw: ``algbw``, corrected for the number of ranks.
        wrong: Number of elements with a wrong result; -1 if the backend does not
            support the operation.
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
class WorkerReport:
    """A worker of the launch: results of the compute test, and its lateness.

    The device multiplies the same two matrices twice: before the collectives (the first
    test), and after them (the second test).

    Attributes:
        rank: The worker's rank in the launch.
        node: Rank of the worker's node in the job.
        device: Model of the worker's GPU or CPU.
        dtype: Type of the matrices: ``float32`` or ``bfloat16``.
        flops: Floating point operations per second in each test, the best of several
            products. For a CPU, only the time counts in which its threads computed.
        digests: The first 16 digits of the product's SHA-256, for each test.
        norm: Frobenius norm of the first test's product; 0 if it is not finite.
        wrong: Number of non-finite elements, summed over both tests.
        late_s: Median of the seconds that the other workers waited for this worker
            before an operation.
        transport: NCCL's transport, for example ``IB`` or ``Socket``; empty with gloo,
            or if unknown.
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
class DoctorReport:
    """The report of an examination.

    Attributes:
        schema: The name of the report's format: ``torchrun_hpc.doctor/2``.
        launch_id: Launch id of the step; empty without a scheduler.
        site: Name of the site; empty if unknown.
        scheduler: The launcher and scheduler that started the tasks, for example
            ``Open MPI in PBS``; empty without these.
        started: Start time in UTC, as ISO 8601.
        seconds: Duration in seconds.
        torchrun_hpc: Version of this package.
        backend: ``nccl`` or ``gloo``, for the collectives; empty if none ran.
        hosts: Names of all nodes of the job, by rank.
        nodes: The nodes that joined, by rank.
        links: The links between the measured pairs of nodes.
        workers: The workers that reached the end of the launch, by rank.
        collectives: The measured collective operations of PyTorch.
        findings: The problems, worst first.
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
    nodes: tuple[NodeReport, ...]
    links: tuple[Link, ...]
    workers: tuple[WorkerReport, ...]
    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]


class NotMetError(Exception):
    """This task did not meet the other tasks.

    Attributes:
        message: The reason.
        report: A report about this node only.
    """

    def __init__(self, message: Message, report: DoctorReport) -> None:
        super().__init__(str(message))
        self.message = message
        self.report = report


def writer(environ: Mapping[str, str]) -> Write:
    """Return a function by which a process of a launch writes a result as a line."""
    path = environ.get(DOCTOR_RESULTS)
    output = os.open(path, os.O_WRONLY | os.O_APPEND) if path else os.dup(1)
    return lambda name, value: os.write(output, wire.to_line({name: value}))


def printable(value: _T) -> _T:
    """Return a part of a report with its control characters escaped."""
    return wire.decode(type(value), _escaped(wire.encode(value)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    if isinstance(value, dict):
        return dict(map(_escaped, value.items()))
    return [*map(_escaped, value)] if isinstance(value, list | tuple) else value


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in a report's order: suspect ones, then advice."""
    return tuple(sorted(findings, key=lambda each: not each.is_suspect))


def suspects(report: DoctorReport) -> list[int]:
    """Return the ranks of the nodes to blame for a suspect finding."""
    return sorted({r for f in report.findings if f.is_suspect for r in f.nodes})


def exclude(report: DoctorReport) -> str:
    """Return Slurm's option to exclude the suspect nodes; empty if it does not help.

    It does not help if most nodes are suspect, because they share another cause.
    """
    names = [report.hosts[rank] for rank in suspects(report)]
    is_few = 0 < 2 * len(names) <= len(report.hosts)
    is_useful = is_few and all(names) and "Slurm" in report.scheduler
    return f"--exclude={','.join(names)}" if is_useful else ""


def exit_code(report: DoctorReport) -> int:
    """Return 1 if a finding is suspect, otherwise 0."""
    return int(any(finding.is_suspect for finding in report.findings))


# --- figures with their units -----------------------------------------------------


def rate(bandwidth: float) -> str:
    """Write bytes per second in bits, the unit of networks."""
    giga = 8 * bandwidth / 1e9
    return f"{giga:.2f} Gbit/s" if giga >= 1 else f"{giga * 1e3:.0f} Mbit/s"


def gigabytes(bandwidth: float) -> str:
    """Write bytes per second as nccl-tests do."""
    return f"{bandwidth / 1e9:.2f} GB/s"


def duration(seconds: float) -> str:
    """Write a short time."""
    milli = seconds * 1e3
    return f"{milli:.1f} ms" if milli >= 1 else f"{seconds * 1e6:.0f} us"


def size(number: float) -> str:
    """Write a number of bytes: ``512 B``, ``16 MiB``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 2**10:
            return f"{number:.4g} {unit}"
        number /= 2**10
    return f"{number:.4g} GiB"


def speed(flops: float) -> str:
    """Write floating point operations per second."""
    tera = flops / 1e12
    return f"{tera:.2f} TFLOP/s" if tera >= 1 else f"{flops / 1e9:.2f} GFLOP/s"
