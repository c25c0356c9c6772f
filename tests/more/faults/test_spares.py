"""Jobs that lose one node each, every node in turn: all of them recover.

SPARES_RUNS=100 starts a hundred of them; by default there are eight.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from queue import Queue
from typing import TYPE_CHECKING

import pytest
from commands import require
from jobs import Job
from testbed import Cluster, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

pytestmark = pytest.mark.usefixtures("machine")

RUNS = int(os.environ.get("SPARES_RUNS", "8"))
AT_ONCE = 2  # jobs
LONGEST = 5  # seconds from the kill to the next round


@pytest.fixture(scope="module")
def lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[int], Future[float]]]:
    """Start jobs, two at a time, and kill something of one node of each."""
    require(missing())
    nodes = [f"jwb{number:04}" for number in range(1, 4 * AT_ONCE + 1)]
    free: Queue[tuple[str, ...]] = Queue()
    for first in range(0, len(nodes), 4):
        free.put(tuple(nodes[first : first + 4]))
    number = count()
    with Cluster(nodes) as cluster, ThreadPoolExecutor(AT_ONCE) as pool:

        def run(node: int, whole_node: bool) -> float:  # noqa: FBT001
            hosts, folder = free.get(), tmp_path_factory.mktemp(f"lost{next(number)}")
            job = Job(cluster, hosts, folder, "fork")
            try:
                return lose(job, node, whole_node=whole_node)
            finally:
                cluster.end(job.program)
                free.put(hosts)

        started = [
            pool.submit(run, turn % 4, bool(turn // 4 % 2)) for turn in range(RUNS)
        ]
        yield started.__getitem__


def lose(job: Job, node: int, *, whole_node: bool) -> float:
    """Kill a node's agent, or all that runs there; return when all train again."""
    job.start("--max-restarts=1")
    time.sleep(random.random())  # noqa: S311
    agent = job.agents()[node]
    if whole_node:
        job.kill(node)
    else:
        agent.kill()
    seconds = 0.0
    expected = [*job.hosts[:3]]
    if node < 3:
        expected[node] = job.hosts[3]
        seconds = job.wait(partial(job.trains, 1), 30)
    else:
        time.sleep(2)
        assert job.trains(0)
    assert job.places() == tuple(expected), job.output()
    (job.folder / "stop").touch()
    job.end(30)
    codes = [code for each, code in enumerate(job.codes()) if each != node]
    assert codes == [0, 0, 0], job.output()
    assert "Traceback" not in job.output(), job.output()
    return seconds


@pytest.mark.parametrize("turn", range(RUNS))
def test_a_job_outlives_each_of_its_nodes(
    turn: int, lost: Callable[[int], Future[float]]
) -> None:
    seconds = lost(turn).result()
    print(f"{seconds:.2f} s")
    assert seconds < LONGEST
