"""How nodes and ranks are named: a person can read it, however many there are."""

from __future__ import annotations

import pytest
from plans import make_launch_plan

from torchrun_hpc.reporting import names


def plan(*hosts):
    return make_launch_plan(nodes=len(hosts) or 3, hosts=hosts)


def listed(number):
    return ", ".join(f"n{i} (node {i})" for i in range(number))


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        ([], ""),
        ([1], "n1 (node 1)"),
        ([2, 0], "n2 (node 2), n0 (node 0)"),  # as they come
        (range(10), listed(10)),
        (range(11), f"{listed(10)} and 1 more"),
        (range(1500), f"{listed(10)} and 1490 more"),
        ([1500], "node 1500"),  # another one than those of the job
        ([-1], "node -1"),
    ],
)
def test_nodes_by_name(ranks, written):
    assert names.nodes(ranks, plan(*(f"n{i}" for i in range(1500)))) == written


@pytest.mark.parametrize("hosts", [(), ("", "", "")])
def test_nodes_whose_names_are_not_known(hosts):
    assert names.nodes([0, 2], plan(*hosts)) == "node 0, node 2"


def test_a_node_by_name():
    assert [names.host(rank, ["n0", ""]) for rank in (0, 1)] == ["n0", "node 1"]
    assert names.listed_hosts([1, 0], ["n0", ""]) == "node 1, n0"
