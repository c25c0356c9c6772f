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
    assert len(rounds) == (number - 1 + number % 2 if number > 1 else 0)


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


def every(*nodes):
    return [*itertools.combinations(nodes, 2)]


def of(*bad, nodes=8):
    """Return the pairs that have one of these."""
    return [pair for pair in every(*range(nodes)) if set(pair) & set(bad)]


@pytest.mark.parametrize(
    ("nodes", "bad", "blamed"),
    [
        (3, [], []),
        (2, [(0, 1)], []),  # nobody knows which one it is
        (3, [(0, 1)], []),
        (3, [(0, 2), (1, 2)], [2]),
        (8, of(5), [5]),
        (8, [(0, 1), (2, 3)], []),
        # Two bad nodes of four: the good ones are in two bad pairs, too.
        (4, of(2, 3, nodes=4), [2, 3]),
        # One bad node, and a bad cable elsewhere.
        (8, [*of(5), (3, 4)], [5]),
        # Bad with two of seven only: noise.
        (8, [(0, 5), (1, 5)], []),
        # What all have is no fault of some.
        (3, every(0, 1, 2), []),
        (4, every(0, 1, 2, 3), []),
        (8, every(*range(8)), []),
        # Two halves that do not see each other, or whose clocks differ.
        (4, [*itertools.product((0, 1), (2, 3))], []),
        (8, [*itertools.product(range(4), range(4, 8))], []),
    ],
)
def test_the_nodes_that_explain_bad_pairs(nodes, bad, blamed):
    assert pairs.blame(bad, every(*range(nodes))) == blamed


@given(st.integers(2, 9), st.data())
def test_who_is_blamed_is_bad_with_most_partners(nodes, data):
    tried = every(*range(nodes))
    bad = data.draw(st.sets(st.sampled_from(tried)))
    for node in pairs.blame(bad, tried):
        own = [pair for pair in bad if node in pair]
        assert len(own) >= max(2, (nodes - 1) * 2 / 3)
