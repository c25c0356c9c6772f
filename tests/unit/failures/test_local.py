"""What one node knows of the end of a world that torch's own rendezvous serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.patience import NEVER_S, PATIENCE
from tests.support.plans import planned
from tests.support.raised import CAUSE
from tests.support.simulated_job import worker_failure
from torchrun_hpc import limits
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, WorkerPart
from torchrun_hpc.failures.report import LocalWorld
from torchrun_hpc.failures.watch import Attempt

MEETING = planned().meeting
LAST = Attempt(1, 0)
LINES = ("Traceback (most recent call last):", CAUSE)
FIRST = worker_failure(5, text=CAUSE, lines=LINES)
TORCHS = Failure(Kind.WORKER, code=1, worker=WorkerPart(2))  # what torch says


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", NEVER_S)
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", NEVER_S)
    return LocalWorld(MEETING, unexplained)


def unexplained(failure):
    return failure, ()


def of(rank, text, **changes):
    """Return how another worker failed, on the same node."""
    return worker_failure(rank, node=1, text=text, **changes)


def test_failures_of_one_node_are_one_report(local, capsys):
    local.worker_failed(FIRST, LAST)
    local.worker_failed(of(2, CAUSE), LAST)
    assert lines_of(capsys) == []
    local.give_up(TORCHS)
    assert local.failure == FIRST
    assert len(lines_of(capsys)) == 4
    local.leave()
    assert lines_of(capsys) == []


def test_the_last_line_is_of_the_same_failure_as_the_report(local, capsys, monkeypatch):
    """What comes later follows from it, whatever it looks like."""
    lost = of(5, "RuntimeError: Connection closed by peer")
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", 0)
    local.worker_failed(lost, LAST)
    local._timer.join(PATIENCE)
    assert "worker 5" in capsys.readouterr().err
    local.worker_failed(of(0, "", code=-9), LAST)
    local.give_up(TORCHS)
    assert local.failure == lost


def test_restarts_are_one_line_each(local, capsys):
    for number, left in ((1, 2), (3, 2)):  # others may have come between
        local.worker_failed(FIRST, Attempt(number, left))
        local.worker_failed(of(4, CAUSE), Attempt(number, left))
    local.leave()
    assert (local.failure, local.restarts) == (None, 2)
    start = "torchrun_hpc: note[HPC128]: restart "
    lines = lines_of(capsys)
    assert [line.startswith(f"{start}{n}") for n, line in enumerate(lines, 1)] == [
        True
    ] * 2


def test_the_report_is_of_the_last_round(local, capsys):
    local.worker_failed(FIRST, Attempt(1, 1))
    local.worker_failed(of(3, "KeyError: 1"), Attempt(2, 0))
    local.give_up(TORCHS)
    assert local.failure.text == "KeyError: 1"
    assert "HPC128" in capsys.readouterr().err


def test_what_else_ends_a_launch(local, capsys):
    """A job that is to stop is not one whose script has failed."""
    local.worker_failed(of(5, "", code=-15), LAST)
    local.give_up(Failure(Kind.SIGNAL, code=15))
    own = MEETING.node_rank
    assert local.failure == Failure(Kind.SIGNAL, (own,), code=15)
    assert "worker 5" in capsys.readouterr().err


def test_a_worker_that_nobody_has_watched(local, capsys):
    own = MEETING.node_rank
    local.give_up(TORCHS)
    assert local.failure == replace(TORCHS, nodes=(own,))
    assert lines_of(capsys) == []


def test_the_cause_is_known_after_its_consequence(monkeypatch, capsys):
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", 0)
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", NEVER_S)
    local = LocalWorld(MEETING, unexplained)
    local.worker_failed(of(0, "RuntimeError: Connection closed by peer"), LAST)
    local.worker_failed(FIRST, LAST)
    assert lines_of(capsys) == []
    local.give_up(TORCHS)
    assert local.failure == FIRST
    assert "worker 5" in lines_of(capsys)[0]


def test_a_hang_is_explained_once(monkeypatch, capsys):
    monkeypatch.setattr(limits, "COLLECT_TIMEOUT", NEVER_S)
    monkeypatch.setattr(limits, "COLLECT_CAUSE_TIMEOUT", NEVER_S)

    def explain(hang):
        return replace(hang, absent="rank 3 was late"), ["7 of 8 ranks: here"]

    local = LocalWorld(MEETING, explain)
    hang = of(2, "RuntimeError: Timed out waiting 9ms for recv operation", lines=LINES)
    local.worker_failed(hang, LAST)
    local.give_up(TORCHS)
    local.leave()
    lines = lines_of(capsys)
    assert lines[1:] == [
        *(f"    {line}" for line in LINES),
        "torchrun_hpc:     7 of 8 ranks: here",
    ]
    assert local.failure is not None
    assert report.sentence(local.failure, MEETING) == "rank 3 was late"
