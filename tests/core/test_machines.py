"""Machines without a scheduler: the same line, typed on each of them."""

from __future__ import annotations

import pytest
from commands import WORLD, column, own_lines
from launchers import type_on_each


@pytest.mark.parametrize(
    "options",
    [
        ("--rdzv_backend=c10d", "--rdzv_id=7", "--rdzv_endpoint=n9i:1234"),
        ("--node_rank={node}", "--master_addr=10.20.0.1", "--master_port=1234"),
    ],
    ids=["c10d", "static"],
)
def test_one_world(bare, options):
    """With stock torchrun, no machine believes that n9i is its own name."""
    output, errors = type_on_each(bare, *options, "--nproc_per_node=2", WORLD)
    assert column(output, "RANK", "GLOO_SOCKET_IFNAME", "MASTER_ADDR") == [
        (str(rank), "ib0", "10.20.0.1") for rank in range(4)
    ], output
    (line,) = own_lines(errors)
    assert "2 nodes, 2 workers on this one, no scheduler" in line
