"""Variables of a launcher, and the messages where they cannot be read."""

from __future__ import annotations

import pytest

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.schedulers.detector import Variables, read_layout
from torchrun_hpc.schedulers.job import Task

ENVIRON = {"A": "", "B": "7", "C": "x", "D": "9" * 300, "E": "0"}
VARIABLES = Variables(ENVIRON, "Grid Engine", "SGE_*")


def test_the_first_that_is_set_counts():
    assert VARIABLES.first("A", "B", "C") == "7"
    assert VARIABLES.name("A", "B", "C") == "B"
    assert VARIABLES.integer("A", "B", "C") == 7
    assert VARIABLES.first("A", "missing") == ""
    assert VARIABLES.integer_or_zero("A", "missing") == 0
    layout = read_layout(VARIABLES, ("B", "B", "E", "A", "B"), {"nodes": "N"}, nodes=2)
    assert (layout.task, layout.nodes) == (Task(7, 7, 0, 7), 2)
    sources = {"task": "B", "tasks": "B", "local_rank": "E", "local_size": "B"}
    assert layout.provenance == sources | {"nodes": "N"}


def test_shown():
    assert VARIABLES.shown("A", "B") == "B='7'"
    assert VARIABLES.shown("A") == "A=''"
    assert VARIABLES.shown("D") == f"D='{'9' * 200}...'"


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("A", "HPC020", "A is not set, but other variables show that Grid Engine"),
        ("C", "HPC021", "C='x' is not a whole number"),
        ("D", "HPC021", "D='999"),
    ],
)
def test_what_cannot_be_read_is_the_same_on_all_nodes(name, code, message):
    with pytest.raises(LaunchError, match=f"^{message}") as caught:
        VARIABLES.integer(name)
    assert (caught.value.code, caught.value.everywhere) == (code, True)
