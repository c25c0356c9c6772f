"""What differs between nodes: who is to blame, and how it is written."""

from __future__ import annotations

import pytest
from doctor.reports import (
    HOSTS,
    SHM,
    make_folder,
    make_interface,
    make_node,
    make_nodes,
    node_with,
)

from torchrun_hpc.doctor.differences import findings


def differences(number, changes):
    """Compare nodes: return what is written about it, and the findings."""
    found = [*findings(make_nodes(number, changes), HOSTS)]
    assert {finding.code for finding in found} <= {"HPC181"}
    assert all(finding.remedy for finding in found)
    return [finding.text for finding in found], found


def interface(**changes):
    usual = {"mtu": 4092, "speed_mbit": 200000}
    return {"interfaces": (make_interface("ib0", "10.20.0.9", **usual | changes),)}


def shm(size):
    return {"folders": (make_folder(SHM, size=size),)}


def versions(python):
    return node_with("versions", python=python)


def variables(**values):
    return node_with("variables", **values)


# --- what is compared -----------------------------------------------------------------

# What is not as usual on node 2 of 16; how it is there, and how it is usually.
SUSPECT = {
    "python": (versions("3.11.7"), "3.11.7", "3.12.3"),
    "torch": (node_with("torch", version="2.12.0"), "2.12.0", "2.13.0"),
    "nccl": (node_with("torch", libraries={"nccl": "2.27.1"}), "2.27.1", "2.28.3"),
    "number of GPUs that torch sees": (node_with("torch", gpus=0), "0", "4"),
    "GPUs": ({"gpus": make_node().gpus[:3]}, "3 x A100", "4 x A100"),
    "MTU of the job's interface": (interface(mtu=1500), "1500", "4092"),
    "speed of the job's interface": (
        interface(speed_mbit=100000),
        "100000 Mbit/s",
        "200000 Mbit/s",
    ),
    "NCCL_ALGO": (variables(NCCL_ALGO="Ring"), "Ring", "not set"),
}
ADVICE = {
    "kernel": (node_with("versions", kernel="6.1.0"), "6.1.0", "5.14.0"),
    "GPU driver": ({"driver": "570.1"}, "570.1", "580.95.05"),
    "number of CPUs in the affinity mask": ({"cpus": "0-3,8"}, "5", "48"),
    "limit of locked memory": (
        node_with("limits", **{"locked memory": 65536}),
        "65536",
        "none",
    ),
    "NCCL_DEBUG": (variables(NCCL_DEBUG="INFO"), "INFO", "WARN"),
    "OMP_NUM_THREADS": ({"variables": {"NCCL_DEBUG": "WARN"}}, "not set", "12"),
    "GiB of /dev/shm": (shm(size=9 * 10**10), "83.82", "93.13"),
}


@pytest.mark.parametrize("trait", SUSPECT | ADVICE)
def test_one_that_differs(trait):
    changes, own, usual = (SUSPECT | ADVICE)[trait]
    texts, (finding,) = differences(16, {2: changes})
    assert texts == [f"{trait}: {own} on jwb0003; {usual} on 15 others"]
    # No other node would cure what a profile sets.
    assert finding.nodes == (() if trait.isupper() else (2,))
    assert finding.is_suspect is (trait in SUSPECT)


def test_another_interface():
    """It has a name, an MTU and a speed of its own."""
    texts, found = differences(3, {2: {"interface": "eth0"}})
    assert [text.replace(" of the job's interface", "") for text in texts] == [
        "MTU: 1500 on jwb0003; 4092 on 2 others",
        "speed: 10000 Mbit/s on jwb0003; 200000 Mbit/s on 2 others",
        "name: eth0 on jwb0003; ib0 on 2 others",
    ]
    assert [finding.is_suspect for finding in found] == [True, True, False]


NOTHING = {
    "nothing": {},
    "torch was not looked at": {"torch": None},
    "no address": {"interface": ""},
    "a system that does not know the speed": interface(speed_mbit=0),
    "a limit that follows from the memory": node_with("limits", processes=2061440),
    "memory": shm(size=97 * 10**9),
    "other CPUs, as many": {"cpus": "48-95"},
    "the GPUs of the node": variables(CUDA_VISIBLE_DEVICES="3"),
    "its name": variables(NCCL_HOSTID="jwb0003"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_differs(case):
    assert differences(16, {2: NOTHING[case]}) == ([], [])


def test_there_is_nothing_to_compare():
    assert differences(0, {}) == differences(1, {}) == ([], [])


# --- who is to blame ------------------------------------------------------------------


def test_nobody_is_to_blame_on_a_tie():
    texts, (finding,) = differences(2, {1: versions("3.11.7")})
    assert texts == ["python: 3.12.3 on jwb0001; 3.11.7 on jwb0002"]
    assert finding.nodes == ()
    assert finding.is_suspect


def test_three_values():
    old, new = versions("3.11.7"), versions("3.13.0")
    texts, (finding,) = differences(16, {3: old, 5: new, 9: old})
    assert texts == [
        "python: 3.13.0 on jwb0006; 3.11.7 on jwb0004, jwb0010; 3.12.3 on 13 others"
    ]
    assert finding.nodes == (3, 5, 9)


def test_long_values_are_cut_to_where_they_differ():
    path = "/opt/software/stages/2026/lib:" * 10
    usual, other = path + "a" * 500, path + "b" * 500
    changes = dict.fromkeys(range(3), variables(LD_LIBRARY_PATH=usual))
    changes[1] = variables(LD_LIBRARY_PATH=other)
    texts, (finding,) = differences(3, changes)
    assert texts == [
        f"LD_LIBRARY_PATH: ...{'b' * 60} on jwb0002; ...{'a' * 60} on 2 others"
    ]
    assert not finding.is_suspect


def test_another_interface_than_the_jobs():
    """Which is the usual one, whether it is set or not."""
    changes = {1: variables(GLOO_SOCKET_IFNAME="eth0")}
    changes[2] = variables(GLOO_SOCKET_IFNAME="ib0")
    texts, (finding,) = differences(3, changes)
    assert texts == ["GLOO_SOCKET_IFNAME: eth0 on jwb0002; not set on 2 others"]
    assert (finding.is_suspect, finding.nodes) == (True, ())
    assert differences(3, dict.fromkeys(range(3), changes[1]))[0] == []
