"""What a person reads of the stacks of all ranks."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.stacks import tree
from torchrun_hpc.stacks.sampling import WorkerStack

# Eight ranks, two on each node.
HOSTS = {0: "jwb0001", 1: "jwb0002", 2: "jwb0003", 3: "jwb0004"}
STEP = ("<module> train.py:40", "main train.py:20")
REDUCE = (*STEP, "step train.py:12", "all_reduce c10d.py:9")
READ = (*STEP, "load train.py:30", "read data.py:31")
SAVE = (*STEP, "save train.py:50")

# The stacks of some ranks, where it is not the first one; the lines.
TREES = {
    "all do the same": (
        REDUCE,
        {},
        [
            (
                "8 ranks: <module> train.py:40 > main train.py:20 > step train.py:12 "
                "> all_reduce c10d.py:9"
            )
        ],
    ),
    "one is odd": (
        REDUCE,
        {3: READ},
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  7 of 8 ranks (0-2,4-7): step train.py:12 > all_reduce c10d.py:9",
            "* 1 rank (3, jwb0002): load train.py:30 > read data.py:31",
        ],
    ),
    "two of a node are odd": (
        REDUCE,
        {2: READ, 3: READ},
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  6 of 8 ranks (0-1,4-7): step train.py:12 > all_reduce c10d.py:9",
            "* 2 of 8 ranks (2-3, jwb0002): load train.py:30 > read data.py:31",
        ],
    ),
    "two of different nodes are odd": (
        REDUCE,
        {0: READ, 7: READ},
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  6 of 8 ranks (1-6): step train.py:12 > all_reduce c10d.py:9",
            "* 2 of 8 ranks (0,7): load train.py:30 > read data.py:31",
        ],
    ),
    "two halves": (
        REDUCE,
        dict.fromkeys((0, 2, 4, 6), READ),
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  4 of 8 ranks (0,2,4,6): load train.py:30 > read data.py:31",
            "  4 of 8 ranks (1,3,5,7): step train.py:12 > all_reduce c10d.py:9",
        ],
    ),
    "three groups, the widest first": (
        SAVE,
        {1: READ, 2: REDUCE, 5: REDUCE},
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  5 of 8 ranks (0,3-4,6-7): save train.py:50",
            "* 2 of 8 ranks (2,5): step train.py:12 > all_reduce c10d.py:9",
            "* 1 rank (1, jwb0001): load train.py:30 > read data.py:31",
        ],
    ),
    "a group that parts again": (
        REDUCE,
        {1: (*STEP, "step train.py:12", "log train.py:13"), 5: READ},
        [
            "8 ranks: <module> train.py:40 > main train.py:20",
            "  7 of 8 ranks (0-4,6-7): step train.py:12",
            "    6 of 8 ranks (0,2-4,6-7): all_reduce c10d.py:9",
            "  * 1 rank (1, jwb0001): log train.py:13",
            "* 1 rank (5, jwb0003): load train.py:30 > read data.py:31",
        ],
    ),
}


def stacks(usual, others=(), *, size=8, workers=2):
    """Return the stacks of all ranks, one of which may be a problem."""
    others = dict(others)
    return [
        WorkerStack(rank, rank // workers, others.get(rank, usual))
        for rank in range(size)
    ]


def problem(rank, text):
    return WorkerStack(rank, rank // 2, problem=text)


@pytest.mark.parametrize("name", TREES)
def test_a_tree(name):
    usual, others, lines = TREES[name]
    assert tree.render(stacks(usual, others), HOSTS) == lines


@pytest.mark.parametrize("name", TREES)
def test_the_order_of_the_answers_does_not_matter(name):
    usual, others, lines = TREES[name]
    found = tree.render(stacks(usual, others)[::-1], HOSTS)
    assert found[0] == lines[0]
    assert sorted(found) == sorted(lines)


def test_ranks_that_have_nothing_in_common_have_no_line_in_common():
    """In a script without functions the ranks differ in the outermost frame."""
    others = {3: ("<module> train.py:41", "read data.py:31")}
    assert tree.render(stacks(("<module> train.py:40",), others), HOSTS) == [
        "  7 of 8 ranks (0-2,4-7): <module> train.py:40",
        "* 1 rank (3, jwb0002): <module> train.py:41 > read data.py:31",
    ]


def test_a_rank_that_is_where_others_call_something_has_a_frame():
    """It has called something that is not Python."""
    *_, odd = tree.render(stacks(REDUCE, {3: STEP}), HOSTS)
    assert odd.startswith("* 1 rank (3, jwb0002): ")
    assert "no frame of Python" not in odd


def test_nobody_is_odd_where_there_is_no_usual():
    """``*`` is for what few do where most do something else."""
    groups = {rank: (*STEP, f"f{rank % 3} a.py:1") for rank in range(9)}
    assert tree.render(stacks((), groups, size=9), HOSTS)[1:] == [
        "  3 of 9 ranks (0,3,6): f0 a.py:1",
        "  3 of 9 ranks (1,4,7): f1 a.py:1",
        "  3 of 9 ranks (2,5,8): f2 a.py:1",
    ]


# --- names --------------------------------------------------------------------------


def test_one_node_has_no_name():
    lines = tree.render(stacks(REDUCE, {3: READ}, workers=8), {0: "jwb0001"})
    assert lines[1:] == [
        "  7 of 8 ranks (0-2,4-7): step train.py:12 > all_reduce c10d.py:9",
        "* 1 rank (3): load train.py:30 > read data.py:31",
    ]


@pytest.mark.parametrize("hosts", [{}, {1: ""}])
def test_a_node_of_which_the_name_is_not_known(hosts):
    *_, last = tree.render(stacks(REDUCE, {3: READ}), hosts)
    assert last == "* 1 rank (3): load train.py:30 > read data.py:31"


def test_one_rank():
    assert tree.render(stacks(STEP, size=1), HOSTS) == [
        "1 rank: <module> train.py:40 > main train.py:20"
    ]


def test_thousands_of_ranks_are_ranges():
    lines = tree.render(stacks(REDUCE, {1234: READ}, size=4096, workers=8), HOSTS)
    assert lines[1:] == [
        (
            "  4095 of 4096 ranks (0-1233,1235-4095): step train.py:12 "
            "> all_reduce c10d.py:9"
        ),
        "* 1 rank (1234): load train.py:30 > read data.py:31",
    ]


# --- long ones ----------------------------------------------------------------------


def numbered(count):
    return tuple(f"f{number}" for number in range(count))


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (8, "f0 > f1 > f2 > f3 > f4 > f5 > f6 > f7"),
        (9, "f0 > f1 > ... > f4 > f5 > f6 > f7 > f8"),
        (100, "f0 > f1 > ... > f95 > f96 > f97 > f98 > f99"),
    ],
)
def test_a_long_chain_is_cut_in_the_middle(count, shown):
    assert tree.render(stacks(numbered(count)), HOSTS) == [f"8 ranks: {shown}"]


def test_many_places_are_counted():
    everywhere = {rank: (*STEP, f"f{rank} a.py:{rank}") for rank in range(4096)}
    lines = tree.render(stacks((), everywhere, size=4096), HOSTS)
    assert len(lines) == 12
    assert lines[-2:] == [
        "  1 rank (9): f9 a.py:9",
        "  4086 of 4096 ranks (10-4095): at 4086 other places",
    ]


def test_many_problems_are_counted():
    found = [problem(rank, f"process {rank} is gone") for rank in range(100)]
    assert tree.render(found, HOSTS)[-2:] == [
        "no stack of 1 rank (9): process 9 is gone",
        "no stack of 90 of 100 ranks (10-99): other problems",
    ]


def test_what_is_odd_is_not_in_the_cut():
    odd = (*numbered(50), "odd", *numbered(3))
    assert tree.render(stacks(numbered(100), {3: odd}), HOSTS) == [
        "8 ranks: f0 > f1 > ... > f45 > f46 > f47 > f48 > f49",
        "  7 of 8 ranks (0-2,4-7): f50 > f51 > ... > f95 > f96 > f97 > f98 > f99",
        "* 1 rank (3, jwb0002): odd > f0 > f1 > f2",
    ]


# --- what is missing ----------------------------------------------------------------


def test_no_worker():
    assert tree.render([], HOSTS) == []


def test_no_frame_at_all():
    """Its Python has not begun, or has ended."""
    assert tree.render(stacks((), size=2), HOSTS) == ["2 ranks: no frame of Python"]


def test_a_problem_of_all_is_one_line():
    found = [problem(rank, "py-spy is not installed") for rank in range(8)]
    assert tree.render(found, HOSTS) == [
        "no stack of 8 ranks: py-spy is not installed",
    ]


def test_each_problem_is_one_line():
    found = stacks(REDUCE)
    for rank, text in {6: "no answer", 1: "not allowed", 7: "no answer"}.items():
        found[rank] = problem(rank, text)
    assert tree.render(found, HOSTS) == [
        (
            "5 of 8 ranks (0,2-5): <module> train.py:40 > main train.py:20 "
            "> step train.py:12 > all_reduce c10d.py:9"
        ),
        "no stack of 2 of 8 ranks (6-7, jwb0004): no answer",
        "no stack of 1 rank (1, jwb0001): not allowed",
    ]


# --- properties ---------------------------------------------------------------------

LINE = re.compile(
    r"(?P<mark>[ *]*)(no stack of )?"
    r"(?P<size>\d+) (of \d+ )?ranks?( \((?P<ranks>[\d,-]+)(, n\d)?\))?: (?P<text>.*)"
)


def ranks_of(line, total):
    """Return the ranks of a line."""
    if line["ranks"] is None:
        return [*range(total)]
    ends = [part.split("-") for part in line["ranks"].split(",")]
    return [rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1)]


def leaves(lines):
    """Return the lines that do not part any more."""
    depths = [len(line["mark"]) for line in lines] + [0]
    pairs = zip(lines, pairwise(depths), strict=True)
    return [line for line, (own, after) in pairs if own >= after]


chains = st.lists(st.sampled_from("abc"), max_size=5).map(tuple)
anything = st.lists(st.text(max_size=5), max_size=12).map(tuple)


def of_all(frames):
    """Draw the stacks of up to twenty ranks on up to three nodes."""
    each = st.tuples(st.integers(0, 2), frames, st.sampled_from(["", "", "p1", "p2"]))
    return st.lists(each, max_size=20).map(
        lambda drawn: [
            WorkerStack(rank, node, () if text else chain, text)
            for rank, (node, chain, text) in enumerate(drawn)
        ]
    )


@given(of_all(chains), st.permutations(range(3)))
def test_each_rank_is_in_one_place_and_the_widest_comes_first(found, names):
    hosts = {node: f"n{names[node]}" for node in range(3)}
    lines = [LINE.fullmatch(line) for line in tree.render(found, hosts)]
    assert all(lines)
    named = [rank for line in leaves(lines) for rank in ranks_of(line, len(found))]
    assert sorted(named) == [*range(len(found))]
    problems = sum(bool(stack.problem) for stack in found)
    beside = {}  # sizes of lines that are parts of the same one, by their depth
    for line in lines:
        depth, size = len(line["mark"]), int(line["size"])
        assert size == len(ranks_of(line, len(found)))
        beside = {k: v for k, v in beside.items() if k <= depth}
        assert line.string.startswith("no stack") or size <= beside.get(depth, size)
        beside[depth] = size
    assert bool(lines) is bool(found)
    assert sum(line.string.startswith("no stack") for line in lines) <= min(2, problems)


@given(of_all(anything))
def test_any_frame_can_be_written(found):
    for line in tree.render(found, {0: "a", 1: ""}):
        assert isinstance(line, str)


@given(of_all(chains))
def test_what_most_do_is_never_odd(found):
    for line in map(LINE.fullmatch, tree.render(found, {})):
        is_odd = "*" in line["mark"]
        assert not (is_odd and int(line["size"]) * 2 >= len(found))
