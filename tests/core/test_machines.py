"""Machines without a scheduler: the same line, typed on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import WORLD, own_lines, read_workers
from launchers import type_on_each

if TYPE_CHECKING:
    from testbed import Cluster


def test_the_endpoint_names_the_first_machine(bare: Cluster) -> None:
    """With stock torchrun, no machine believes that n9i is its own name."""
    options = ("--rdzv_backend=c10d", "--rdzv_id=7", "--rdzv_endpoint=n9i:1234")
    output, errors = type_on_each(bare, *options, "--nproc_per_node=2", WORLD)
    seen = read_workers(output)
    assert [worker["RANK"] for worker in seen] == ["0", "1", "2", "3"], output
    assert {worker["GLOO_SOCKET_IFNAME"] for worker in seen} == {"ib0"}
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    (line,) = own_lines(errors)
    assert "2 nodes, 2 workers on this one, no scheduler" in line
