"""A job with a spare outlives one of its nodes."""

from __future__ import annotations

import pytest
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
