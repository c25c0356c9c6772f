"""All workers of a large job fail within a second: node 0's report is one screen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.loopback import (
    SETTINGS,
    STORE,
    coordinator_of,
    request_of,
    worker_failure,
)
from tests.support.plans import planned
from torchrun_hpc import wire
from torchrun_hpc.failures import report
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    LINE_LIMIT,
    Confirm,
    Died,
    Join,
    WantsReport,
    read_request,
)

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


def as_sent(message, kind=FROM_AGENT):
    """Return a message as it arrives, if it is short enough to be sent."""
    line = wire.to_line(wire.encode(message, kind))
    (arrived,) = wire.Lines(LINE_LIMIT).feed(line)
    assert wire.decode(kind, arrived) == message
    return wire.decode(kind, arrived)


def at_work():
    made = coordinator_of(replace(SETTINGS, nodes=NODES))
    for rank in range(NODES):
        made.request(rank, read_request(request_of(rank, nodes=NODES)))
        made.receive(rank, Join())
    for rank in range(NODES):
        store = STORE if rank == 0 else None
        made.receive(rank, as_sent(Confirm((0, 0), 0, store)))
    return made


@pytest.mark.parametrize("name", CAUSES)
def test_the_report_of_many_failures(name, capsys):
    coordinator = at_work()
    failures = [failure(rank, CAUSES[name](rank)) for rank in range(SIZE)]
    random.Random(0).shuffle(failures)  # noqa: S311
    known = set()  # as failures/watch.py: an agent sends the lines once
    for each in failures:
        is_known = (each.nodes, each.signature) in known
        known.add((each.nodes, each.signature))
        died = Died(each.brief if is_known else each, 0)
        coordinator.receive(each.nodes[0], as_sent(died))
    coordinator.receive(0, WantsReport())
    connection, message = coordinator.outbox[-1]
    assert connection == 0
    summary = as_sent(message, FROM_COORDINATOR).summary
    report.write(summary, planned().meeting)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) + 1 <= 40  # and the last line
    if name == "one, and all others follow":
        assert summary.first.rank == FIRST
        assert lines[-1].endswith(": RuntimeError: Connection closed by peer")
    if name == "all for the same reason":
        assert lines[-1].startswith("torchrun_hpc:     the same on ")
