"""Reports by hand, as an examination might have them."""

from __future__ import annotations

GPU = {"model": "NVIDIA A100", "ecc_errors": 0, "processes": [], "memory_used": 0}
TORCH = {
    "version": "2.8.0+cu128",
    "problem": "",
    "libraries": {},
    "gpus": 4,
    "findings": [],
}
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


def make_node(rank, **changes):
    """Return a healthy node."""
    address = f"10.20.0.{rank + 1}"
    interface = {"name": "ib0", "is_up": True, "mtu": 4092, "speed_mbit": 200_000}
    return {
        "rank": rank,
        "host": f"jwb{rank + 1:04}",
        "address": address,
        "interface": "ib0",
        "fast_host": f"jwb{rank + 1:04}i",
        "port": 20000,
        "workers": 4,
        "wants_gpus": True,
        "interfaces": [{**interface, "addresses": [address]}],
        "names": {},
        "routes": {},
        "resolver": "answers",
        "resolver_s": 0.001,
        "limits": {"files": 65536},
        "folders": [{"path": "/home", "free": 10**11, "size": 10**12, "problem": ""}],
        "cpus": "0-47",
        "cores": 96,
        "gpus": [{**GPU} for _ in range(4)],
        "driver": "570.1",
        "versions": {"python": "3.12.3"},
        "torch": {**TORCH, "import_s": 6.2 + rank % 9 / 10},
        "variables": {},
        "findings": [],
        **changes,
    }


def make_link(first, second, **changes):
    """Return a link; one between racks is later."""
    return {
        "first": first,
        "second": second,
        "problem": "",
        "blocked": [],
        "latency_s": 31e-6 + (9e-6 if first // 16 != second // 16 else 0),
        "forward": 23e9,
        "backward": 24e9,
        "lost": 0.0,
        "clock_s": 0.0,
        "lost_mtu": 0,
        "networks": {},
        "looks": 1,
        **changes,
    }


def make_collectives(scope="", speed=80e9):
    """Return all operations, on sizes that are powers of 2."""
    rows = []
    for number, operation in enumerate(OPERATIONS, 1):
        for size in (2**exponent for exponent in range(4, 31, 2)):
            busbw = speed * (1 - number / 10) / (1 + number * 2e6 / size)
            row = {"operation": operation, "scope": scope, "size": size, "wrong": 0}
            row |= {"count": size // 4, "time_s": size / busbw}
            rows.append({**row, "algbw": busbw, "busbw": busbw})
    return rows


def finding(code, text, *ranks, is_suspect=True):
    """Return a finding about some nodes."""
    remedy = "leave the node out, and tell the administrator"
    parts = {"code": code, "text": text, "remedy": remedy}
    return {**parts, "nodes": [*ranks], "is_suspect": is_suspect}


def make_report(count=3, slow=(), missing=(), **changes):
    """Return the report of an examination.

    Args:
        count: How many nodes there are.
        slow: Ranks of nodes that receive slowly, which are suspect for it.
        missing: Ranks of those that have not come.
        changes: Parts of the report that are others.
    """
    nodes = [make_node(rank) for rank in range(count)]
    hosts = [node["host"] for node in nodes]
    came = [rank for rank in range(count) if rank not in missing]
    links = [
        make_link(first, second)
        for first in came
        for second in came
        if first < second and (count <= 32 or (first + second) % count < 31)
    ]
    for link in links:
        link["forward"] *= 0.02 if link["second"] in slow else 1
        link["backward"] *= 0.02 if link["first"] in slow else 1
    collectives = make_collectives() if count > 1 else []
    for rank in came:
        collectives += make_collectives(hosts[rank], 220e9 - rank * 1e8)
    late = [finding("HPC178", f"{hosts[r]} has not come", r) for r in missing]
    bad = [finding("HPC191", f"{hosts[r]}, with all nodes: 3 Gbit/s", r) for r in slow]
    return {
        "schema": "torchrun_hpc.doctor/1",
        "launch_id": "123456.0",
        "site": "jsc",
        "scheduler": "Slurm",
        "started": "2026-11-23T01:02:03+00:00",
        "seconds": 14.23,
        "torchrun_hpc": "0.1.0",
        "backend": "nccl",
        "hosts": hosts,
        "nodes": [nodes[rank] for rank in came],
        "links": links,
        "collectives": collectives,
        "findings": late + bad,
        **changes,
    }


def hostile_report():
    """Return a report in which every name tries to be something else."""
    report = make_report(len(HOSTILE), slow=[1, 2], missing=[5])
    report["hosts"] = [*HOSTILE]
    for node in report["nodes"]:
        name = HOSTILE[node["rank"]]
        node.update(host=name, address=name, interface=name, cpus=name)
        node["gpus"][0]["model"] = node["torch"]["version"] = name
    for name in HOSTILE:
        report["collectives"] += [
            {**row, "operation": name, "scope": name} for row in make_collectives()[:2]
        ]
    report["findings"] += [
        {**finding(name, name, rank), "remedy": name}
        for rank, name in enumerate(HOSTILE)
    ]
    report["links"][0] = make_link(0, 1, problem=HOSTILE[2])
    report["links"][1]["networks"] = dict.fromkeys(HOSTILE, False)
    return report | dict.fromkeys(
        ("site", "launch_id", "started", "torchrun_hpc", "backend"), "".join(HOSTILE)
    )
