"""Other networks: IPv6 beside IPv4, and a fast one that no site rule knows."""

from __future__ import annotations

import pytest
from commands import (
    ALL_REDUCE,
    ENVIRON,
    FORMS,
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


def test_nodes_with_both_kinds_of_addresses() -> None:
    """IPv4 counts more, unless an IPv6 address is typed."""
    with Cluster(("jwb0001", "jwb0002"), ipv6=True) as cluster:
        tasks = cluster.srun("-N2", "--ntasks-per-node=2", *HPC, WORLD, env=JUELICH)
        options = (*HPC, "--rdzv_endpoint=[fd20::1]:29400", ALL_REDUCE)
        agents = cluster.srun(
            "-N2", ONE_TASK, *options, env=JUELICH | FORMS["fork"]
        )  # fmt: skip
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    for done in tasks, agents:
        assert done.returncode == 0, done.stderr
        assert len(lines(done.stderr)) == 1, done.stderr
    assert column(read_workers(tasks), *names) == [("10.20.0.1", "ib0")] * 4, (
        tasks.stdout
    )
    assert (
        column(read_workers(agents), *names, "total") == [("fd20::1", "ib0", 1)] * 2
    ), agents.stdout


def test_a_network_that_nccl_does_not_prefer() -> None:
    with Cluster(("nid2", "nid10"), fast="hsn0", management="open") as cluster:
        done = cluster.srun(
            "-N2", ONE_TASK, *HPC, "--rdzv_endpoint=nid2i", WORLD, env=ENVIRON
        )
    assert done.returncode == 0, done.stderr
    assert column(
        read_workers(done), "host", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    ) == [(host, "hsn0", "=hsn0") for host in ("nid2", "nid10")]


def test_an_interface_that_is_down(juelich: Cluster) -> None:
    """The first cause is named, where it is: not what follows from it elsewhere."""
    cluster = juelich
    cluster.run(["ip", "link", "set", "ib0", "down"], host="jwb0002", check=True)
    try:
        done = cluster.srun(
            "-N2", "--nodelist=jwb0001,jwb0002", ONE_TASK, "--label", *HPC,
            "--rdzv-conf=join_timeout=12", WORLD, env=JUELICH,
        )  # fmt: skip
    finally:
        cluster.run(["ip", "link", "set", "ib0", "up"], host="jwb0002", check=True)
    assert done.returncode == 1, done.stderr
    down = "interface ib0, which has 10.20.0.2, is down"
    own = [line for line in own_lines(done.stderr) if line.startswith("1: ")]
    assert len(own) == 2, done.stderr
    assert f"HPC165 {down}" in own[0]
    assert "HPC112" in own[1]
    assert own[1].endswith(f": {down}")
    assert "port " not in own[1]
    # On a busy machine, the time may be up before it says that it waits.
    waits = [line for line in done.stderr.splitlines() if "1: " in line[:3]]
    waits = [line for line in waits if "HPC113" in line]
    assert all(line.endswith(f" s: {down}") for line in waits), done.stderr
