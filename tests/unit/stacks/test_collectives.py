"""The latest collectives of all ranks, compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.stacks import collectives
from torchrun_hpc.stacks.calls import Call, Group
from torchrun_hpc.stacks.sampling import WorkerStack

HOSTS = {n: f"jwb000{n + 1}" for n in range(4)}


def compare(stacks, hosts):
    """Return the lines alone."""
    return [*collectives.compare(stacks, hosts)]


SHAPE = "float32[1024]"


def called(last, operation="all_reduce", shape=SHAPE, name="0", size=8):
    """Return a group with calls up to this number; all but the last one are usual."""
    first = max(last - 2, 1)
    usual = [Call(n, "all_reduce", SHAPE) for n in range(first, last)]
    return Group(name, size, (*usual, Call(last, operation, shape))[: max(last, 0)])


USUAL = called(4)
# The groups of odd ranks among eight, two on each node; ``None`` if unknown. The others
# have called the fourth one.
CASES: dict[str, dict[int, Group | None]] = {
    "one did not come": {5: called(3)},
    "one has called none": {5: Group("0", 8)},
    "two did not come": {2: called(3), 5: called(3)},
    "two at different places": {2: called(3), 5: called(1)},
    "another operation": {0: called(4, "broadcast")},
    "another operation, and later equal ones": {
        0: Group("0", 8, (Call(4, "barrier"), Call(5, "all_reduce", SHAPE)))
    },
    "another shape": {7: called(4, shape="float32[7]")},
    "one is unknown": {5: None},
    "one is unknown, another did not come": {5: None, 6: called(3)},
    "most did not come": dict.fromkeys(range(1, 6), called(3)),
    "one calls one too many": {6: called(5)},
    "all come": {},
}


def stacks(groups, size=8):
    """Return the stacks of all ranks, given the groups of each."""
    return [WorkerStack(n, n // 2, groups=tuple(groups(n))) for n in range(size)]


def odd_among_eight(odd):
    """Return the groups of each rank."""
    return lambda rank: filter(None, [odd.get(rank, USUAL)])


def test_groups(golden):
    lines = {
        case: compare(stacks(odd_among_eight(CASES[case])), HOSTS) for case in CASES
    }
    assert [case for case in CASES if not lines[case]] == ["all come"]

    def groups_of_four(rank):
        """A rank without groups may be in any of them."""
        of_half = called(4 if rank == 3 else 5, name=f"{1 + rank // 4} tp", size=4)
        return () if rank == 7 else (of_half, called(9, name="9", size=8))

    lines["groups that agree are left out"] = compare(stacks(groups_of_four), HOSTS)
    golden(lines)


def test_nothing_is_known():
    assert compare([], HOSTS) == []
    assert compare(stacks(lambda _: []), HOSTS) == []
    assert compare(stacks(lambda _: [Group("0", 8)]), HOSTS) == []


def test_thousands_of_ranks_in_groups_of_eight():
    groups = [
        [called(4 if n == 1234 else 5, name=f"{n // 8} tp"), called(7, name="0")]
        for n in range(4096)
    ]
    lines = compare(stacks(groups.__getitem__, 4096), dict.fromkeys(range(2048), "n"))
    (line,) = lines
    assert line.startswith(f"all_reduce 5 of group 154 tp ({SHAPE}): 7 of 8 ranks (123")
    assert "; 1 rank (1234, n) did not call it" in line


call = st.builds(Call, st.integers(0, 5), st.sampled_from("ab"), st.sampled_from("xy"))
group = st.builds(Group, st.sampled_from("01"), st.integers(-1, 4), st.tuples(call))


@given(st.lists(st.lists(group, max_size=3), max_size=5), st.integers(1, 2))
def test_whatever_other_nodes_send_is_one_short_line(groups, times):
    sent = stacks(groups.__getitem__, len(groups)) * times
    found = compare(sent, HOSTS)
    assert all(len(line) < 500 and line.isprintable() for line in found)
    assert len(found) <= 2


def test_many_groups_that_differ():
    """They are counted: a report has one screen."""
    groups = [[called(4 + n % 2, name=str(n // 2), size=2)] for n in range(4096)]
    lines = compare(stacks(groups.__getitem__, 4096), {})
    assert len(lines) == 9
    assert lines[-1] == "2040 other groups whose ranks differ"


# --- who did not come -----------------------------------------------------------------

SCRIPT = ("<module> train.py:9", "all_reduce torch/x.py:1")
AWAY = ("<module> train.py:8", "lost_in_data hang.py:3")
PY_SPY = "py-spy is not installed. Run python -m pip install py-spy"

IN_IT = "it was in lost_in_data at hang.py:3"


def placed(groups, away, **changes):
    """Return the stacks of eight ranks; those that are away have these changes."""
    return [
        replace(stack, **{"frames": AWAY} | changes)
        if stack.rank in away
        else replace(stack, frames=SCRIPT)
        for stack in stacks(groups)
    ]


def test_who_did_not_come(golden):
    texts = {}
    for case, odd in CASES.items():
        ranks = placed(odd_among_eight(odd), odd)
        texts[case] = collectives.absent(ranks, HOSTS, 4)
    nobody = {"all come", "most did not come", "one calls one too many"}
    assert {case for case in CASES if not texts[case]} == nobody
    golden(texts)


@pytest.mark.parametrize(
    ("changes", "rest"),
    [
        ({}, "it was in lost_in_data at hang.py:3"),
        ({"frames": (), "problem": "it is stopped (SIGSTOP)"}, "it is stopped (SIGS"),
        ({"frames": (), "problem": "it was killed by SIGKILL (9)"}, "it was killed"),
    ],
)
def test_who_was_elsewhere(changes, rest):
    rest = f"probably did not call all_reduce at train.py:9; {rest}"
    found = placed(lambda _: [], {5}, **changes)
    assert collectives.absent(found, HOSTS, 6).startswith(f"rank 5 on jwb0003 {rest}")
    assert collectives.absent(found, {}, 6).startswith(f"rank 5 {rest}")


@pytest.mark.parametrize(
    ("away", "changes"),
    [
        ((), {}),  # all are there
        ((0, 1, 2, 3, 4), {}),
        ((6,), {}),  # the one that failed
        ((5,), {"frames": (), "problem": PY_SPY, "is_lasting": True}),
        ((5,), {"frames": (), "problem": "py-spy did not answer"}),
        ((5,), {"frames": ()}),  # it is about to end
        (range(8), {"frames": ()}),
    ],
)
def test_nobody_is_blamed_without_evidence(away, changes):
    found = placed(lambda _: [], away, **changes)
    assert collectives.absent(found, HOSTS, 6) == ""


def test_an_unknown_rank_at_the_same_place_is_not_blamed():
    unknown = placed(lambda n: [] if n == 5 else [USUAL], ())
    assert collectives.absent(unknown, HOSTS, 6) == ""


def test_the_group_with_the_fewest_absent_ranks_tells():
    """Ranks 0 to 2 do not come to the larger group, because they wait for rank 3."""

    def groups(rank):
        of_half = called(4 if rank == 3 else 5, name=f"{1 + rank // 4} tp", size=4)
        return (called(3 if rank < 4 else 4), of_half)

    found = placed(groups, {3})
    expected = f"rank 3 on jwb0002 did not call all_reduce 5; {IN_IT}"
    assert collectives.absent(found, HOSTS, 6) == expected


def test_of_two_the_other_one_did_not_come():
    pair = [WorkerStack(0, 0, SCRIPT), WorkerStack(1, 0, AWAY)]
    assert collectives.absent(pair, {}, 0).startswith("rank 1 probably did not")
    assert collectives.absent(pair, {}, 7) == ""  # that rank is unknown
    assert collectives.absent([], {}, 0) == ""


@given(
    st.lists(st.lists(group, max_size=3), max_size=5),
    st.integers(0, 5),
    st.lists(st.sampled_from(["", "f a.py:1", "x" * 200]), min_size=5, max_size=5),
)
def test_who_did_not_come_is_one_short_line(groups, failed, frames):
    sent = [
        replace(stack, frames=tuple(filter(None, [frames[stack.rank]])))
        for stack in stacks(groups.__getitem__, len(groups))
    ]
    text = collectives.absent(sent, HOSTS, failed)
    assert len(text) < 500
    assert text.isprintable()
