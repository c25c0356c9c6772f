from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_hpc.errors import LaunchError, Message, choices, count, ranges
from torchrun_hpc.host.topology import parse_cpus


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


def test_the_text_of_an_error_is_without_code():
    """Who prints it puts the code in front."""
    error = LaunchError("HPC061", "text", everywhere=True)
    assert (error.code, str(error), error.everywhere) == ("HPC061", "text", True)
    assert not LaunchError("HPC061", "text").everywhere
    assert str(Message("HPC061", "text")) == "HPC061 text"


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


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_ranks_can_be_read_again(ranks, random):
    shuffled = sorted(ranks)
    random.shuffle(shuffled)
    shown, _, rest = ranges(shuffled).partition(" and ")
    more = int(rest.removesuffix(" more") or 0)
    found = sorted(parse_cpus(shown))
    assert found == sorted(ranks)[: len(found)]
    assert len(found) + more == len(ranks)
    assert shown.count(",") < 12
    assert not more or shown.count(",") == 11  # else there is room for all
