"""What the nodes of a job show of themselves, all of them sound, and what is not."""

from __future__ import annotations

SHM = "/dev/shm"  # noqa: S108 - nothing is written
HOSTS = tuple(f"jwb{number:04}" for number in range(1, 17))


def make_interface(name, *addresses, is_up=True, mtu=1500, speed=0):
    return {
        "name": name,
        "addresses": [*addresses],
        "is_up": is_up,
        "mtu": mtu,
        "speed_mbit": speed,
    }


def make_folder(path="/scratch", free=10**10, size=10**11, problem=""):
    return {"path": path, "free": free, "size": size, "problem": problem}


def make_gpu(**changes):
    gpu = {"model": "A100", "ecc_errors": 0, "processes": [], "memory_used": 0}
    return gpu | changes


def make_torch(**changes):
    libraries = {"cuda": "13.0", "nccl": "2.28.3"}
    torch = {
        "version": "2.13.0",
        "import_s": 4.0,
        "problem": "",
        "gpus": 4,
        "findings": [],
    }
    return torch | {"libraries": libraries} | changes


def make_record(rank=0, **changes):
    """Return what a sound node shows; lists and dictionaries are its own."""
    address = f"10.20.0.{rank + 1}"
    record = {
        "rank": rank,
        "host": HOSTS[rank],
        "address": address,
        "interface": "ib0",
        "fast_host": f"{HOSTS[rank]}i",
        "port": 40000,
        "workers": 4,
        "wants_gpus": True,
        "interfaces": [
            make_interface("eth0", f"10.10.0.{rank + 1}", speed=10000),
            make_interface("ib0", address, mtu=4092, speed=200000),
        ],
        "names": {f"{HOSTS[rank]}i": [address], f"{HOSTS[0]}i": ["10.20.0.1"]},
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
    return record | changes


def records(number, changes=None):
    """Return the records of some nodes.

    Args:
        number: How many.
        changes: Rank to what is not as on a sound node.
    """
    return [
        make_record(rank, **(changes or {}).get(rank, {})) for rank in range(number)
    ]
