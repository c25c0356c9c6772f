"""A job with a spare outlives one of its nodes."""

from __future__ import annotations

import pytest
from commands import column, launch, lines
from faults import FAULTS
from faults_page import check, do
from jobs import Job
from testbed import Cluster

NODES = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


@pytest.mark.usefixtures("machine")
def test_node_killed(tmp_path):
    name = "spare_node_killed"
    with Cluster(NODES) as cluster:
        check(do([name], Job(cluster, NODES, tmp_path, FAULTS[name].form)))


def test_a_node_that_is_not_well(unpadded):
    """It is out before the first round, and the spare has its place."""
    command = "echo GPU 3 is missing; test $(hostname) != n10"
    options = ("--hpc-spares=1", f"--hpc-health-check={command}")
    done = launch(unpadded, *options, nodes=3)
    assert column(done, "RANK", "WORLD_SIZE", "host") == [
        ("0", "2", "n9"),
        ("1", "2", "n11"),
    ], done.stderr
    reason = "its health check ended with exit code 1: GPU 3 is missing"
    (line,) = [line for line in lines(done.stderr) if "HPC208" in line]
    assert line.endswith(f"HPC208 n10 (node 1) is out: {reason}"), done.stderr
