"""The report about the stacks of all ranks."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.stacks import collectives
from torchrun_hpc.stacks.sampling import WorkerStack

HOSTS = {0: "jwb0001", 1: "jwb0002", 2: "jwb0003", 3: "jwb0004"}
REDUCE = ("main", "step", "reduce")
READ = ("main", "load", "read")
SAVE = ("main", "save")
LOG = ("main", "step", "log")


def numbered(count):
    return tuple(f"f{number}" for number in range(count))


# Frames or problems of some of eight ranks, two on each node. The others reduce.
TREES: dict[str, dict[int, tuple[str, ...] | str]] = {
    "all do the same": {},
    "one is odd": {3: READ},
    "two of a node are odd": {2: READ, 3: READ},
    "two of different nodes are odd": {0: READ, 7: READ},
    "two halves": {0: READ, 2: READ, 4: READ, 6: READ},
    "no rank is odd if there is no usual place": {
        rank: ("main", f"f{rank % 3}") for rank in range(8)
    },
    "three groups, the widest first": {
        1: READ, 0: SAVE, 3: SAVE, 4: SAVE, 6: SAVE, 7: SAVE,
    },
    "a group that parts again": {1: LOG, 5: READ},
    "a script without functions: the outermost frame differs": {
        3: ("elsewhere", "read")
    },
    "one has called another language, and others call Python": {3: ("main",)},
    "each problem is one line": {6: "no answer", 1: "not allowed", 7: "no answer"},
    "all have one problem": dict.fromkeys(range(8), "py-spy is not installed"),
    "a long chain is cut after the odd rank": {
        rank: (*numbered(50), "odd", *numbered(3)) if rank == 3 else numbered(100)
        for rank in range(8)
    },
}  # fmt: skip


def stacks(others=(), *, size=8, workers=2):
    """Return the stacks of all ranks: frames, or a problem."""
    found = dict.fromkeys(range(size), REDUCE) | dict(others)
    return [
        WorkerStack(rank, rank // workers, problem=what)
        if isinstance(what, str)
        else WorkerStack(rank, rank // workers, what)
        for rank, what in found.items()
    ]


def test_trees(golden):
    """The order of the answers matters only to groups of the same size."""
    trees = {}
    for case, others in TREES.items():
        ranks = stacks(others)
        trees[case] = collectives.render(ranks, HOSTS)
        backward = collectives.render(ranks[::-1], HOSTS)
        assert backward[0] == trees[case][0]
        assert sorted(backward) == sorted(trees[case])
    golden(trees)


# Frames, outermost first, and where the script is.
PLACES = {
    "in the script": (
        ("<module> train.py:9", "read pkg/data.py:31"),
        "read at data.py:31",
    ),
    "at the top": (("<module> train.py:9",), "<module> at train.py:9"),
    "in a collective": (
        (
            *("<module> train.py:9", "main train.py:88"),
            "wrapper torch/distributed/c10d_logger.py:83",
            "all_reduce torch/distributed/distributed_c10d.py:3252",
        ),
        "all_reduce at train.py:88",
    ),
    "as py-spy writes a wrapper": (
        (
            "main train.py:88",
            "_exception_logger.<locals>.wrapper torch/distributed/c10d_logger.py:83",
            "all_reduce torch/distributed/distributed_c10d.py:3252",
        ),
        "all_reduce at train.py:88",
    ),
    "in a method": (("Data.read data.py:3",), "read at data.py:3"),
    "in a module": (
        (
            "main train.py:8",
            "_wrapped_call_impl torch/nn/modules/module.py:1",
            "_call_impl torch/nn/modules/module.py:2",
            "forward torch/nn/modules/linear.py:3",
        ),
        "forward at train.py:8",
    ),
    "in Python's library": (
        ("main train.py:8", "get queue.py:171", "wait threading.py:355"),
        "get at train.py:8",
    ),
    "in another library": (
        ("main train.py:8", "fit lightning/trainer.py:5", "step torch/x.py:2"),
        "step at trainer.py:5",
    ),
    "nowhere in a script": (("_run <frozen runpy>:88",), "_run <frozen runpy>:88"),
    "outside Python": ((), "no Python frame"),
    "a file with blanks": (("f my file.py:3",), "f at my file.py:3"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place(name):
    frames, place = PLACES[name]
    assert collectives.summary([WorkerStack(0, 0, frames)], {}, 2) == [
        f"1 rank: {place}"
    ]


def test_places_of_many_ranks():
    """Three branches of the tree, and three problems, are the most."""
    frames = {n: f"f a.py:{n}" if n < 40 else "reduce b.py:1" for n in range(50)}
    found = [WorkerStack(n, n // 8, (frame,)) for n, frame in frames.items()]
    found += [WorkerStack(50 + n, 9, problem=f"problem {n}") for n in range(9)]
    assert [line.partition(":")[2] for line in collectives.summary(found, {}, 2)] == [
        *(" reduce at b.py:1", " f at a.py:0", " at 39 other places"),
        *(" problem 0", " problem 1", " other problems"),
    ]


def test_few_ranks():
    assert collectives.render([], HOSTS) == []
    assert collectives.render(stacks(size=1), HOSTS) == ["1 rank: main > step > reduce"]
    # Their Python has not begun, or has ended.
    without = stacks({0: (), 1: ()}, size=2)
    assert collectives.render(without, HOSTS) == ["2 ranks: no Python frame"]


def test_a_node_without_a_name():
    """The name is not known; or no other node has one."""
    for workers, hosts in (2, {}), (2, {1: ""}), (8, {}):
        lines = collectives.render(stacks({3: READ}, workers=workers), hosts)
        assert lines[-1] == "* 1 rank (3): load > read"


# --- many and long ones -------------------------------------------------------------


def test_many_ranks(golden):
    """They are ranges. Many places and many problems are counted."""
    places = {rank: ("main", f"f{rank}") for rank in range(4096)}
    problems = {rank: f"process {rank} is gone" for rank in range(100)}
    golden(
        {
            "one odd rank": collectives.render(
                stacks({1234: READ}, size=4096, workers=8), HOSTS
            ),
            "a place for each rank": collectives.render(
                stacks(places, size=4096), HOSTS
            ),
            "a problem for each rank": collectives.render(
                stacks(problems, size=100), HOSTS
            ),
        }
    )


def test_a_long_chain_is_cut_in_the_middle():
    for count, shown in {
        8: "f0 > f1 > f2 > f3 > f4 > f5 > f6 > f7",
        9: "f0 > f1 > ... > f4 > f5 > f6 > f7 > f8",
        100: "f0 > f1 > ... > f95 > f96 > f97 > f98 > f99",
    }.items():
        found = [WorkerStack(0, 0, numbered(count))]
        assert collectives.render(found, HOSTS) == [f"1 rank: {shown}"]


# --- properties ---------------------------------------------------------------------

LINE = re.compile(
    r"(?P<mark>[ *]*)(no stack from )?"
    r"(?P<size>\d+) (of \d+ )?ranks?( \((?P<ranks>[\d,-]+)(, n\d)?\))?: (?P<text>.*)"
)


def parsed(lines):
    matches = [match for line in lines if (match := LINE.fullmatch(line))]
    assert len(matches) == len(lines)
    return matches


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
    lines = parsed(collectives.render(found, hosts))
    named = [rank for line in leaves(lines) for rank in ranks_of(line, len(found))]
    assert sorted(named) == [*range(len(found))]
    problems = sum(bool(stack.problem) for stack in found)
    beside: dict[
        int, int
    ] = {}  # sizes of lines that are parts of the same one, by their depth
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
    for line in collectives.render(found, {0: "a", 1: ""}):
        assert isinstance(line, str)


@given(of_all(chains))
def test_what_most_do_is_never_odd(found):
    for line in parsed(collectives.render(found, {})):
        is_odd = "*" in line["mark"]
        assert not (is_odd and int(line["size"]) * 2 >= len(found))
