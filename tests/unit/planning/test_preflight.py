"""What a process shows: the name by which its site is recognised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.juelich import step
from torchrun_hpc.preflight import Preflight

STEP = step(1)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (None, "login1"),
        (STEP, STEP.nodes[0]),  # also on the second node
        (replace(STEP, nodes=("", "n2")), "n2"),
        (replace(STEP, nodes=("", ""), hostname="n7"), "n7"),
    ],
)
def test_a_site_is_recognised_by_what_all_nodes_know(job, expected):
    assert Preflight(job, None, {}, "login1", "").site_host == expected
