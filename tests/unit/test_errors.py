from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.errors import LaunchError, Message, choices, count, ranges


@pytest.mark.parametrize(
    ("wanted", "known", "expected"),
    [
        ("ib", ["eth0", "ib0"], "Did you mean ib0? There are: eth0, ib0"),
        ("IB0", ["eth0", "ib0"], "Did you mean ib0? There are: eth0, ib0"),
        # the nearest one, not the first
        ("ib1", ["hsn1", "ib0", "ib1"], "Did you mean ib1? There are: hsn1, ib0, ib1"),
        ("hsn", ["ib0", "eth0"], "There are: ib0, eth0"),
        ("", ["ib0"], "There are: ib0"),
        ("jcs", {"jsc": 1, "none": 2}, "Did you mean jsc? There are: jsc, none"),
    ],
)
def test_what_there_is_instead(wanted, known, expected):
    assert choices(wanted, known) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")]
)
def test_numbers_of_something(number, expected):
    assert count(number, "node") == expected


def test_a_message_begins_with_its_code():
    assert str(Message("HPC061", "text")) == "HPC061 text"


def test_the_text_of_an_error_is_without_code():
    """Who prints it puts the code in front."""
    error = LaunchError("HPC061", "text", everywhere=True)
    assert (error.code, str(error), error.everywhere) == ("HPC061", "text", True)
    assert not LaunchError("HPC061", "text").everywhere


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
    assert ranges(ranks) == expected


def expanded(text):
    runs = (run.split("-") for run in text.split(",") if run)
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_ranks_can_be_read_again(ranks, random):
    shuffled = sorted(ranks)
    random.shuffle(shuffled)
    shown, _, rest = ranges(shuffled).partition(" and ")
    more = int(rest.removesuffix(" more") or 0)
    found = expanded(shown)
    assert found == sorted(ranks)[: len(found)]
    assert len(found) + more == len(ranks)
    assert shown.count(",") < 12
    assert not more or shown.count(",") == 11  # else there is room for all
