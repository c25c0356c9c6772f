"""All workers of a large job fail within a second: node 0's report is one screen."""

from __future__ import annotations

import random

import pytest

from tests.support.plans import planned
from tests.support.simulated_job import SimulatedJob, worker_failure
from torchrun_hpc.failures import report

NODES, WORKERS = 512, 8
SIZE = NODES * WORKERS
FIRST = 1234
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


def failure(rank, cause):
    return worker_failure(
        rank,
        size=SIZE,
        node=rank // WORKERS,
        local_rank=rank % WORKERS,
        text=cause,
        lines=LINES,
    )


@pytest.mark.parametrize("name", CAUSES)
def test_the_report_of_many_failures(name, capsys):
    job = SimulatedJob(nodes=NODES).at_work()
    failures = [failure(rank, CAUSES[name](rank)) for rank in range(SIZE)]
    random.Random(0).shuffle(failures)  # noqa: S311
    sent = set()  # as failures/watch.py: an agent sends the lines once
    for each in failures:
        is_sent = (each.nodes, each.signature) in sent
        sent.add((each.nodes, each.signature))
        job.died(each.brief if is_sent else each)
    summary = job.reported()
    report.write(summary, planned().meeting)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) + 1 <= 40  # and the last line
    if name == "one, and all others follow":
        assert summary.first.rank == FIRST
        assert lines[-1].endswith(": RuntimeError: Connection closed by peer")
    if name == "all for the same reason":
        assert lines[-1].startswith("torchrun_hpc:     the same on ")
