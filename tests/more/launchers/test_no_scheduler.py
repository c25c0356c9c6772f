"""Machines without a scheduler: the same line, typed on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    HPC,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from waiting import PATIENCE

if TYPE_CHECKING:
    from testbed import Cluster


def type_on_each(bare: Cluster, *words: str) -> tuple[str, str]:
    """Type a line on two machines; ``{node}`` is 0 and 1. Return what they print."""
    programs = [
        bare.popen(
            [*HPC, "--nnodes=2", *(word.format(node=node) for word in words)],
            host=host,
            env=ENVIRON,
        )
        for node, host in enumerate(("n9", "n10"))
    ]
    outputs = [program.communicate(timeout=PATIENCE) for program in programs]
    errors = "".join(err for _, err in outputs)
    assert [program.returncode for program in programs] == [0, 0], errors
    return "".join(out for out, _ in outputs), errors


STATIC = ("--node_rank={node}", "--master_addr=10.20.0.1", "--master_port=1234")
C10D = ("--rdzv_backend=c10d", "--rdzv_id=7")


@pytest.mark.parametrize(
    ("words", "interface", "address"),
    [
        (STATIC, "ib0", "10.20.0.1"),
        (("--node_rank={node}", "--master_addr=n9"), "eth0", "n9"),
        # Stock torchrun: nobody believes to be the host of these.
        ((*C10D, "--rdzv_endpoint=n9i:1234"), "ib0", "10.20.0.1"),
        ((*C10D, "--rdzv_endpoint=10.20.0.1:1234"), "ib0", "10.20.0.1"),
        ((*C10D, "--rdzv_endpoint=n9:1234"), "eth0", "10.10.0.1"),
    ],
)
def test_typed_on_each_machine(
    bare: Cluster, words: tuple[str, ...], interface: str, address: str
) -> None:
    output, errors = type_on_each(bare, *words, "--nproc_per_node=2", WORLD)
    seen = read_workers(output)
    assert [worker["RANK"] for worker in seen] == ["0", "1", "2", "3"]
    assert {worker["GLOO_SOCKET_IFNAME"] for worker in seen} == {interface}
    assert {worker["MASTER_ADDR"] for worker in seen} == {address}
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
