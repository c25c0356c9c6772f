"""A job with spares outlives its nodes."""

from __future__ import annotations

import pytest

from tests.support.cluster.faults import FAULTS
from tests.support.cluster.testbed import Cluster
from tests.support.cluster.training_job import TrainingJob
from tests.support.pages.faults_page import check, do


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "names",
    [("spare_node_killed",), ("spare_unhealthy", "spare_bad_node")],
    ids=["a node is killed", "a node is not well, and a worker fails twice"],
)
def test_a_spare_takes_the_place(names, tmp_path):
    first = FAULTS[names[0]]
    hosts = [f"jwb000{number}" for number in range(1, 1 + first.nodes)]
    with Cluster(hosts) as cluster:
        check(do([*names], TrainingJob(cluster, hosts, tmp_path, first.form)))
