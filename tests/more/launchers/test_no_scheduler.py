"""Machines without a scheduler: the static rendezvous, one machine, and no endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import ENVIRON, HPC, WORLD, column, own_lines, read_workers
from launchers import type_on_each

if TYPE_CHECKING:
    from testbed import Cluster


def test_the_static_rendezvous(bare: Cluster) -> None:
    options = ("--node_rank={node}", "--master_addr=10.20.0.1", "--master_port=1234")
    output, errors = type_on_each(bare, *options, "--nproc_per_node=2", WORLD)
    seen = read_workers(output)
    assert [worker["RANK"] for worker in seen] == ["0", "1", "2", "3"], output
    assert {worker["GLOO_SOCKET_IFNAME"] for worker in seen} == {"ib0"}
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.20.0.1"}
    (line,) = own_lines(errors)
    assert "2 nodes, 2 workers on this one, no scheduler" in line


def test_nothing_typed_is_one_node(bare: Cluster) -> None:
    done = bare.run([*HPC, "--nproc_per_node=2", WORLD], host="n9", env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "RANK", "WORLD_SIZE", "MASTER_ADDR") == [
        ("0", "2", "127.0.0.1"),
        ("1", "2", "127.0.0.1"),
    ]


def test_no_head_is_typed(bare: Cluster) -> None:
    done = bare.run([*HPC, "--nnodes=2", WORLD], host="n9", env=ENVIRON)
    assert done.returncode == 2
    assert "HPC066" in done.stderr
