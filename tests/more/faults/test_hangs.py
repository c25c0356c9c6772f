"""A rank that does not come to a collective is named, however it stays away."""

from __future__ import annotations

import pytest

from tests.support.cluster import hangs

WITH_TWO_NODES = (
    *("skipped", "order", "group", "overflow"),
    *("loader", "monitored", "gone", "shape"),
)


def test_forks_on_two_nodes(juelich):
    hangs.run(juelich, WITH_TWO_NODES)


def test_forks_on_three_nodes(juelich):
    """Their stderr is not read, because it is the same file as stdout."""
    hangs.run(juelich, ("sleep", "gone"), nodes=3, first="exec 1>&2")


def test_workers_started_by_exec(juelich):
    hangs.run(juelich, ("sleep", "order", "gone"), form="exec")


def test_a_dead_rank(juelich):
    """It is the first failure, and nothing more must be explained."""
    report = hangs.stderr_of(juelich, ["killed"])
    assert "worker 3 on jwb0002 (node 1) was killed by SIGKILL (9)" in report
    assert hangs.explained(report) == [[]]


@pytest.mark.parametrize("form", ["fork", "exec"])
def test_a_stopped_rank(juelich, form):
    hangs.run(juelich, ("stopped",), form=form)
