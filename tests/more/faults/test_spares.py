"""Jobs that lose one node each, at a random time: all of them recover.

SPARES_RUNS=100 starts a hundred of them; by default there are two. The other losses
are among those of `faults_with_spares`.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial

import pytest

from tests.support.cluster.commands import require
from tests.support.cluster.testbed import Cluster, missing
from tests.support.cluster.training_job import NEVER, TrainingJob

pytestmark = pytest.mark.xdist_group("spares")

RUNS = int(os.environ.get("SPARES_RUNS", "2"))
# The node, of which the last one is the spare, and whether all of it is lost.
LOST = [
    *((0, False), (2, True), (3, False)),
    *((1, False), (0, True), (2, False), (3, True), (1, True)),
]


@pytest.fixture(scope="module")
def cluster():
    require(missing())
    with Cluster([f"jwb{number:04}" for number in range(1, 5)]) as cluster:
        yield cluster


@pytest.mark.parametrize("turn", range(RUNS))
def test_a_job_outlives_each_of_its_nodes(turn, cluster, tmp_path):
    node, is_whole_node = LOST[turn % len(LOST)]
    job = TrainingJob(cluster, cluster.names, tmp_path, "fork")
    job.start(*NEVER, "--max-restarts=1")
    time.sleep(random.random())  # noqa: S311
    if is_whole_node:
        job.kill(node)
    else:
        job.signal(node, "SIGKILL")
    if node < 3:
        job.expected[node] = job.hosts[3]
        print(f"{job.wait(partial(job.trains, 1)):.2f} s")
    else:
        time.sleep(2)
        assert job.trains(0), job.output
    assert job.places() == job.expected, job.output
    job.ends_well(node)
