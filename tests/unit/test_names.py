"""How nodes and ranks are named: a person can read it, however many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc import names
from torchrun_hpc.names import fold, numbers_in, ranges
from torchrun_hpc.schedulers.hostlist import expand_hostlist

# --- numbers --------------------------------------------------------------------------

TWELVE = [*range(0, 24, 2)]
SHOWN = "0,2,4,6,8,10,12,14,16,18,20,22"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0-1"),
        ([5, 0, 2, 1, 3], "0-3,5"),  # in any order
        ([7, 9], "7,9"),
        (range(1, 4096), "1-4095"),
        (TWELVE, SHOWN),
        ([*TWELVE, 24], f"{SHOWN} and 1 more"),
        ([*TWELVE, *range(30, 40)], f"{SHOWN} and 10 more"),
    ],
)
def test_ranks_of_workers(ranks, expected):
    assert ranges(ranks) == expected


@given(st.sets(st.integers(0, 1000)))
def test_numbers_are_read_as_they_are_written(numbers):
    assert numbers_in(ranges(numbers, most=len(numbers)) + "\n") == numbers


@pytest.mark.parametrize("text", ["a", "-", "0x3", "1 2", "0-3-5"])
def test_a_text_in_another_form_has_no_numbers(text):
    assert numbers_in(text) == frozenset()


def test_a_huge_range_takes_no_memory():
    assert numbers_in("0-999999999999") == {*range(2**16)}


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_ranks_can_be_read_again(ranks, random):
    shuffled = sorted(ranks)
    random.shuffle(shuffled)
    shown, _, rest = ranges(shuffled).partition(" and ")
    more = int(rest.removesuffix(" more") or 0)
    found = sorted(numbers_in(shown))
    assert found == sorted(ranks)[: len(found)]
    assert len(found) + more == len(ranks)
    assert shown.count(",") < 12
    assert not more or shown.count(",") == 11  # else there is room for all


# --- hosts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "written"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n2 n1", "n2, n1"),
        ("n1 n2 n3", "n[1-3]"),
        ("n3 n1 n2", "n[1-3]"),
        ("jwb0001 jwb0002 jwb0007", "jwb[0001-0002,0007]"),
        ("n8 n9 n10 n11", "n[8-11]"),
        ("n08 n09 n10 n11", "n[08-11]"),
        ("n8 n09 n10", "n[8,09-10]"),
        ("b1 a1 b2 a2", "b[1-2], a[1-2]"),
        ("n1 login n2", "n[1-2], login"),
        ("n n1 n2", "n, n[1-2]"),
        ("n1i.juwels n2i.juwels n3i.juwels", "n[1-3]i.juwels"),
        ("n1.c1 n2.c1 n1.c2", "n[1-2].c1, n1.c2"),
        (
            "x1000c0s0b0n0 x1000c0s0b0n1 x1000c0s0b1n0",
            "x1000c0s0b0n[0-1], x1000c0s0b1n0",
        ),
        ("10.0.0.1 10.0.0.2 10.0.0.3", "10.0.0.1, 10.0.0.2, 10.0.0.3"),
    ],
)
def test_hosts(hosts, written):
    assert fold(hosts.split()) == written


@pytest.mark.parametrize(
    ("hosts", "written"),
    [
        ([f"n{i}" for i in range(1500)], "n[0-1499]"),
        ([f"n{i}" for i in range(0, 24, 2)], f"n[{SHOWN}]"),
        ([f"n{i}" for i in range(0, 30, 2)], f"n[{SHOWN}] and 3 more"),
        (
            [f"{c}{i}" for c in "abcdefg" for i in (1, 2, 4)],
            "a[1-2,4], b[1-2,4], c[1-2,4], d[1-2,4], e[1-2,4], f[1-2,4] and 3 more",
        ),
        ([*"abcdefghijklmn"], "a, b, c, d, e, f, g, h, i, j, k, l and 2 more"),
    ],
)
def test_many_hosts(hosts, written):
    assert fold(hosts) == written


HOSTS = st.from_regex("[a-c]{1,2}-?(0{0,2}[0-9]{1,2})?i?([.]x1)?", fullmatch=True)


@given(st.sets(HOSTS, min_size=1, max_size=12))
def test_folded_hosts_are_those_that_slurm_reads(hosts):
    assert sorted(expand_hostlist(fold(hosts))) == sorted(hosts)


@given(st.lists(HOSTS, unique=True, min_size=3), st.integers(0, 9))
def test_so_many_hosts_are_left_out(hosts, start):
    many = [*hosts, *(f"z{n}" for n in range(start, 40, 2))]
    shown, _, rest = fold(many).partition(" and ")
    found = expand_hostlist(shown)
    assert {*found} < {*many}
    assert len(found) + int(rest.removesuffix(" more")) == len(many)
    assert shown.count(",") <= 11


# --- nodes ----------------------------------------------------------------------------

KNOWN = [f"n{i}" for i in range(1500)]


@pytest.mark.parametrize(
    ("ranks", "written"),
    [
        ([], ""),
        ([1], "n1 (node 1)"),
        ([2, 0], "n2 (node 2), n0 (node 0)"),  # as they come
        (range(10), "n[0-9] (nodes 0-9)"),
        ([0, 3, 2], "n[0,2-3] (nodes 0,2-3)"),
        (range(1500), "n[0-1499] (nodes 0-1499)"),
        ([1500], "node 1500"),  # another one than those of the job
        ([-1], "node -1"),
        ([0, 1, 1500], "n0, n1 (nodes 0-1,1500)"),
    ],
)
def test_nodes_by_name(ranks, written):
    assert names.nodes(ranks, KNOWN) == written


@pytest.mark.parametrize("hosts", [(), ("", "", "")])
def test_nodes_whose_names_are_not_known(hosts):
    assert names.nodes([0, 2], hosts) == "node 0, node 2"
    assert names.nodes([0, 1, 2], hosts) == "nodes 0-2"


def test_a_node_by_name():
    assert [names.host(rank, ["n0", ""]) for rank in (0, 1)] == ["n0", "node 1"]
    assert names.fold_ranks([1, 0], ["n0", ""]) == "node 1, n0"
    assert names.fold_ranks(range(4), ["n0", "n1", "n2", ""]) == "n[0-2], node 3"


def test_texts():
    assert names.listed([*"ab"]) == "a, b"
    assert names.listed([*map(str, range(14))]).endswith("10, 11 and 2 more")


# --- known and guessed names ---------------------------------------------------------


@given(st.permutations("abcdef"), st.sets(st.integers(0, 5)))
def test_known_names_are_right_and_no_other_is_lost(hosts, ranks):
    known = {rank: hosts[rank] for rank in ranks}
    names_by_rank = names.placed("abcdef", known)
    assert {rank: names_by_rank[rank] for rank in ranks} == known
    assert sorted(names_by_rank) == [*"abcdef"]


def test_a_name_that_is_unknown():
    assert names.placed(("", "", ""), {1: "n2", 2: ""}) == ("", "n2", "")
    assert names.placed(("", "n2", ""), {1: ""}) == ("", "n2", "")
    assert names.placed(("n1", "n2"), {0: "n2", 1: "n2"}) == ("n2", "n2")
    assert names.placed((), {0: ""}) == ()
