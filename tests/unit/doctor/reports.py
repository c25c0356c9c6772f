"""Reports by hand, as an examination might have them."""

from __future__ import annotations

import copy

GPU = {
    "model": "NVIDIA A100-SXM4-40GB",
    "ecc_errors": 0,
    "processes": [],
    "memory_used": 0,
}
TORCH = {
    "version": "2.8.0+cu128",
    "import_s": 6.2,
    "problem": "",
    "libraries": {"cuda": "12.8", "nccl": "2.27.5"},
    "gpus": 4,
}
# Of all numbers of ranks n: what busbw is of algbw, by nccl-tests.
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
}
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


def noise(*numbers):
    """Return a number between 0 and 1: the same for the same numbers."""
    mixed = 17
    for number in numbers:
        mixed = (mixed * 7919 + number * 104729 + 12345) % 1000003
    return mixed / 1000003


def make_node(rank, **changes):
    """Return a healthy node."""
    host = f"jwb{rank + 1:04}"
    return {
        "rank": rank,
        "host": host,
        "address": f"10.20.{rank // 250}.{rank % 250 + 1}",
        "interface": "ib0",
        "fast_host": f"{host}i",
        "port": 20000,
        "workers": 4,
        "interfaces": [
            make_interface("eth0", f"10.10.0.{rank % 250 + 1}", 1500, 10_000),
            make_interface("ib0", f"10.20.0.{rank % 250 + 1}", 4092, 200_000),
        ],
        "names": {},
        "resolver": "answers",
        "resolver_s": 0.001,
        "limits": {"files": 65536, "processes": -1, "locked memory": -1},
        "folders": [{"path": "/tmp", "free": 10**11, "size": 10**12, "problem": ""}],  # noqa: S108
        "cpus": "0-47",
        "cores": 96,
        "gpus": [copy.deepcopy(GPU) for _ in range(4)],
        "driver": "570.1",
        "versions": {"python": "3.12.3"},
        "torch": {**TORCH, "import_s": 6.2 + round(noise(rank), 1)},
        "variables": {},
        "findings": [],
        **changes,
    }


def make_interface(name, address, mtu, speed):
    return {
        "name": name,
        "addresses": [address],
        "is_up": True,
        "mtu": mtu,
        "speed_mbit": speed,
    }


def make_link(first, second, *, speed=1.0, **changes):
    """Return a link of a pair.

    Args:
        first: Rank of one node.
        second: Rank of the other one.
        speed: Which share of the usual bandwidth the second node can receive.
        changes: Attributes that are others.
    """
    usual = 23e9 * (1 + 0.05 * noise(first, second))
    rack = 0 if first // 16 == second // 16 else 1  # another switch between them
    return {
        "first": first,
        "second": second,
        "problem": "",
        "blocked": [],
        "latency_s": 31e-6 + rack * 9e-6 + 2e-6 * noise(second, first),
        "forward": usual * speed,
        "backward": usual * (1 + 0.02 * noise(first, second, 3)),
        "lost": 0.0,
        "clock_s": 0.0,
        "lost_mtu": 0,
        "networks": {},
        "looks": 1,
        **changes,
    }


def broken_link(first, second, problem="no connection in 5 s"):
    """Return a link of a pair that has no figures."""
    figures = {"latency_s": 0.0, "forward": 0.0, "backward": 0.0, "looks": 2}
    return make_link(first, second, problem=problem, blocked=[first], **figures)


def make_collectives(workers, *, scope="", speed=1.0, exponents=range(4, 31, 2)):
    """Return all operations, on sizes that are powers of 2."""
    rows = []
    for place, (operation, factor) in enumerate(FACTORS.items()):
        for exponent in exponents:
            size = 2**exponent
            best = (220e9 if scope else 80e9) * speed * (1 - place / 10)
            busbw = best / (1 + (1 + place) * 2e6 / size)
            algbw = busbw / max(factor(workers), 0.5)
            rows.append(
                {
                    "operation": operation,
                    "scope": scope,
                    "size": size,
                    "count": size // 4,
                    "time_s": size / algbw,
                    "algbw": algbw,
                    "busbw": busbw,
                    "wrong": 0,
                }
            )
    return rows


