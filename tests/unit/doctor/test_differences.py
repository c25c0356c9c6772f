"""What differs between nodes: who is to blame, and how it is written."""

from __future__ import annotations

import re

import pytest
from records import (
    HOSTS,
    SHM,
    make_folder,
    make_interface,
    make_record,
    make_torch,
    records,
)

from torchrun_hpc.doctor.differences import findings


def differences(number, changes):
    """Compare nodes: return what is written about it, and the findings."""
    found = [*findings(records(number, changes), HOSTS)]
    assert {finding["code"] for finding in found} <= {"HPC181"}
    assert all(finding["remedy"] for finding in found)
    return [finding["text"] for finding in found], found


def usual(key):
    """Return a dictionary of a sound node."""
    return make_record()[key]


def torch(**changes):
    return {"torch": make_torch(**changes)}


def libraries(**known):
    return torch(libraries=known)


def versions(**known):
    return {"versions": usual("versions") | known}


def limits(**known):
    return {"limits": usual("limits") | known}


def variables(**known):
    return {"variables": usual("variables") | known}


def interface(**changes):
    own = make_interface("ib0", "10.20.0.9", **{"mtu": 4092, "speed": 200000} | changes)
    return {"interfaces": [own]}


def shm(size):
    return {"folders": [make_folder(SHM, size=size)]}


# --- what is compared -----------------------------------------------------------------

SPEED = "speed of the job's interface"

# What is not as usual on node 2 of 16; what is written of it; whether it is suspect.
ONE = {
    "python": (
        versions(python="3.11.7"),
        "python: 3.11.7 on jwb0003; 3.12.3 on 15 others",
        True,
    ),
    "kernel": (
        versions(kernel="6.1.0"),
        "kernel: 6.1.0 on jwb0003; 5.14.0 on 15 others",
        False,
    ),
    "a plugin that the others have not": (
        versions(libfabric="libfabric.so.1.25.0"),
        "libfabric: libfabric.so.1.25.0 on jwb0003; none on 15 others",
        True,
    ),
    "torch": (
        torch(version="2.12.0"),
        "torch: 2.12.0 on jwb0003; 2.13.0 on 15 others",
        True,
    ),
    "nccl": (
        libraries(cuda="13.0", nccl="2.27.1"),
        "nccl: 2.27.1 on jwb0003; 2.28.3 on 15 others",
        True,
    ),
    "gpus of torch": (
        torch(gpus=0),
        "number of GPUs that torch sees: 0 on jwb0003; 4 on 15 others",
        True,
    ),
    "gpus": (
        {"gpus": usual("gpus")[:3]},
        "GPUs: 3 x A100 on jwb0003; 4 x A100 on 15 others",
        True,
    ),
    "driver": (
        {"driver": "570.1"},
        "driver of the GPUs: 570.1 on jwb0003; 580.95.05 on 15 others",
        False,
    ),
    "mtu": (
        interface(mtu=1500),
        "MTU of the job's interface: 1500 on jwb0003; 4092 on 15 others",
        True,
    ),
    "speed": (
        interface(speed=100000),
        f"{SPEED}: 100000 Mbit/s on jwb0003; 200000 Mbit/s on 15 others",
        True,
    ),
    "mask": (
        {"cpus": "0-3,8"},
        "number of CPUs in the affinity mask: 5 on jwb0003; 48 on 15 others",
        False,
    ),
    "locked memory": (
        {"limits": usual("limits") | {"locked memory": 65536}},
        "limit of locked memory: 65536 on jwb0003; none on 15 others",
        False,
    ),
    "a variable of NCCL": (
        variables(NCCL_ALGO="Ring"),
        "NCCL_ALGO: Ring on jwb0003; not set on 15 others",
        True,
    ),
    "how much NCCL writes": (
        variables(NCCL_DEBUG="INFO"),
        "NCCL_DEBUG: INFO on jwb0003; WARN on 15 others",
        False,
    ),
    "threads": (
        {"variables": {"NCCL_DEBUG": "WARN"}},
        "OMP_NUM_THREADS: not set on jwb0003; 12 on 15 others",
        False,
    ),
    "a module that is missing": (
        shm(size=9 * 10**10),
        "GiB of /dev/shm: 83.82 on jwb0003; 93.13 on 15 others",
        False,
    ),
}


