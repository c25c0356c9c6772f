"""Findings about nodes, about their differences, and about workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.doctor_reports import (
    HOSTS,
    SHM,
    as_lines,
    make_folder,
    make_gpu,
    make_interface,
    make_node,
    make_nodes,
    make_torch,
    make_worker,
    node_with,
)
from torchrun_hpc.doctor.checks import findings, of_collectives, of_workers
from torchrun_hpc.doctor.results import Collective

CODES = {f"HPC{number}" for number in (181, 182, 184, 185, 186, 187, 188, 241)}


def faults(number, changes):
    """Return the findings of some nodes, without those that only compare them."""
    found = [*findings(make_nodes(number, changes), HOSTS[:number])]
    assert {finding.code for finding in found} <= CODES
    assert all(finding.text.isprintable() for finding in found)
    assert all(finding.remedy for finding in found)
    return [finding for finding in found if finding.code != "HPC181"]


def folder(path="/scratch", **changes):
    return {"folders": (make_folder(path, **changes),)}


def gpus(*changes):
    return {"gpus": tuple(make_gpu(**each) for each in changes)}


def named(**names):
    return {"names": names}


ETHERNET = make_interface("ib0", "10.20.0.3", is_up=False), make_interface("eth0")
LOCKED = node_with("limits", **{"locked memory": 65536})
FILES = node_with("limits", files=1024)
QUOTA = folder(problem="Disk quota exceeded")
MISSING = folder("/p/home", size=0, problem="No such file or directory")
TAKEN = {"memory_used": 3 * 2**30}
ECC = gpus({}, {"ecc_errors": 2}, {"ecc_errors": -1}, {})
BUSY = gpus({}, {"processes": [77, 5]}, {"processes": [77]}, {"processes": [9]})

# Values of node 2 of 4.
SUSPECT = {
    "a name without an address": named(jwb0001i=[]),
    "another node's name with other addresses": named(jwb0001i=["10.10.0.1", "::2"]),
    "its own name with another node's address": named(
        jwb0003i=["10.20.0.3", "192.0.2.7"]
    ),
    "the name of a node that did not join": named(jwb0009i=[]),
    "a quota": QUOTA,
    "a missing folder": MISSING,
    "a full folder": folder(free=99999999),
    "memory errors of a GPU": ECC,
    "processes of others on GPUs": BUSY,
    "memory that is in use on a GPU": gpus(
        {"memory_used": 2**30}, TAKEN, TAKEN | {"memory": 200 * 2**30}, {}
    ),
}
ADVICE = {
    "a small folder for shared memory": folder(SHM, free=64 * 2**20, size=64 * 2**20),
    "a slow import": node_with("torch", import_s=41.0),
    "few files": FILES,
    "few processes": node_with("limits", processes=1023),
    "little locked memory": LOCKED,
    "hidden GPUs": node_with("torch", gpus=1),
    "another route": {"routes": {"jwb0001i": "10.10.0.3"}},
    "no address": {"address": ""},
    "no route": {"routes": {"jwb0001i": ""}},
    "a slow resolver": {"resolver_s": 1.1},
    "the system's range of ports": {
        "local_ports": (15000, 61000),
        "reserved_ports": "1-19999,29000-65535",
    },
    "reserved ports": {"reserved_ports": "8080,19990-20009,25000"},
}


def test_one_node(golden):
    texts = {}
    for case, changes in (SUSPECT | ADVICE).items():
        (finding,) = faults(4, {2: changes})
        assert finding.nodes == (2,), case
        assert finding.is_suspect is (case in SUSPECT), case
        texts[case] = as_lines(finding)
    golden(texts)


NOTHING = {
    "nothing": {},
    "an own name on loopback": named(jwb0003i=["127.0.1.1", "::1"]),
    "an own name of several addresses": named(jwb0003i=["10.20.0.3", "10.10.0.3"]),
    "one of several addresses": named(jwb0001i=["10.10.0.1", "10.20.0.1"]),
    "the name of a node that did not join": named(jwb0009i=["10.20.0.9"]),
    "little room in a small folder": folder(free=50 * 10**6, size=10**9),
    "a small part of a large folder": folder(free=2 * 10**9, size=10**12),
    "torch was not looked at": {"torch": None},
    "a limit": node_with("limits", files=4096),
    "no limit": node_with("limits", files=-1),
    "locked memory without InfiniBand": LOCKED | {"interfaces": ETHERNET},
    "ports that the system gives to nobody": {
        "local_ports": (15000, 61000),
        "reserved_ports": "20000-28999",
    },
    "unknown ports": {"local_ports": (0, 0)},
    "memory of a process": gpus({"memory_used": 2**30}),
    "names that take a moment": {"resolver_s": 0.9},
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_wrong(case):
    assert faults(4, {2: NOTHING[case]}) == []


@pytest.mark.parametrize("number", [0, 1, 16])
def test_sound_nodes(number):
    assert [*findings(make_nodes(number), HOSTS[:16])] == []


# --- several nodes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_suspect"),
    [
        (QUOTA, (True, True, True)),
        (MISSING, (True, False, False)),
        (FILES, (False, False, False)),
        (ECC, (True, True, True)),
    ],
)
def test_what_most_nodes_have_may_be_the_sites_choice(changes, is_suspect):
    """On one node of four; on three of them; on all."""
    found = [faults(4, dict.fromkeys(range(n), changes)) for n in (1, 3, 4)]
    assert tuple(finding.is_suspect for (finding,) in found) == is_suspect
    assert [finding.nodes for (finding,) in found] == [(0,), (0, 1, 2), ()]
    assert found[2][0].text.startswith("all 4 nodes: ")


def test_a_job_of_one_node():
    (finding,) = faults(1, {0: {"resolver_s": 1.1}})
    assert finding.text == "jwb0001: resolving node names takes more than 1 s"
    assert finding.nodes == (0,)
    assert not finding.is_suspect


def test_what_each_node_has_in_its_own_words_is_one_finding():
    changes = {n: folder(path=f"/scratch/n{n}", problem="No space") for n in range(8)}
    (finding,) = faults(8, changes)
    assert finding.nodes == ()
    assert finding.text.startswith("all 8 nodes: cannot write to /scratch/n0: ")


def test_nodes_of_different_faults():
    found = faults(4, {0: QUOTA, 1: folder(free=0), 3: QUOTA})
    assert [finding.nodes for finding in found] == [(0, 3), (1,)]
    assert found[0].text.startswith("jwb0001, jwb0004: ")


def test_others_may_use_GPUs_that_the_job_does_not_have():  # noqa: N802
    changes = gpus({"processes": (5,)}, TAKEN) | {"torch": make_torch(gpus=1)}
    busy, taken, hidden = faults(2, dict.fromkeys(range(2), changes))
    assert "compute on GPU 0" in busy.text
    assert "in use on GPU 1" in taken.text
    assert not busy.is_suspect
    assert not taken.is_suspect
    assert hidden.text == "all 2 nodes: torch sees 1 of 2 GPUs"


def test_not_too_many_processes():
    (finding,) = faults(2, {1: gpus(*[{"processes": [*range(50)]}] * 4)})
    assert finding.text.endswith("PID 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 38 more")


def test_a_slow_import_needs_nodes_to_compare_with():
    slow = node_with("torch", import_s=100.0)
    assert faults(2, {1: slow}) == []
    assert faults(3, dict.fromkeys(range(3), slow)) == []
    assert len(faults(3, {1: slow})) == 1
    assert len(faults(4, {0: {"torch": None}, 1: slow})) == 1


# --- differences between nodes --------------------------------------------------------


def differences(number, changes):
    """Compare nodes: return what is written about it, and the findings."""
    every = findings(make_nodes(number, changes), HOSTS)
    found = [finding for finding in every if finding.code == "HPC181"]
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

# Values of node 2 of 16.
SUSPECT_TRAITS = {
    "python": versions("3.11.7"),
    "torch": node_with("torch", version="2.12.0"),
    "nccl": node_with("torch", libraries={"nccl": "2.27.1"}),
    "number of GPUs that torch sees": node_with("torch", gpus=0),
    "GPUs": {"gpus": make_node().gpus[:3]},
    "MTU of the job's interface": interface(mtu=1500),
    "speed of the job's interface": interface(speed_mbit=100000),
    "NCCL_ALGO": variables(NCCL_ALGO="Ring"),
}
ADVICE_TRAITS = {
    "kernel": node_with("versions", kernel="6.1.0"),
    "GPU driver": {"driver": "570.1"},
    "number of CPUs in the affinity mask": {"cpus": "0-3,8"},
    "limit of locked memory": LOCKED,
    "NCCL_DEBUG": variables(NCCL_DEBUG="INFO"),
    "OMP_NUM_THREADS": {"variables": {"NCCL_DEBUG": "WARN"}},
    "GiB of /dev/shm": shm(size=9 * 10**10),
}


def test_one_node_that_differs(golden):
    texts = {}
    for trait, changes in (SUSPECT_TRAITS | ADVICE_TRAITS).items():
        (text,), (finding,) = differences(16, {2: changes})
        assert text.startswith(f"{trait}: ")
        # No other node would cure what a profile sets.
        assert finding.nodes == (() if trait.isupper() else (2,)), trait
        assert finding.is_suspect is (trait in SUSPECT_TRAITS), trait
        texts[trait] = as_lines(finding)
    golden(texts)


def test_another_interface():
    """It has a name, an MTU and a speed of its own."""
    texts, found = differences(3, {2: {"interface": "eth0"}})
    assert [text.replace(" of the job's interface", "") for text in texts] == [
        "MTU: 1500 on jwb0003; 4092 on 2 others",
        "speed: 10000 Mbit/s on jwb0003; 200000 Mbit/s on 2 others",
        "name: eth0 on jwb0003; ib0 on 2 others",
    ]
    assert [finding.is_suspect for finding in found] == [True, True, False]


EQUAL = {
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


@pytest.mark.parametrize("case", EQUAL)
def test_nothing_differs(case):
    assert differences(16, {2: EQUAL[case]}) == ([], [])


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


# --- workers --------------------------------------------------------------------------

NO_FABRIC = (make_interface("eth0", "10.10.0.1"), make_interface("ib0", is_up=False))


def make_workers(number, changes):
    """Return workers, four on each node; `changes` has what is not usual, by rank."""
    return [make_worker(rank, **changes.get(rank, {})) for rank in range(number)]


def of(workers, nodes=None):
    known = make_nodes(8) if nodes is None else nodes
    return [*of_workers(workers, {n.rank: n for n in known}, HOSTS)]


def texts(workers, nodes=None):
    """Return the findings: code, text, and nodes to blame."""
    return [(f.code, f.text, f.nodes) for f in of(workers, nodes)]


WORSE = {"digests": ("bad", "bad")}
SLOW_WORKER = {"flops": (1e14, 1.2e14)}
OTHER = {"device": "H100", "digests": ("0ther", "0ther"), "norm": 1234.6}
FAR = OTHER | {"norm": 1240.0}

# Values of rank 5 of 16, which is on the second node.
ONE = {
    "elements that are not finite": {"wrong": 2, "norm": 0.0},
    "two products that differ": {"digests": ("5ca1e", "bad")},
    "another product than the other workers": WORSE,
    "another norm": FAR,
    "slow": SLOW_WORKER,
    "late": {"late_s": 0.06},
}


def test_one_worker(golden):
    texts = {}
    for case, changes in ONE.items():
        (finding,) = of(make_workers(16, {5: changes}))
        assert (finding.nodes, finding.is_suspect) == ((1,), True), case
        assert finding.code == ("HPC244" if case == "late" else "HPC243")
        texts[case] = as_lines(finding)
    golden(texts)


USUAL = {
    "slow once": {"flops": (1e14, 2.5e14)},
    "a little slow": {"flops": (1.9e14, 1.9e14)},
    "no rates": {"flops": ()},
    "another device": OTHER,
    "another type": {"dtype": "float32", "digests": ("f", "f")},
    "a little late": {"late_s": 0.04},
    "unknown transport": {"transport": ""},
}


@pytest.mark.parametrize("case", USUAL)
def test_nothing_is_wrong_with_a_worker(case):
    assert texts(make_workers(16, {5: USUAL[case]})) == []


@pytest.mark.parametrize("number", [0, 1, 2, 16])
def test_sound_workers(number):
    assert texts(make_workers(number, {})) == []


def test_workers_of_a_node_are_one_finding():
    slow = {rank: {"flops": (1e14 + rank, 1e14)} for rank in (4, 5, 6)}
    (finding,) = texts(make_workers(16, slow))
    text = "ranks 4-6 (jwb0002): 100.00 TFLOP/s at best (median: 250.00 TFLOP/s)"
    assert finding[1].startswith(text)
    many = texts(make_workers(16, {1: WORSE, 6: WORSE}))
    assert [nodes for _, _, nodes in many] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({4: WORSE}, "ranks 0,4 (jwb0001, jwb0002): other workers on the same"),
        ({4: FAR}, "ranks 0,4 (jwb0001, jwb0002): the norm of its product is "),
    ],
)
def test_of_two_nobody_knows_whose_is_right(changes, said):
    both = [make_workers(8, changes)[rank] for rank in (0, 4)]
    (finding,) = texts(both)
    assert finding[1].startswith(said)
    assert finding[2] == ()


def test_what_is_usual_is_not_late():
    assert texts(make_workers(8, {rank: {"late_s": 4.0} for rank in range(8)})) == []
    two = make_workers(2, {1: {"late_s": 4.0}})
    assert [code for code, _, _ in texts(two)] == ["HPC244"]


@pytest.mark.parametrize(
    ("ranks", "interfaces", "expected"),
    [
        ((5,), None, [("rank 5 (jwb0002)", (1,))]),
        (range(8), None, [("ranks 0-7 (jwb0001, jwb0002)", ())]),
        (range(8), NO_FABRIC, []),
    ],
)
def test_sockets_in_spite_of_a_fast_network(ranks, interfaces, expected):
    workers = make_workers(8, {rank: {"transport": "Socket"} for rank in ranks})
    nodes = make_nodes(2)
    if interfaces:
        nodes = [replace(node, interfaces=interfaces) for node in nodes]
    text = "NCCL uses sockets instead of ib0, which is up"
    assert texts(workers, nodes) == [
        ("HPC242", f"{where}: {text}", blamed) for where, blamed in expected
    ]
    assert texts(workers[:4], [make_node()]) == []  # it sends nothing


@given(
    number=st.integers(3, 40),
    rank=st.integers(0, 39),
    changes=st.sampled_from([*ONE.values()]),
)
def test_a_bad_worker_is_found_in_any_allocation(number, rank, changes):
    rank %= number
    (finding,) = texts(make_workers(number, {rank: changes}), make_nodes(10))
    assert finding[2] == (rank // 4,)


# --- collectives ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "causes", "expected"),
    [
        (0, [], {}),
        (-1, [], {}),  # the backend has no such operation
        (3, [], {"broadcast of 8 KiB: 3 wrong elements of 2048": ()}),
        (0, [("n1: killed", (1,)), ("no end", ())], {"n1: killed": (1,), "no end": ()}),
    ],
)
def test_collectives(wrong, causes, expected):
    row = Collective("broadcast", "", 8192, 2048, 1e-3, 8e6, 8e6, wrong)
    found = [*of_collectives([row], causes)]
    texts = {f.text.removeprefix("torch's collectives: "): f.nodes for f in found}
    assert texts == expected
    assert {(f.code, f.is_suspect) for f in found} <= {("HPC193", True)}
