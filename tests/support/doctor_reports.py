"""Reports by hand, as an examination might have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torchrun_hpc.doctor.results import (
    SCHEMA,
    Collective,
    DoctorReport,
    Finding,
    Folder,
    GpuReport,
    InterfaceReport,
    Link,
    NodeReport,
    Torch,
    WorkerReport,
)

NONE: dict[int, dict[str, Any]] = {}
SHM = "/dev/shm"  # noqa: S108 - nothing is written
HOSTS = [f"jwb{number:04}" for number in range(1, 129)]
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
HOSTILE = [
    "<script>alert(1)</script>",
    "$\\frac{a}{b}$_x^2",
    "\"><img src='http://evil.example/a.png'>",
    "node & co; url(http://evil.example)",
    "\x1b[31mred\x00\ud800\u202e",
    "&lt;b&gt;",
    "節点" * 20,
    "",
]


def make_interface(
    name: str, *addresses: str, is_up: bool = True, mtu: int = 1500, speed_mbit: int = 0
) -> InterfaceReport:
    return InterfaceReport(name, addresses, is_up, mtu, speed_mbit)


def make_folder(path: str = "/scratch", **changes: Any) -> Folder:
    return replace(Folder(path, free=10**10, size=10**11, problem=""), **changes)


def make_gpu(**changes: Any) -> GpuReport:
    return replace(GpuReport("A100", ecc_errors=0, memory=40 * 2**30), **changes)


def make_torch(**changes: Any) -> Torch:
    libraries = {"cuda": "13.0", "nccl": "2.28.3"}
    return replace(Torch("2.13.0", 4.0, libraries, gpus=4), **changes)


def make_node(rank: int = 0, **changes: Any) -> NodeReport:
    """Return what a sound node shows."""
    host, address = HOSTS[rank], f"10.20.0.{rank + 1}"
    sound = NodeReport(
        rank=rank,
        host=host,
        address=address,
        interface="ib0",
        fast_host=f"{host}i",
        port=40000,
        workers=4,
        interfaces=(
            make_interface("eth0", f"10.10.0.{rank + 1}", speed_mbit=10000),
            make_interface("ib0", address, mtu=4092, speed_mbit=200000),
        ),
        names={f"{host}i": (address,), f"{HOSTS[0]}i": ("10.20.0.1",)},
        routes={f"{HOSTS[0]}i": address} if rank else {},
        resolver_s=0.01,
        limits={"files": 131072, "processes": 2061446, "locked memory": -1},
        folders=(make_folder(SHM), make_folder(), make_folder("/home")),
        cpus="0-47",
        cores=96,
        gpus=(make_gpu(),) * 4,
        driver="580.95.05",
        versions={"python": "3.12.3", "torchrun_hpc": "0.1.0", "kernel": "5.14.0"},
        variables={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "12"},
        local_ports=(32768, 60999),
        torch=make_torch(),
    )
    return replace(sound, **changes)


def make_nodes(
    number: int, changes: Mapping[int, Mapping[str, Any]] = NONE
) -> list[NodeReport]:
    """Return some nodes; `changes` has the values that are not sound, by rank."""
    return [make_node(rank, **changes.get(rank, {})) for rank in range(number)]


def node_with(key: str, **values: Any) -> dict[str, Any]:
    """Return one part of a sound node with other values."""
    part = getattr(make_node(), key)
    return {key: part | values if isinstance(part, dict) else replace(part, **values)}


def make_link(first: int, second: int, **changes: Any) -> Link:
    """Return a link; one between racks is later."""
    latency_s = 31e-6 + (9e-6 if first // 16 != second // 16 else 0)
    sound = Link(first, second, latency_s=latency_s, forward=23e9, backward=24e9)
    return replace(sound, **changes)


def make_worker(rank: int = 0, **changes: Any) -> WorkerReport:
    """Return a worker, one of four of a node."""
    sound = WorkerReport(
        rank=rank,
        node=rank // 4,
        device="A100",
        dtype="bfloat16",
        flops=(2.4e14, 2.5e14),
        digests=("5ca1e", "5ca1e"),
        norm=1234.5,
        wrong=0,
        late_s=0.0001,
        transport="IB",
    )
    return replace(sound, **changes)


def make_collectives(scope: str = "", speed: float = 80e9) -> list[Collective]:
    """Return all operations, on sizes that are powers of 2."""
    rows = []
    for number, operation in enumerate(OPERATIONS, 1):
        for size in (2**exponent for exponent in range(4, 31, 2)):
            rate = speed * (1 - number / 10) / (1 + number * 2e6 / size)
            count, seconds = size // 4, size / rate
            row = Collective(operation, scope, size, count, seconds, rate, rate, 0)
            rows.append(row)
    return rows


def finding(code: str, text: str, *ranks: int, is_suspect: bool = True) -> Finding:
    """Return a finding about some nodes."""
    remedy = "exclude the node, and report it to the administrator"
    return Finding(code, text, remedy, ranks, is_suspect)


def as_lines(*findings: Finding) -> list[str]:
    """Return findings as lines of a golden file, with nodes and remedies."""
    return [
        line
        for each in findings
        for line in (
            f"{each.code} {each.kind}, nodes {[*each.nodes]}: {each.text}",
            f"    {each.remedy}",
        )
    ]


def make_report(
    count: int = 3,
    slow: Collection[int] = (),
    missing: Collection[int] = (),
    **changes: Any,
) -> DoctorReport:
    """Return the report of an examination.

    Args:
        count: How many nodes there are.
        slow: Ranks of nodes that receive slowly, and are suspect.
        missing: Ranks of nodes that did not join.
        changes: Other parts of the report.
    """
    nodes, hosts = make_nodes(count), tuple(HOSTS[:count])
    came = [rank for rank in range(count) if rank not in missing]
    links = [
        make_link(first, second)
        for first in came
        for second in came
        if first < second and (count <= 32 or (first + second) % count < 31)
    ]
    links = [
        replace(
            link,
            forward=link.forward * (0.02 if link.second in slow else 1),
            backward=link.backward * (0.02 if link.first in slow else 1),
        )
        for link in links
    ]
    collectives = make_collectives() if count > 1 else []
    for rank in came:
        collectives += make_collectives(hosts[rank], 220e9 - rank * 1e8)
    late = [finding("HPC178", f"{hosts[r]} did not join", r) for r in missing]
    bad = [finding("HPC191", f"{hosts[r]}, with all nodes: 3 Gbit/s", r) for r in slow]
    report = DoctorReport(
        schema=SCHEMA,
        launch_id="123456.0",
        site="jsc",
        scheduler="Slurm",
        started="2026-11-23T01:02:03+00:00",
        seconds=14.23,
        torchrun_hpc="0.1.0",
        backend="nccl",
        hosts=hosts,
        nodes=tuple(nodes[rank] for rank in came),
        links=tuple(links),
        workers=tuple(make_worker(4 * node + gpu) for node in came for gpu in range(4)),
        collectives=tuple(collectives),
        findings=tuple(late + bad),
    )
    return replace(report, **changes)


def changed(
    report: DoctorReport, part: str, number: int, **changes: Any
) -> DoctorReport:
    """Return a report with other values of one element of a part."""
    parts = list(getattr(report, part))
    parts[number] = replace(parts[number], **changes)
    other: dict[str, Any] = {part: tuple(parts)}
    return replace(report, **other)


def hostile_report() -> DoctorReport:
    """Return a report in which every name tries to be something else."""
    report = make_report(len(HOSTILE), slow=[1, 2], missing=[5])
    rows = make_collectives()[:2]
    nodes = [
        replace(
            node,
            host=name,
            address=name,
            interface=name,
            cpus=name,
            gpus=(make_gpu(model=name),),
            torch=make_torch(version=name),
        )
        for node in report.nodes
        for name in [HOSTILE[node.rank]]
    ]
    links = [make_link(0, 1, problem=HOSTILE[2]), *report.links[1:]]
    every_name = "".join(HOSTILE)
    return replace(
        report,
        site=every_name,
        launch_id=every_name,
        started=every_name,
        torchrun_hpc=every_name,
        backend=every_name,
        hosts=tuple(HOSTILE),
        nodes=tuple(nodes),
        links=tuple(links),
        workers=tuple(
            make_worker(rank, node=rank, device=name, dtype=name, transport=name)
            for rank, name in enumerate(HOSTILE)
        ),
        collectives=(
            *report.collectives,
            *(replace(x, operation=n, scope=n) for n in HOSTILE for x in rows),
        ),
        findings=(
            *report.findings,
            *(
                Finding(n, n, n, (rank,), is_suspect=True)
                for rank, n in enumerate(HOSTILE)
            ),
        ),
    )
