"""What workers of a launch say about their nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor.reports import HOSTS, make_interface, make_node, make_nodes, make_worker
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.doctor import compute

ETHERNET = (make_interface("eth0", "10.10.0.1"), make_interface("ib0", is_up=False))


def make_workers(number, changes):
    """Return workers, four on each node; `changes` has what is not usual, by rank."""
    return [make_worker(rank, **changes.get(rank, {})) for rank in range(number)]


def findings(workers, nodes=None):
    known = make_nodes(8) if nodes is None else nodes
    return [*compute.findings(workers, {n.rank: n for n in known}, HOSTS)]


def found(workers, nodes=None):
    """Return the findings: code, text, and nodes to blame."""
    return [(f.code, f.text, f.nodes) for f in findings(workers, nodes)]


WORSE = {"digests": ("bad", "bad")}
SLOW = {"flops": (1e14, 1.2e14)}
OTHER = {"device": "H100", "digests": ("0ther", "0ther"), "norm": 1234.6}
FAR = OTHER | {"norm": 1240.0}

# What is wrong with rank 5 of 16, which is on the second node.
ONE = {
    "HPC243 2 elements of its products are not finite": {"wrong": 2, "norm": 0.0},
    "HPC243 its second product differs": {"digests": ("5ca1e", "bad")},
    "HPC243 15 workers on the same kind of device have another product": WORSE,
    "HPC243 the norm of its product is 1240 (median: 1234.5)": FAR,
    "HPC243 120.00 TFLOP/s at best (median: 250.00 TFLOP/s)": SLOW,
    "HPC244 the others wait 0.06 s for it before each operation": {"late_s": 0.06},
}


@pytest.mark.parametrize("said", ONE)
def test_one_worker(said):
    code, _, text = said.partition(" ")
    (finding,) = findings(make_workers(16, {5: ONE[said]}))
    assert finding.code == code
    assert finding.text.startswith(f"rank 5 (jwb0002): {text}")
    assert (finding.nodes, bool(finding.remedy)) == ((1,), True)
    assert finding.is_suspect


NOTHING = {
    "slow once": {"flops": (1e14, 2.5e14)},
    "a little slow": {"flops": (1.9e14, 1.9e14)},
    "no rates": {"flops": ()},
    "another device": OTHER,
    "another type": {"dtype": "float32", "digests": ("f", "f")},
    "a little late": {"late_s": 0.04},
    "unknown transport": {"transport": ""},
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_is_wrong(case):
    assert found(make_workers(16, {5: NOTHING[case]})) == []


@pytest.mark.parametrize("number", [0, 1, 2, 16])
def test_sound_workers(number):
    assert found(make_workers(number, {})) == []


def test_workers_of_a_node_are_one_finding():
    slow = {rank: {"flops": (1e14 + rank, 1e14)} for rank in (4, 5, 6)}
    (finding,) = found(make_workers(16, slow))
    text = "ranks 4-6 (jwb0002): 100.00 TFLOP/s at best (median: 250.00 TFLOP/s)"
    assert finding[1].startswith(text)
    many = found(make_workers(16, {1: WORSE, 6: WORSE}))
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
    (finding,) = found(both)
    assert finding[1].startswith(said)
    assert finding[2] == ()


def test_what_is_usual_is_not_late():
    assert found(make_workers(8, {rank: {"late_s": 4.0} for rank in range(8)})) == []
    two = make_workers(2, {1: {"late_s": 4.0}})
    assert [code for code, _, _ in found(two)] == ["HPC244"]


@pytest.mark.parametrize(
    ("ranks", "interfaces", "expected"),
    [
        ((5,), None, [("rank 5 (jwb0002)", (1,))]),
        (range(8), None, [("ranks 0-7 (jwb0001, jwb0002)", ())]),
        (range(8), ETHERNET, []),
    ],
)
def test_sockets_in_spite_of_a_fast_network(ranks, interfaces, expected):
    workers = make_workers(8, {rank: {"transport": "Socket"} for rank in ranks})
    nodes = make_nodes(2)
    if interfaces:
        nodes = [replace(node, interfaces=interfaces) for node in nodes]
    text = "NCCL uses sockets instead of ib0, which is up"
    assert found(workers, nodes) == [
        ("HPC242", f"{where}: {text}", blamed) for where, blamed in expected
    ]
    assert found(workers[:4], [make_node()]) == []  # it sends nothing


@given(
    number=st.integers(3, 40),
    rank=st.integers(0, 39),
    changes=st.sampled_from([ONE[said] for said in ONE]),
)
def test_a_bad_worker_is_found_in_any_allocation(number, rank, changes):
    rank %= number
    (finding,) = found(make_workers(number, {rank: changes}), make_nodes(10))
    assert finding[2] == (rank // 4,)
