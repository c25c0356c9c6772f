from __future__ import annotations

import pytest

from torchrun_hpc.errors import LaunchError, Message, choices, count


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