def slow_node(rank, host, partners):
    """Return a finding about a slow node."""
    return {
        "code": "HPC191",
        "text": f"{host}, with {partners} of {partners} nodes: 3.70 Gbit/s, and "
        "187.42 Gbit/s is usual here",
        "remedy": "leave the node out, and tell the administrator",
        "nodes": [rank],
        "is_suspect": True,
    }


def advice(*ranks):
    """Return a finding that is not urgent."""
    return {
        "code": "HPC184",
        "text": "the limit of open files is 1024, and NCCL needs about 4 for each pair "
        "of workers: a job of many nodes ends with 'Too many open files'",
        "remedy": "ulimit -n 65536 in the job's script, before srun",
        "nodes": [*ranks],
        "is_suspect": False,
    }


def make_report(count=3, slow=(), missing=(), **changes):
    """Return the report of an examination.

    Args:
        count: How many nodes there are.
        slow: Ranks of nodes that receive slowly, which are suspect for it.
        missing: Ranks of those that have not come.
        changes: Parts of the report that are others.
    """
    hosts = [make_node(rank)["host"] for rank in range(count)]
    came = [rank for rank in range(count) if rank not in missing]
    links = [
        make_link(first, second, **_speeds(first, second, slow))
        for first in came
        for second in came
        if first < second and (count <= 32 or (first + second) % count < 31)
    ]
    collectives = make_collectives(4 * count) if count > 1 else []
    exponents = range(4, 31, 2) if count <= 32 else [20, 30]
    for rank in came:
        where = {"scope": hosts[rank], "speed": 1 - rank / 1000}
        collectives += make_collectives(4, exponents=exponents, **where)
    findings = [slow_node(rank, hosts[rank], min(count - 1, 31)) for rank in slow]
    findings += [
        {
            "code": "HPC180",
            "text": f"{hosts[rank]} did not answer within 60 s",
            "remedy": "look whether the node is up: scontrol show node",
            "nodes": [rank],
            "is_suspect": True,
        }
        for rank in missing
    ]
    return {
        "schema": "torchrun_hpc.doctor/1",
        "launch_id": "123456.0",
        "site": "jsc",
        "started": "2026-11-23T01:02:03+00:00",
        "seconds": 14.23,
        "torchrun_hpc": "0.1.0",
        "backend": "nccl",
        "hosts": hosts,
        "nodes": [make_node(rank) for rank in came],
        "links": links,
        "collectives": collectives,
        "findings": findings,
        **changes,
    }


def _speeds(first, second, slow):
    """Return how a pair differs from others if one of its nodes receives slowly."""
    receives = {"speed": 0.02} if second in slow else {}
    return receives | ({"backward": 0.02 * 23e9} if first in slow else {})


def hostile_report():
    """Return a report in which every name tries to be something else."""
    report = make_report(len(HOSTILE), slow=[1, 2], missing=[5])
    report["hosts"] = list(HOSTILE)
    for node in report["nodes"]:
        name = HOSTILE[node["rank"]]
        node.update(host=name, address=name, interface=name, cpus=name)
        node["gpus"] = [{**GPU, "model": name}]
        node["torch"]["version"] = name
    for row in report["collectives"]:
        row["scope"] = HOSTILE[0] if row["scope"] else ""
    report["collectives"] += [
        {**row, "operation": name}
        for name in HOSTILE
        for row in make_collectives(4)[:3]
    ]
    report["findings"] += [
        {**advice(rank), "code": name, "text": name, "remedy": name}
        for rank, name in enumerate(HOSTILE)
    ]
    report["links"][0] = broken_link(0, 1, HOSTILE[2])
    for key in ("site", "launch_id", "started", "torchrun_hpc", "backend"):
        report[key] = "".join(HOSTILE)
    return report
