"""How nodes and ranks are named: a person can read it, however many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


def every_other(number):
    return [2 * i for i in range(number)]


def written(ranks):
    return ",".join(map(str, ranks))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0-1"),
        ([5, 0, 2, 1, 3], "0-3,5"),  # in any order
        ([7, 9], "7,9"),
        (range(1, 4096), "1-4095"),
        (every_other(12), written(every_other(12))),
        (every_other(13), f"{written(every_other(12))} and 1 more"),
        ([*every_other(12), *range(30, 40)], f"{written(every_other(12))} and 10 more"),
    ],
)
def test_ranks_of_workers(ranks, expected):
    assert names.ranges(ranks) == expected


def expanded(text):
    runs = (run.split("-") for run in text.split(",") if run)
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_ranks_can_be_read_again(ranks, random):
    shuffled = sorted(ranks)
    random.shuffle(shuffled)
    shown, _, rest = names.ranges(shuffled).partition(" and ")
    more = int(rest.removesuffix(" more") or 0)
    found = expanded(shown)
    assert found == sorted(ranks)[: len(found)]
    assert len(found) + more == len(ranks)
    assert shown.count(",") < 12
    assert not more or shown.count(",") == 11  # else there is room for all
