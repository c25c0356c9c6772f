"""Which nodes measure together, and which of them explain what is bad."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.doctor import pairs

NODES = st.lists(st.integers(0, 500), unique=True, max_size=70)


@given(NODES)
def test_no_node_is_twice_in_a_round_and_no_pair_comes_twice(nodes):
    rounds = pairs.rounds(nodes)
    for together in rounds:
        seen = [*itertools.chain(*together)]
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(nodes)
    every = [*itertools.chain(*rounds)]
    assert len(every) == len(set(every))
    assert all(first < second for first, second in every)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 31, 32])
def test_up_to_32_nodes_each_meets_all_others(number):
    rounds = pairs.rounds(range(number))
    every = sorted(itertools.chain(*rounds))
    assert every == [*itertools.combinations(range(number), 2)]
    assert len(rounds) == max(number - 1 + number % 2, 0)


@pytest.mark.parametrize("number", [33, 34, 128, 1001])
def test_of_more_each_meets_30_others_at_least(number):
    rounds = pairs.rounds(range(number))
    assert len(rounds) == 31
    met = [*itertools.chain(*itertools.chain(*rounds))]
    assert {met.count(node) for node in range(number)} <= {30, 31}


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19))))
def test_pairs_are_put_into_rounds_in_which_no_node_is_twice(wanted):
    rounds = pairs.disjoint(wanted)
    assert sorted(itertools.chain(*rounds)) == sorted(wanted)
    for together in rounds:
        seen = [*itertools.chain(*together)]
        assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("bad", "blamed", "left"),
    [
        ([], [], []),
        ([(0, 1)], [], [(0, 1)]),  # nobody knows which one it is
        ([(0, 2), (1, 2)], [2], []),
        ([(0, 1), (2, 3)], [], [(0, 1), (2, 3)]),
        # Two bad nodes of four: the good ones are in two bad pairs, too.
        ([(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], [2, 3], []),
        # One bad node, and a bad cable elsewhere.
        ([(0, 5), (1, 5), (2, 5), (3, 4)], [5], [(3, 4)]),
    ],
)
def test_the_nodes_that_explain_bad_pairs(bad, blamed, left):
    assert pairs.blame(bad) == (blamed, left)


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19))))
def test_every_bad_pair_is_explained_or_left(bad):
    blamed, left = pairs.blame(bad)
    assert all(set(pair) & set(blamed) or pair in left for pair in bad)
    assert not any(set(pair) & set(blamed) for pair in left)
