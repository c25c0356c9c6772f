"""What an examination has found, as plain data: the report, and what it is made of.

It is what the nodes send each other, what ``--json`` writes, and what
`torchrun_hpc.doctor.examine` returns. Ranks of nodes are those of the job. Whatever
comes from another process is checked by `torchrun_hpc.wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrun_hpc.errors import Message

SCHEMA = "torchrun_hpc.doctor/1"


class Finding(TypedDict):
    """Something that is wrong.

    Attributes:
        code: ``HPC`` and three digits, of the documentation.
        text: What is wrong, with the values.
        remedy: What to do about it.
        nodes: Ranks of the nodes that are to blame; empty where it is not known which
            one is, or all are.
        is_suspect: Whether a job is likely to be slow, or to fail. Else it is advice.
    """

    code: str
    text: str
    remedy: str
    nodes: list[int]
    is_suspect: bool


class Interface(TypedDict):
    """A network interface.

    Attributes:
        name: Its name.
        addresses: Its addresses, without the length of the prefix.
        is_up: Whether it is up.
        mtu: Bytes of the largest packet.
        speed_mbit: Nominal Mbit/s; 0 where the system does not know.
    """

    name: str
    addresses: list[str]
    is_up: bool
    mtu: int
    speed_mbit: int


class Folder(TypedDict):
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


class Gpu(TypedDict):
    """A GPU, as NVML knows it.

    Attributes:
        model: Its name.
        ecc_errors: Uncorrected errors since the driver was loaded; -1 if not known.
        processes: Pids of the processes that compute on it.
        memory_used: Bytes.
    """

    model: str
    ecc_errors: int
    processes: list[int]
    memory_used: int


class Torch(TypedDict):
    """Torch on a node, as a process sees it that has imported it.

    Attributes:
        version: Its release; empty if it cannot be imported.
        import_s: Seconds of ``import torch``.
        problem: Why it cannot be imported; empty if it can.
        libraries: Releases of ``cuda``, ``nccl``, ``hip``, ``cudnn``, as far as there
            are any.
        gpus: How many GPUs it sees.
        findings: What the launcher would say of it.
    """

    version: str
    import_s: float
    problem: str
    libraries: dict[str, str]
    gpus: int
    findings: list[Finding]


class Node(TypedDict):
    """What a node shows of itself.

    Attributes:
        rank: Its rank.
        host: Its name in the job.
        address: Its address for the job; empty if it is not known.
        interface: The interface that has this address; empty if none has.
        fast_host: Its name on the job's network, by which it knows itself.
        port: Where it listens for the other nodes; 0 if it does not.
        workers: How many workers it starts.
        wants_gpus: Whether these are to be as many as it has GPUs.
        interfaces: All interfaces but loopback.
        names: Addresses by name of a node: of this one, the first, and the next one.
        routes: By the same names: from which address it sends there; empty where it
            has no route.
        resolver: ``answers``, ``silent``, ``down`` or ``unknown``: what becomes of
            torch's questions for the name of an address.
        resolver_s: Seconds that it took to resolve ``names``.
        limits: Of open ``files``, ``processes``, and bytes of ``locked memory``; -1
            where there is none.
        folders: ``/dev/shm``, TMPDIR and HOME.
        cpus: The CPUs that it may run on, as a list of ranges.
        cores: How many CPUs the machine has.
        gpus: GPUs that NVML knows.
        driver: Release of the GPUs' driver; empty without.
        versions: Of ``python``, ``torchrun_hpc``, the kernel, and libfabric's plugin
            for NCCL.
        torch: Torch, where it was looked at.
        variables: Those that matter, which somebody has set.
        findings: What the launcher itself would say on this node.
    """

    rank: int
    host: str
    address: str
    interface: str
    fast_host: str
    port: int
    workers: int
    wants_gpus: bool
    interfaces: list[Interface]
    names: dict[str, list[str]]
    routes: dict[str, str]
    resolver: str
    resolver_s: float
    limits: dict[str, int]
    folders: list[Folder]
    cpus: str
    cores: int
    gpus: list[Gpu]
    driver: str
    versions: dict[str, str]
    torch: Torch | None
    variables: dict[str, str]
    findings: list[Finding]


class Link(TypedDict):
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
        networks: Whether the two reach each other on other interfaces, by name: each
            the other one.
        looks: How often they were looked at; the figures are the best ones.
    """

    first: int
    second: int
    problem: str
    blocked: list[int]
    latency_s: float
    forward: float
    backward: float
    lost: float
    clock_s: float
    lost_mtu: int
    networks: dict[str, bool]
    looks: int


class Collective(TypedDict):
    """One operation of torch's on one size; bandwidths as nccl-tests define them.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``.
        scope: Empty for all workers; else the name of the node whose workers it is of.
        size: Bytes; of all_gather and reduce_scatter, those of all ranks together.
        count: Elements, of four bytes each.
        time_s: Seconds of one operation.
        algbw: size / time, in bytes per second.
        busbw: The same, corrected by the number of ranks.
        wrong: Elements with a wrong result; -1 where the backend has no such operation.
    """

    operation: str
    scope: str
    size: int
    count: int
    time_s: float
    algbw: float
    busbw: float
    wrong: int


class Report(TypedDict):
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
        collectives: Torch's own operations.
        findings: What is wrong, the worst first.
    """

    schema: str
    launch_id: str
    site: str
    scheduler: str
    started: str
    seconds: float
    torchrun_hpc: str
    backend: str
    hosts: list[str]
    nodes: list[Node]
    links: list[Link]
    collectives: list[Collective]
    findings: list[Finding]


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


def of_launcher(
    code: str, text: str, nodes: list[int], *, is_suspect: bool = False
) -> Finding:
    """Return what the launcher itself says; its text has the remedy.

    Args:
        code: Its code.
        text: What it says.
        nodes: Where it says it; empty if it is the same everywhere.
        is_suspect: Whether it would refuse to start.
    """
    return Finding(code=code, text=text, remedy="", nodes=nodes, is_suspect=is_suspect)


def no_torch(problem: str) -> Torch:
    """Return what is known of a torch that cannot be imported."""
    return Torch(
        version="", import_s=0.0, problem=problem, libraries={}, gpus=0, findings=[]
    )


def printable(value: Any) -> Any:
    """Return plain data, where what a terminal would act on is written as an escape."""
    if isinstance(value, dict):
        return {printable(key): printable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [printable(part) for part in value]
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return value


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in the order of a report: advice behind what is suspect."""
    return sorted(findings, key=lambda each: not each["is_suspect"])


def suspects(report: Report) -> list[int]:
    """Return the ranks of the nodes that are to blame for something."""
    blamed = {r for f in report["findings"] if f["is_suspect"] for r in f["nodes"]}
    return sorted(blamed)


def exclude(report: Report) -> str:
    """Return the option that leaves the suspect nodes out; empty if there is none.

    It is Slurm's. Where most nodes are suspect, it is of no use: the cause is another.
    """
    hosts, blamed = report["hosts"], suspects(report)
    names = [hosts[rank] for rank in blamed if hosts[rank]]
    is_useful = (
        "Slurm" in report["scheduler"]
        and 0 < len(names) == len(blamed) <= len(hosts) // 2
    )
    return f"--exclude={','.join(names)}" if is_useful else ""


def exit_code(report: Report) -> int:
    """Return 1 if anything is suspect, else 0."""
    return int(any(finding["is_suspect"] for finding in report["findings"]))
