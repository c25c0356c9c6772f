"""The pairs to measure, and findings about links."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.doctor_reports import make_link
from torchrun_hpc.doctor import judgement

HOSTS = [f"n{rank}" for rank in range(40)]
GOOD = {"latency_s": 3e-5, "forward": 1.2e8, "backward": 1.19e8, "clock_s": 1e-5}


def link(first, second, **changes):
    return make_link(first, second, **GOOD | changes)


def cluster(nodes, bad):
    """Return the links of all pairs; ``bad`` is a function of the two ranks."""
    every = itertools.combinations(range(nodes), 2)
    return [link(*pair, **bad(*pair)) for pair in every]


def of_node(*ranks, **changes):
    return lambda a, b: changes if {a, b} & set(ranks) else {}


def of_pair(*ranks, **changes):
    return lambda a, b: changes if {a, b} == set(ranks) else {}


def found(links):
    findings = [*judgement.findings(links, HOSTS)]
    return [(f.code, [*f.nodes]) for f in findings if f.is_suspect]


HALF = {"forward": 6e7, "backward": 6e7}
LATE = {"latency_s": 5e-3}
LOSSY = {"lost": 0.01}
LARGE = {"lost_mtu": 9000, "forward": 0.0, "backward": 0.0, "latency_s": 3e-5}
NONE = {"problem": "no answer", "forward": 0.0, "backward": 0.0, "latency_s": 0.0}


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 4, 32])
def test_nothing_is_suspect_where_nothing_is_wrong(nodes):
    assert [*judgement.findings(cluster(nodes, lambda *_: {}), HOSTS)] == []


@pytest.mark.parametrize("nodes", [3, 4, 5, 32])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (HALF, "HPC191"),
        ({"forward": 6e7}, "HPC191"),
        (LATE, "HPC191"),
        (LOSSY, "HPC191"),
        (LARGE, "HPC189"),
        (NONE | {"blocked": [0]}, "HPC190"),
    ],
)
def test_a_bad_node_is_named(nodes, changes, code):
    for rank in (0, nodes - 1):
        assert found(cluster(nodes, of_node(rank, **changes))) == [(code, [rank])]


@pytest.mark.parametrize(
    ("changes", "is_suspect"),
    [(HALF, False), (LATE, False), (LOSSY, False), (LARGE, True), (NONE, True)],
)
def test_a_bad_link_is_named_and_no_node(changes, is_suspect):
    """One that is slow is advice: of many nodes, no job waits for one link alone."""
    (finding,) = judgement.findings(cluster(4, of_pair(1, 2, **changes)), HOSTS)
    assert (finding.nodes, finding.is_suspect) == ((), is_suspect)
    assert finding.text.startswith("between n1 and n2: ")


@pytest.mark.parametrize("nodes", [3, 4, 8, 32])
@pytest.mark.parametrize(
    ("changes", "code"),
    [(LARGE, "HPC189"), (NONE, "HPC190"), ({"clock_s": 9.0}, "HPC183")],
)
def test_what_all_have_is_no_fault_of_a_node(nodes, changes, code):
    (finding,) = judgement.findings(cluster(nodes, lambda *_: changes), HOSTS)
    assert (finding.code, finding.nodes) == (code, ())
    assert finding.is_suspect
    number = nodes * (nodes - 1) // 2
    if number > 3:
        assert finding.text.startswith(f"{number} of {number} pairs: ")


@pytest.mark.parametrize("nodes", [8, 32, 128])
@pytest.mark.parametrize("spread", [0.1, 0.2])
def test_noise_makes_no_node_suspect(nodes, spread):
    """Of shared networks, and of looks that are not repeated."""
    draw = random.Random(nodes)  # noqa: S311

    def noisy(*_):
        speeds = (1.2e8 * min(draw.lognormvariate(0, spread), 1.2) for _ in "ab")
        lost = 0.003 if draw.random() < spread else 0.0
        return dict(zip(("forward", "backward"), speeds, strict=True)) | {"lost": lost}

    links = cluster(min(nodes, 32), noisy)
    assert found(links) == []
    # And one that is half as fast is found in it.
    half = [
        replace(x, forward=x.forward / 2, backward=x.backward / 2)
        if 5 in (x.first, x.second)
        else x
        for x in links
    ]
    assert found(half) == [("HPC191", [5])]


def test_one_that_sends_and_receives_well_with_some_other_is_not_to_blame():
    links = [link(0, 1), link(0, 2, forward=6e7), link(1, 2, backward=6e7)]
    assert found(links) == [("HPC191", [])]
    assert found([links[0], links[1], link(1, 2, forward=6e7)]) == [("HPC191", [2])]


def test_islands_are_no_fault():
    """Across them there is less for each pair."""
    links = cluster(32, lambda a, b: {} if a // 16 == b // 16 else HALF)
    assert not any(f.nodes for f in judgement.findings(links, HOSTS))


def test_two_bad_nodes_of_four():
    links = cluster(4, of_node(2, 3, **HALF))
    assert found(links) == [("HPC191", [2]), ("HPC191", [3])]


def test_all_that_is_wrong_with_a_node_is_one_finding():
    links = cluster(3, of_node(1, **HALF, **LATE, **LOSSY))
    (finding,) = judgement.findings(links, HOSTS)
    assert finding.text.startswith("n1, with 2 of 2 nodes: 480 Mbit/s ")
    for figure in ("952 Mbit/s", "5.0 ms", "30 us", "1.00%"):
        assert figure in finding.text


@pytest.mark.parametrize(
    ("changes", "is_suspect"),
    [
        (HALF, False),  # with nothing to compare it with
        ({"forward": 6e7}, True),  # but the other direction
        ({"lost": 0.02}, True),
        ({"lost": 0.005}, False),  # another pair would show what is usual
        (LARGE, True),
        (NONE, True),
        ({"clock_s": -60.0}, True),
    ],
)
def test_of_two_nodes_nobody_knows_which_one_it_is(changes, is_suspect):
    links = [link(0, 1, **changes)]
    assert [nodes for _, nodes in found(links)] == [[]] * is_suspect


def test_what_all_lose_is_usual():
    assert found(cluster(4, lambda *_: {"lost": 0.003})) == []
    assert found(cluster(4, of_node(2, lost=0.03))) == [("HPC191", [2])]


@pytest.mark.parametrize(("seconds", "side"), [(60.0, "ahead"), (-60.0, "behind")])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_clock(rank, seconds, side):
    def clock(first, second):
        off = {first: -seconds, second: seconds}
        return {"clock_s": off.get(rank, 0.0)}

    (finding,) = judgement.findings(cluster(3, clock), HOSTS)
    assert (finding.code, finding.nodes) == ("HPC183", (rank,))
    where, text = f"n{rank}, with 2 of 2 nodes", f"the clock of n{rank} is 60.0 s"
    assert finding.text == f"{where}: {text} {side}"


def test_two_clocks_of_four():
    """Nobody knows which half is right; the sign belongs to the node that is named."""

    def clock(first, second):
        return {"clock_s": 60.0 if first < 2 <= second else 0.0}

    (finding,) = judgement.findings(cluster(4, clock), HOSTS)
    assert (finding.code, finding.nodes) == ("HPC183", ())
    assert finding.text == "4 of 6 pairs: the clock of n3 is 60.0 s ahead"


def test_a_firewall_in_one_direction_is_told():
    links = cluster(4, of_pair(1, 2, **NONE, blocked=[2]))
    (finding,) = judgement.findings(links, HOSTS)
    text = "between n1 and n2: n2 cannot connect to n1: no answer"
    assert finding.text == text


def test_only_what_may_be_noise_is_looked_at_again():
    links = [
        link(0, 1), link(0, 2, **HALF), link(1, 2, **LATE), link(0, 3, **LARGE),
        link(1, 3, **NONE), link(2, 3, **LOSSY),
    ]  # fmt: skip
    # All that can be: they show the noise.
    few = [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)]
    assert judgement.doubtful(links) == few
    assert judgement.doubtful([*links, link(3, 4)]) == [(0, 2), (1, 2), (0, 3), (2, 3)]
    assert judgement.doubtful([link(0, 1), link(0, 2), link(1, 2)]) == []


def test_the_best_figures_count():
    one, other = link(0, 1, **HALF, **LATE, looks=2), link(0, 1, lost=0.03)
    steady = HALF["forward"] / GOOD["backward"]
    best = link(0, 1, lost=0.01, looks=3, steady=steady)  # the average of the losses
    assert judgement.best_of(one, other) == best
    assert judgement.best_of(link(0, 1, **NONE), link(0, 1)) == link(0, 1, looks=2)
    assert judgement.best_of(link(0, 1), link(0, 1, **NONE)) == link(0, 1, looks=2)


# What each look at a pair has shown, by pair: both directions. The first is what three
# hosts of a PBS that nobody had shaped have shown, in about 31 and 62 Gbit/s.
LOOKS = {
    "noise": ({(0, 1): [31, 62, 33], (0, 2): [30, 31, 62], (1, 2): [31, 45, 33]}, []),
    "one shaped": ({(0, 1): [60, 62, 61], (0, 2): [30, 31, 30], (1, 2): [31, 30, 31]},
                   [("HPC191", [2])]),
    "one that flaps": ({(0, 1): [60, 62, 61], (0, 2): [30, 9, 30], (1, 2): [31, 8, 3]},
                       [("HPC191", [2])]),
    "once": ({(0, 1): [62], (0, 2): [30], (1, 2): [31]}, [("HPC191", [2])]),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOKS)
def test_pairs_that_differ_no_more_than_their_own_repetitions(case):
    looks, expected = LOOKS[case]
    best = [
        judgement.best_of(
            *(link(*pair, forward=rate * 1e8, backward=rate * 1.1e8) for rate in rates)
        )
        for pair, rates in looks.items()
    ]
    findings = [*judgement.findings(best, HOSTS)]
    assert [(f.code, [*f.nodes]) for f in findings] == expected
    if not expected:  # without the repetitions
        steady = [replace(each, steady=1.0) for each in best]
        assert [*judgement.findings(steady, HOSTS)]


@pytest.mark.parametrize(
    ("pairs", "steady"),
    [
        ([], 1.0),
        ([[link(0, 1), link(0, 1, **NONE)]], 1.0),  # a look without figures
        ([[link(0, 1, **NONE)]], 1.0),
        # A pair that flaps does not excuse itself: of many nodes only some pairs are
        # looked at again, which show no noise.
        ([[link(0, 1)], [link(0, 2, **HALF), link(0, 2, forward=1e7)]], 1.0),
        ([[link(0, 1, **HALF), link(0, 1, forward=3e7)]], 0.5),
    ],
)
def test_the_steadiest_pair_shows_the_noise(pairs, steady):
    best = [judgement.best_of(*looks) for looks in pairs]
    assert judgement.usual(best).steady == steady


# Figures by pair: Gbit/s in both directions, the share of resent segments, and seconds.
# 37 Gbit/s and 0.5 % are what hosts show whose links nobody has shaped; 0.478 Gbit/s is
# a rate that one of them was given.
SLOW = 0.478
# The nodes of each finding are first.
UNEVEN: dict[str, tuple[list[list[int]], dict[tuple[int, int], tuple[float, ...]]]] = {
    "the second sends slowly": ([[1]],
        {(0, 1): (36.88, SLOW), (0, 2): (16.8, 18.3, 0.0049), (1, 2): (SLOW, 31)}),
    "and the others are more uneven": ([[1]],
        {(0, 1): (36.88, SLOW), (0, 2): (12, 37, 0.0018), (1, 2): (SLOW, 20, 0.003)}),
    "the second receives slowly": ([[1]],
        {(0, 1): (SLOW, 36.88), (0, 2): (16.8, 18.3, 0.0049), (1, 2): (31, SLOW)}),
    "both": ([[1]],
        {(0, 1): (SLOW, SLOW), (0, 2): (5.8, 18.3, 0.003), (1, 2): (SLOW, SLOW)}),
    "one of four": ([[1]],
        {(0, 1): (30, SLOW), (0, 2): (16.8, 18.3, 0.0049), (0, 3): (22, 19, 0.001),
         (1, 2): (SLOW, 28), (1, 3): (SLOW, 33), (2, 3): (25, 20)}),
    "two of four": ([[1], [2]],
        {(0, 1): (30, SLOW), (0, 2): (32, SLOW), (0, 3): (12, 19, 0.0049),
         (1, 2): (SLOW, SLOW), (1, 3): (SLOW, 33), (2, 3): (SLOW, 20)}),
    "two of four, one of which is slower still": ([[1], [2]],
        {(0, 1): (30, SLOW), (0, 2): (32, 0.1), (0, 3): (12, 19, 0.0049),
         (1, 2): (SLOW, 0.1), (1, 3): (SLOW, 33), (2, 3): (0.1, 20)}),
    "one of four has half the rate of the other two": ([[1], [2]],
        {(0, 1): (30, SLOW), (0, 2): (8, 9), (0, 3): (22, 19),
         (1, 2): (SLOW, 28), (1, 3): (SLOW, 33), (2, 3): (9, 8)}),
    # The rates of a connection that loses much mean nothing.
    "the second loses": ([[1]],
        {(0, 1): (35.2, 29.5, 0.026), (0, 2): (6.0, 9.2), (1, 2): (87.6, 17.4, 0.025)}),
    "the second is late": ([[1]],
        {(0, 1): (2.3, 2.4, 0, 5e-3), (0, 2): (12, 37), (1, 2): (2.3, 2.3, 0, 5e-3)}),
    "noise": ([[]],
        {(0, 1): (23.91, 14.2), (0, 2): (16.5, 12.8), (1, 2): (10.15, 21, 0.0016)}),
    "noise on slower links": ([],
        {(0, 1): (4.87, 3.3, 2e-5), (0, 2): (3.5, 2.94, 1e-5), (1, 2): (3.6, 3.1)}),
    "one link": ([[]],
        {(0, 1): (16.8, 18.3), (0, 2): (SLOW, SLOW), (1, 2): (19, 21)}),
    "one link of four nodes": ([[]],
        {(0, 1): (16.8, 18.3), (0, 2): (SLOW, 18), (0, 3): (17, 19), (1, 2): (19, 21),
         (1, 3): (20, 18), (2, 3): (18, 20)}),
    "two of four, and no link between the others": ([[1], [2]],
        {(0, 1): (30, SLOW), (0, 2): (SLOW, 30), (1, 2): (SLOW, SLOW),
         (1, 3): (SLOW, 30), (2, 3): (30, SLOW)}),
    "one link, and one that nobody could measure": ([[]],
        {(0, 1): (16.8, 18.3), (0, 2): (SLOW, SLOW)}),
}  # fmt: skip


def slow_of(figures):
    """Return the findings about slow links."""
    links = [
        link(*pair, forward=there * 1.25e8, backward=back * 1.25e8,
             **dict(zip(("lost", "latency_s"), rest, strict=False)))
        for pair, (there, back, *rest) in figures.items()
    ]  # fmt: skip
    every = itertools.combinations(sorted({*itertools.chain(*figures)}), 2)
    links += [link(*pair, **NONE) for pair in every if pair not in figures]
    return [f for f in judgement.findings(links, HOSTS) if f.code == "HPC191"]


def test_the_worst_comes_first(golden):
    """And nobody is named beside it whom noise makes look slow."""
    texts = {}
    for case, (nodes, figures) in UNEVEN.items():
        findings = slow_of(figures)
        assert [[*f.nodes] for f in findings] == nodes, case
        assert all(f.is_suspect == bool(f.nodes) for f in findings), case
        texts[case] = [f.text for f in findings]
    golden(texts)


def test_the_nodes_without_which_all_links_can_be_used():
    links = [
        link(0, 1), link(0, 2, **LARGE), link(1, 2, **NONE), link(0, 3, **HALF),
        link(3, 4, **NONE),
    ]  # fmt: skip
    assert judgement.unusable(links) == [2, 4]


# --- pairs ----------------------------------------------------------------------------

NODES = st.lists(st.integers(0, 500), unique=True, max_size=70)


@given(NODES)
def test_no_node_is_twice_in_a_round_and_no_pair_comes_twice(nodes):
    rounds = judgement.rounds(nodes)
    for together in rounds:
        seen = [*itertools.chain(*together)]
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(nodes)
    every = [*itertools.chain(*rounds)]
    assert len(every) == len(set(every))
    assert all(first < second for first, second in every)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 31, 32])
def test_up_to_32_nodes_each_meets_all_others(number):
    rounds = judgement.rounds(range(number))
    every = sorted(itertools.chain(*rounds))
    assert every == [*itertools.combinations(range(number), 2)]
    assert len(rounds) == (number - 1 + number % 2 if number > 1 else 0)


@pytest.mark.parametrize("number", [33, 34, 128, 1001])
def test_of_more_each_meets_30_others_at_least(number):
    rounds = judgement.rounds(range(number))
    assert len(rounds) == 31
    met = [*itertools.chain(*itertools.chain(*rounds))]
    assert {met.count(node) for node in range(number)} <= {30, 31}


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(10, 19))))
def test_pairs_are_put_into_rounds_in_which_no_node_is_twice(wanted):
    rounds = judgement.disjoint(wanted)
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
        # Two bad nodes of four. The good ones are also in two bad pairs.
        (4, of(2, 3, nodes=4), [2, 3]),
        # One bad node, and a bad cable elsewhere.
        (8, [*of(5), (3, 4)], [5]),
        # Bad with two of seven only: noise.
        (8, [(0, 5), (1, 5)], []),
        # A fault of all nodes is no fault of some.
        (3, every(0, 1, 2), []),
        (4, every(0, 1, 2, 3), []),
        (8, every(*range(8)), []),
        # Two halves that do not see each other, or whose clocks differ.
        (4, [*itertools.product((0, 1), (2, 3))], []),
        (8, [*itertools.product(range(4), range(4, 8))], []),
    ],
)
def test_the_nodes_that_explain_bad_pairs(nodes, bad, blamed):
    assert judgement.blame(bad, every(*range(nodes))) == blamed


@given(st.integers(2, 9), st.data())
def test_who_is_blamed_is_bad_with_most_partners(nodes, data):
    tried = every(*range(nodes))
    bad = data.draw(st.sets(st.sampled_from(tried)))
    for node in judgement.blame(bad, tried):
        own = [pair for pair in bad if node in pair]
        assert len(own) >= max(2, (nodes - 1) * 2 / 3)
