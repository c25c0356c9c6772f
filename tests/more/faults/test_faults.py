"""All faults of `faults` but those of the core, and the page that comes from them.

All jobs run side by side, each on nodes of its own, and most of the time wait.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from tests.support.cluster.faults import FAULTS, chains
from tests.support.cluster.testbed import Cluster
from tests.support.cluster.training_job import TrainingJob
from tests.support.pages.faults_page import TITLES, WRITES, check, do, sections

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.xdist_group("faults")]

# They are started in this order; those that wait for a silent node take longest.
JOBS = [
    tuple(names)
    for names in sorted(
        chains(is_core=False),
        key=lambda names: "cut_off" not in str(names) and "suspended" not in str(names),
    )
]
SPARE_NODES = 8  # for faults that are tried once more


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """Start all jobs that are asked for.

    A job that is asked for twice, as by ``--reruns``, starts again on other nodes.
    """
    wanted: list[Any] = [
        item.callspec.params["names"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_faults
    ]
    most = sum(FAULTS[names[0]].nodes for names in wanted) + SPARE_NODES
    nodes = [f"jwb{number:04}" for number in range(1, most + 1)]
    unused = iter(nodes)
    pool = ThreadPoolExecutor(most)
    with Cluster(nodes) as cluster:

        def start(names):
            first = FAULTS[names[0]]
            hosts = tuple(islice(unused, first.nodes))
            folder = tmp_path_factory.mktemp(names[0])
            job = TrainingJob(cluster, hosts, folder, first.form)
            return pool.submit(do, list(names), job)

        started = {names: start(names) for names in wanted}
        asked = set()

        def outcome(names):
            if names in asked:
                started[names] = start(names)
            asked.add(names)
            return started[names].result()

        try:
            yield outcome
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("names", JOBS, ids="+".join)
def test_faults(names, outcome):
    check(outcome(names))


def test_the_page_has_no_other_sections():
    assert WRITES or list(sections()) == TITLES
