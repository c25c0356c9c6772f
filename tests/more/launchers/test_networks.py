"""Other networks: IPv6 beside IPv4, and a fast one that no site rule knows."""

from __future__ import annotations

import pytest
from commands import (
    ALL_REDUCE,
    ENVIRON,
    HPC,
    JUELICH,
    ONE_TASK,
    WORLD,
    column,
    lines,
    own_lines,
    read_workers,
)
from testbed import Cluster

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize(
    ("options", "address"),
    [([], "10.20.0.1"), (["--rdzv_endpoint=[fd20::1]:29400"], "fd20::1")],
)
def test_nodes_with_both_kinds_of_addresses(options: list[str], address: str) -> None:
    with Cluster(ipv6=True) as cluster:
        done = cluster.srun("-N3", ONE_TASK, *HPC, *options, ALL_REDUCE, env=JUELICH)
    assert done.returncode == 0, done.stderr
    assert (
        column(read_workers(done), "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "total")
        == [(address, "ib0", 3.0)] * 3
    )
    assert len(lines(done.stderr)) == 1, done.stderr


def test_a_network_that_nccl_does_not_prefer() -> None:
    with Cluster(("nid1", "nid2", "nid10"), fast="hsn0", management="open") as cluster:
        done = cluster.srun(
            "-N3", ONE_TASK, *HPC, "--rdzv_endpoint=nid1i", WORLD, env=ENVIRON
        )
    assert done.returncode == 0, done.stderr
    assert column(
        read_workers(done), "host", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    ) == [(host, "hsn0", "=hsn0") for host in ("nid1", "nid2", "nid10")]


def test_an_interface_that_is_down(juelich: Cluster) -> None:
    """The first cause is named, where it is: not what follows from it elsewhere."""
    cluster = juelich
    cluster.run(["ip", "link", "set", "ib0", "down"], host="jwb0002", check=True)
    try:
        done = cluster.srun(
            "-N3", ONE_TASK, "--label", *HPC, "--rdzv-conf=join_timeout=12", WORLD,
            env=JUELICH,
        )  # fmt: skip
    finally:
        cluster.run(["ip", "link", "set", "ib0", "up"], host="jwb0002", check=True)
    assert done.returncode == 1
    own = [line for line in own_lines(done.stderr) if line.startswith("1: ")]
    assert "HPC165 interface ib0, which has 10.20.0.2, is down" in own[0]
    assert own[1].endswith("for 10 s: interface ib0, which has 10.20.0.2, is down")
    assert "HPC112" in own[2]
    assert "port " not in own[1] + own[2]
