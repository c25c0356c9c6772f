"""Reports by hand, as an examination might have them."""

from __future__ import annotations

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


def make_interface(name, *addresses, **changes):
    sound = {"is_up": True, "mtu": 1500, "speed_mbit": 0}
    return {"name": name, "addresses": [*addresses], **sound, **changes}


def make_folder(path="/scratch", **changes):
    return {"path": path, "free": 10**10, "size": 10**11, "problem": "", **changes}


def make_gpu(**changes):
    gpu = {"model": "A100", "ecc_errors": 0, "processes": [], "memory_used": 0}
    return gpu | changes


def make_torch(**changes):
    sound = {"version": "2.13.0", "import_s": 4.0, "problem": "", "gpus": 4}
    libraries = {"cuda": "13.0", "nccl": "2.28.3"}
    return {**sound, "findings": [], "libraries": libraries, **changes}


def make_node(rank=0, **changes):
    """Return what a sound node shows; lists and dictionaries are its own."""
    host, address = HOSTS[rank], f"10.20.0.{rank + 1}"
    sound = {
        "rank": rank,
        "host": host,
        "address": address,
        "interface": "ib0",
        "fast_host": f"{host}i",
        "port": 40000,
        "workers": 4,
        "wants_gpus": True,
        "interfaces": [
            make_interface("eth0", f"10.10.0.{rank + 1}", speed_mbit=10000),
            make_interface("ib0", address, mtu=4092, speed_mbit=200000),
        ],
        "names": {f"{host}i": [address], f"{HOSTS[0]}i": ["10.20.0.1"]},
        "routes": {f"{HOSTS[0]}i": address} if rank else {},
        "resolver": "answers",
        "resolver_s": 0.01,
        "limits": {"files": 131072, "processes": 2061446, "locked memory": -1},
        "folders": [make_folder(SHM), make_folder(), make_folder("/home")],
        "cpus": "0-47",
        "cores": 96,
        "gpus": [make_gpu() for _ in range(4)],
        "driver": "580.95.05",
        "versions": {"python": "3.12.3", "torchrun_hpc": "0.1.0", "kernel": "5.14.0"},
        "torch": make_torch(),
        "variables": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "12"},
        "findings": [],
    }
    return sound | changes


def make_nodes(number, changes=()):
    """Return some nodes; `changes` has what is not as on a sound one, by rank."""
    return [make_node(rank, **dict(changes).get(rank, {})) for rank in range(number)]


def node_with(key, **values):
    """Return one part of a sound node with other values."""
    return {key: make_node()[key] | values}


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
    nodes, hosts = make_nodes(count), HOSTS[:count]
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
