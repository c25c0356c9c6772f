"""A rank that does not come to a collective is named, however it stays away."""

from __future__ import annotations

import hangs
import pytest

WITH_TWO_NODES = ("skipped", "order", "group", "overflow", "monitored", "gone", "shape")


def test_forks_on_two_nodes(juelich):
    hangs.run(juelich, WITH_TWO_NODES)


def test_forks_on_three_nodes(juelich):
    hangs.run(juelich, ("sleep", "loader", "gone"), nodes=3)


def test_workers_started_by_exec(juelich):
    hangs.run(juelich, ("sleep", "order", "gone"), form="exec")


@pytest.mark.parametrize("form", ["fork", "exec"])
def test_a_stopped_rank(juelich, form):
    hangs.run(juelich, ("stopped",), form=form)
