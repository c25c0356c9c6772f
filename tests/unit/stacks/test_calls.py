"""The entries of torch's flight recorder about a rank's collectives."""

from __future__ import annotations

import pytest

from tests.support.stack_samples import entry
from torchrun_hpc.stacks.calls import Call, Group, groups_of, title


def calls(*entries, sizes=None):
    found = groups_of({"entries": entries}, {"0": 8} if sizes is None else sizes)
    return {group.name: [(c.number, str(c)) for c in group.calls] for group in found}


SUM = "all_reduce (float32[1024])"


def test_the_latest_calls_of_each_group():
    entries = [entry(n) for n in range(1, 9)]
    entries += [entry(1, "barrier", "1", 8, input_sizes=[], input_dtypes=[])]
    assert calls(*entries, sizes={"0": 8, "1": 2, "2": 4}) == {
        "2": [],
        "0": [(6, SUM), (7, SUM), (8, SUM)],
        "1": [(1, "barrier")],
    }
    assert groups_of({"entries": entries}, {"0": 8})[0].size == 8


def test_without_a_call():
    assert calls() == {"0": []}
    assert groups_of({}, {}) == ()
    assert Group("0", 8).last == 0
    assert Group("0", 8, (Call(7, "barrier"),)).last == 7


def test_a_ring_that_has_lost_its_first_entries():
    """Whether there was a call in a group without an entry is unknown."""
    entries = [entry(n, record=n + 90) for n in (33, 34)]
    assert calls(*entries, sizes={"0": 8, "1": 2}) == {"0": [(33, SUM), (34, SUM)]}


def test_the_latest_groups():
    entries = [entry(1, group=str(n), record=n) for n in range(20)]
    assert list(calls(*entries)) == [str(n) for n in range(12, 20)]


def test_pairs_of_ranks_are_left_out():
    """The numbers of sends and receives differ by rank."""
    assert calls(entry(1), entry(2, "send 0->1", is_p2p=True)) == {"0": [(1, SUM)]}


@pytest.mark.parametrize(
    ("kinds", "sizes", "shape"),
    [
        (["Long"], [[2, 3]], "int64[2,3]"),
        (["BFloat16"], [[]], "bfloat16[]"),
        (["Half", "Byte"], [[1], [2]], "float16[1], uint8[2]"),
        (["c10::Float8_e4m3fn"], [[1]], "c10::float8_e4m3fn[1]"),
        ([], [[1]], ""),
    ],
)
def test_shapes(kinds, sizes, shape):
    (group,) = groups_of(
        {"entries": [entry(1, input_dtypes=kinds, input_sizes=sizes)]}, {}
    )
    assert group.calls[0].shape == shape


def test_what_a_group_is_for():
    trace = {"entries": [entry(1, process_group=("7", "mesh_tp"))]}
    (group,) = groups_of(trace, {title("7", "mesh_tp"): 4})
    assert (group.name, group.size, group.last) == ("7 mesh_tp", 4, 1)


def test_shapes_that_may_differ():
    """A root scatters more; an uneven exchange is allowed."""
    for operation in ("scatter", "gather", "all_to_all", "reduce_scatter", "new"):
        assert Call(1, operation, "a").key == Call(1, operation, "b").key
    for operation in ("all_reduce", "broadcast", "_all_gather_base"):
        assert Call(1, operation, "a").key != Call(1, operation, "b").key
