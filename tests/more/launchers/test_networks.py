"""Other networks: IPv6 beside IPv4, and a fast one that no site rule knows."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import (
    ALL_REDUCE,
    FORMS,
    HPC,
    JUELICH,
    column,
    lines,
    own_lines,
    require,
)
from tests.support.cluster.mpi import OPENMPI_4, missing, once, run
from tests.support.cluster.real_job import launch
from tests.support.cluster.testbed import Cluster

pytestmark = pytest.mark.usefixtures("machine")

NAMES = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")


def test_nodes_with_both_kinds_of_addresses():
    """IPv4 counts more, unless an IPv6 address is explicit."""
    option, forks = "--rdzv_endpoint=[fd20::1]:29400", JUELICH | FORMS["fork"]
    with Cluster(("jwb0001", "jwb0002"), ipv6=True) as cluster:
        tasks = launch(cluster, tasks=2, environ=JUELICH)
        agents = launch(cluster, option, script=[ALL_REDUCE], environ=forks)
    assert column(tasks, *NAMES) == [("10.20.0.1", "ib0")] * 4
    assert column(agents, *NAMES, "total") == [("fd20::1", "ib0", 1)] * 2
    for done in tasks, agents:
        assert len(lines(done.stderr)) == 1


def test_a_network_that_nccl_does_not_prefer():
    """No site rule applies, and the explicit name says which network."""
    with Cluster(("nid2", "nid10"), fast="hsn0", management="open") as cluster:
        done = launch(cluster, "--rdzv_endpoint=nid2i")
    assert column(done, "host", *NAMES, "NCCL_SOCKET_IFNAME") == [
        (host, "10.20.0.1", "hsn0", "=hsn0") for host in ("nid2", "nid10")
    ]


def test_an_interface_that_is_down(juelich):
    """The first cause is named, where it is: not what follows from it elsewhere."""
    link = ["ip", "link", "set", "ib0"]
    juelich.run([*link, "down"], host="jwb0002", check=True)
    try:
        option = "--rdzv-conf=join_timeout=12"
        done = launch(juelich, option, srun=["--label"], environ=JUELICH)
    finally:
        juelich.run([*link, "up"], host="jwb0002", check=True)
    assert done.returncode == 1
    down = "interface ib0, which has 10.20.0.2, is down"
    own = [line for line in own_lines(done.stderr) if line.startswith("1: ")]
    assert len(own) == 2
    assert f"HPC165]: {down}" in own[0]
    assert "HPC112" in own[1]
    assert own[1].endswith(f": {down}")
    assert "port " not in own[1]
    # On a busy machine, the time may be up before it says that it waits.
    waits = [line for line in done.stderr.splitlines() if "1: " in line[:3]]
    waits = [line for line in waits if "HPC113" in line]
    assert all(line.endswith(f" s: {down}") for line in waits)


# Open MPI's own ports are open.
CLOSED = """
table inet closed {
chain closed {
type filter hook input priority 0;
iifname "eth0" tcp dport 20000-28999 drop
}
}
"""


def test_open_mpi_where_the_first_network_is_closed():
    """As on a PBS without tm: no node but the first has the names of the others."""
    require(missing(OPENMPI_4))
    hosts = ("dec0001", "dec0002", "dec0003")
    with Cluster(
        hosts, management="open", slurm=False, fast="hsn0", fast_names=str
    ) as cluster:
        for host in hosts:
            cluster.configure(host, "nft", "-f", "-", lines=[CLOSED])
        for tasks, options in ((3, once(OPENMPI_4)), (6, ["--map-by", "ppr:2:node"])):
            words = ("-np", str(tasks), *options, *HPC, ALL_REDUCE)
            done = run(cluster, OPENMPI_4, *words, hosts=hosts, on="dec0001")
            assert done.returncode == 0
            where = column(done, "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
            assert where == [("10.20.0.1", "hsn0")] * tasks