@pytest.mark.parametrize("case", ONE)
def test_one_that_differs(case):
    changes, text, is_suspect = ONE[case]
    texts, (finding,) = differences(16, {2: changes})
    assert texts == [text]
    # No other node would cure what a profile sets.
    is_variable = re.match("[A-Z_]+: ", text)
    assert finding["nodes"] == ([] if is_variable else [2])
    assert finding["is_suspect"] is is_suspect


def test_another_interface():
    """It has a name, an MTU and a speed of its own."""
    texts, found = differences(16, {2: {"interface": "eth0"}})
    assert texts == [
        "MTU of the job's interface: 1500 on jwb0003; 4092 on 15 others",
        f"{SPEED}: 10000 Mbit/s on jwb0003; 200000 Mbit/s on 15 others",
        "name of the job's interface: eth0 on jwb0003; ib0 on 15 others",
    ]
    assert [finding["is_suspect"] for finding in found] == [True, True, False]


NOTHING = {
    "nothing": {},
    "torch was not looked at": {"torch": None},
    "no address": {"interface": ""},
    "a system that does not know the speed": interface(speed=0),
    "a limit that follows from the memory": limits(processes=2061440),
    "memory": shm(size=97 * 10**9),
    "other CPUs, as many": {"cpus": "48-95"},
    "the GPUs of the node": variables(CUDA_VISIBLE_DEVICES="3"),
    "its name": variables(NCCL_HOSTID="jwb0003"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_differs(case):
    assert differences(16, {2: NOTHING[case]}) == ([], [])


@pytest.mark.parametrize("number", [0, 1])
def test_there_is_nothing_to_compare(number):
    assert differences(number, {0: versions(python="3.11.7")}) == ([], [])


# --- who is to blame ------------------------------------------------------------------


def test_nobody_is_to_blame_on_a_tie():
    texts, (finding,) = differences(2, {1: versions(python="3.11.7")})
    assert texts == ["python: 3.12.3 on jwb0001; 3.11.7 on jwb0002"]
    assert finding["nodes"] == []
    assert finding["is_suspect"]


def test_three_values():
    old, new = versions(python="3.11.7"), versions(python="3.13.0")
    texts, (finding,) = differences(16, {3: old, 5: new, 9: old})
    assert texts == [
        "python: 3.13.0 on jwb0006; 3.11.7 on jwb0004, jwb0010; 3.12.3 on 13 others"
    ]
    assert finding["nodes"] == [3, 5, 9]


def test_long_values_are_cut_to_where_they_differ():
    path = "/opt/software/stages/2026/lib:" * 10
    usual, other = path + "a" * 500, path + "b" * 500
    changes = dict.fromkeys(range(3), variables(LD_LIBRARY_PATH=usual))
    changes[1] = variables(LD_LIBRARY_PATH=other)
    texts, (finding,) = differences(3, changes)
    assert texts == [
        f"LD_LIBRARY_PATH: ...{'b' * 60} on jwb0002; ...{'a' * 60} on 2 others"
    ]
    assert not finding["is_suspect"]


def test_another_interface_than_the_jobs():
    """Which is the usual one, whether it is set or not."""
    changes = {1: variables(GLOO_SOCKET_IFNAME="eth0")}
    changes[2] = variables(GLOO_SOCKET_IFNAME="ib0")
    texts, (finding,) = differences(3, changes)
    assert texts == ["GLOO_SOCKET_IFNAME: eth0 on jwb0002; not set on 2 others"]
    assert (finding["is_suspect"], finding["nodes"]) == (True, [])
    assert differences(3, dict.fromkeys(range(3), changes[1]))[0] == []
