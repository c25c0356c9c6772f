"""What a person reads about failures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from loopback import worker_failure
from plans import planned
from raised import CAUSE
from waiting import NEVER_S, PATIENCE

from torchrun_hpc.failures import report
from torchrun_hpc.failures.collection import Summary
from torchrun_hpc.failures.report import LocalReport
from torchrun_hpc.failures.watch import Attempt

MEETING = planned().meeting
LAST = Attempt(1, 0)
LINES = ("Traceback (most recent call last):", CAUSE)
FIRST = worker_failure(5, cause=CAUSE, lines=LINES)
HEAD = (
    r"torchrun_hpc: error: HPC125 the job has failed: worker 5 on jwb0002 \(node 1\) "
    r"ended with exit code 1 \(local rank 1, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
)


def written(capsys, summary, meeting=MEETING):
    report.write(summary, meeting)
    return capsys.readouterr().err.splitlines()


def test_the_first_failure_alone(capsys):
    head, *rest = written(capsys, Summary(FIRST))
    assert re.fullmatch(HEAD + r"\)", head)
    assert rest == [f"    {line}" for line in FIRST.lines]


def test_where_the_rest_is(capsys):
    failure = replace(FIRST, log="/logs/3", lines=(), unread="it is a terminal")
    head, line = written(capsys, Summary(failure))
    assert re.fullmatch(HEAD + r", log file /logs/3\)", head)
    assert line == "torchrun_hpc:     its stderr is in the output: it is a terminal"


def test_others(capsys):
    summary = Summary(
        FIRST,
        alike=(1,),
        others=(("KeyError: 1", (0, 2, 4)), ("OSError", (5,))),
        unlisted=1,
    )
    assert written(capsys, summary)[3:] == [
        "torchrun_hpc:     the same on 1 other rank: 1",
        "torchrun_hpc:     ranks 0,2,4 of 12: KeyError: 1",
        "torchrun_hpc:     rank 5 of 12: OSError",
        "torchrun_hpc:     and 1 other rank for other reasons",
    ]


def test_in_one_line():
    where = "worker 5 on jwb0002 (node 1)"
    assert report.cause_of(FIRST, MEETING) == f"{where} ended with exit code 1: {CAUSE}"
    killed = replace(FIRST, code=-11, cause="")
    assert report.cause_of(killed, MEETING) == f"{where} was killed by SIGSEGV (11)"
    alone = report.cause_of(FIRST, planned(job=None).meeting)
    assert alone == f"worker 5 ended with exit code 1: {CAUSE}"


# --- without a coordinator ------------------------------------------------------------


def lines_of(capsys):
    return [line[:60] for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr(report, "COLLECT_TIMEOUT", NEVER_S)
    return LocalReport(MEETING)


def test_failures_of_one_node_are_one_report(local, capsys):
    local.add(FIRST, LAST)
    local.add(replace(FIRST, rank=2), LAST)
    assert lines_of(capsys) == []
    last = local.end()
    assert str(last).endswith("exit code 1: ValueError: bad batch 17")
    assert len(lines_of(capsys)) == 4
    assert local.end() == last
    assert lines_of(capsys) == []


def test_the_last_line_is_of_the_same_failure_as_the_report(local, capsys, monkeypatch):
    """What comes later follows from it, whatever it looks like."""
    cause = "TimeoutError: timed out reading shard 12"
    timeout = replace(FIRST, cause=cause, lines=(cause,))
    monkeypatch.setattr(report, "COLLECT_TIMEOUT", 0)
    local.add(timeout, LAST)
    local._timer.join(PATIENCE)
    assert "timed out" in capsys.readouterr().err
    local.add(replace(FIRST, rank=0, code=-9, cause=""), LAST)
    assert str(local.end()).endswith("timed out reading shard 12")


def test_restarts_are_one_line_each(local, capsys):
    for number, left in ((1, 2), (3, 2)):  # others may have come between
        local.add(FIRST, Attempt(number, left))
        local.add(replace(FIRST, rank=4), Attempt(number, left))
    assert local.end() is None
    assert lines_of(capsys) == [
        "torchrun_hpc: HPC128 restart 1 of all workers: worker 5 on j",
        "torchrun_hpc: HPC128 restart 2 of all workers: worker 5 on j",
    ]


def test_the_report_is_of_the_last_round(local, capsys):
    local.add(FIRST, Attempt(1, 1))
    local.add(replace(FIRST, rank=3, cause="KeyError: 1"), Attempt(2, 0))
    assert str(local.end()).endswith("KeyError: 1")
    assert "HPC128" in capsys.readouterr().err
