"""All workers of a large job fail within a second: node 0's report is one screen."""

from __future__ import annotations

import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from loopback import STORE, wait_until
from plans import planned

from torchrun_hpc.failures import report
from torchrun_hpc.failures.collection import WorkerFailure

NODES, WORKERS = 512, 8
SIZE = NODES * WORKERS
FIRST = 1234
LIMIT = 60.0  # seconds, for so many on a busy machine
LINES = ("Traceback (most recent call last):", *["  File: " + "x" * 200] * 28, "E: 1")

CAUSES = {
    "all for the same reason": lambda _: "ModuleNotFoundError: No module named 'x'",
    "one, and all others follow": lambda rank: (
        "ValueError: bad batch 17"
        if rank == FIRST
        else f"RuntimeError: Connection closed by peer [10.0.0.1]:{rank}"
    ),
    "each for another reason": lambda rank: f"Error{'x' * rank}: no"[:200] + hex(rank),
}


@pytest.fixture
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def failure(rank, cause):
    return WorkerFailure(
        rank=rank,
        size=SIZE,
        node=rank // WORKERS,
        local_rank=rank % WORKERS,
        code=1,
        time=1.7e9,
        cause=cause,
        lines=LINES,
    )


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.usefixtures("many_files")
def test_the_report_of_many_failures(name, job, capsys):
    reports = []

    def take(event):
        if "report" in event:
            reports.append((time.monotonic(), event["report"]))

    job.start_server(nodes=NODES)
    where = {"timeout": LIMIT}
    made = [
        job.client(rank, nodes=NODES, where=where, on_event=take)
        for rank in range(NODES)
    ]
    with ThreadPoolExecutor(NODES) as pool:
        list(pool.map(lambda client: client.connect(), made))
        list(pool.map(lambda client: client.join(STORE), made))
    failures = [failure(rank, CAUSES[name](rank)) for rank in range(SIZE)]
    random.Random(0).shuffle(failures)  # noqa: S311
    # The report has what the coordinator received within a second: on a busy machine,
    # perhaps a hundred.
    first = next(n for n, each in enumerate(failures) if each.rank == FIRST)
    failures.insert(50, failures.pop(first))
    known = set()  # as failures/watch.py: an agent sends the lines once
    for number, each in enumerate(failures):
        if (each.node, each.likeness) in known:
            failures[number] = replace(each, lines=())
        known.add((each.node, each.likeness))
    start = time.monotonic()
    for each in failures:
        made[each.node].worker_failed(each)
    sent = time.monotonic() - start
    wait_until(lambda: reports, LIMIT)
    (when, summary) = reports[0]
    with capsys.disabled():
        print(f"all sent after {sent:.2f} s, reported after {when - start:.2f} s")
    report.write(summary, planned())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) + 1 <= 40  # and the last line
    if name == "one, and all others follow":
        assert summary.first.rank == FIRST
        assert lines[-1].endswith(": RuntimeError: Connection closed by peer")
    if name == "all for the same reason":
        assert lines[-1].startswith("torchrun_hpc:     the same on ")
