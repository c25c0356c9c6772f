"""Machines without a scheduler: a user types the same line on each."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import ENVIRON, HPC, WORLD, column, own_lines
from tests.support.cluster.mpi import type_on_each


@pytest.mark.parametrize(
    "options",
    [
        "--rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=n9i:1234",
        "--node_rank=0 --master_addr=10.20.0.1 --master_port=1234",
    ],
    ids=["c10d", "static"],
)
def test_one_world(bare, options):
    """With stock torchrun, no machine believes that n9i is its own name."""
    line = f"{' '.join(HPC)} --nnodes=2 {options} --nproc_per_node=2 {WORLD}"
    printed, errors = type_on_each(bare, line, env=ENVIRON)
    assert column("".join(printed), "RANK", "GLOO_SOCKET_IFNAME", "MASTER_ADDR") == [
        (str(rank), "ib0", "10.20.0.1") for rank in range(4)
    ], (printed, errors)
    (line,) = own_lines(errors)
    assert "2 nodes, 2 workers here; no scheduler" in line
