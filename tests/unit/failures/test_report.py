"""What a person reads about failures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plans import planned
from waiting import NEVER_S, PATIENCE

from torchrun_hpc.failures import report
from torchrun_hpc.failures.collection import Summary, WorkerFailure
from torchrun_hpc.failures.report import LocalReport
from torchrun_hpc.failures.watch import Attempt

PLAN = planned()
LAST = Attempt(1, 0)
FIRST = WorkerFailure(
    rank=3,
    size=6,
    node=1,
    local_rank=1,
    code=1,
    time=0.0,
    cause="ValueError: bad batch 17",
    lines=("Traceback (most recent call last):", "ValueError: bad batch 17"),
)
HEAD = (
    r"torchrun_hpc: error: HPC125 the job has failed: worker 3 on jwb0002 \(node 1\) "
    r"ended with exit code 1 \(local rank 1, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
)


def written(capsys, summary, plan=PLAN):
    report.write(summary, plan)
    return capsys.readouterr().err.splitlines()


def test_the_first_failure_alone(capsys):
    head, *rest = written(capsys, Summary(FIRST))
    assert re.fullmatch(HEAD + r"\)", head)
    assert rest == [f"    {line}" for line in FIRST.lines]


def test_its_log_file(capsys):
    head, *_ = written(capsys, Summary(replace(FIRST, log="/logs/3")))
    assert re.fullmatch(HEAD + r", log file /logs/3\)", head)


def test_its_stderr_was_not_read(capsys):
    unread = replace(FIRST, cause="", lines=(), unread="it is a terminal")
    assert written(capsys, Summary(unread))[1:] == [
        "torchrun_hpc:     its stderr is in the output: it is a terminal"
    ]


def test_others(capsys):
    summary = Summary(
        FIRST,
        alike=(1,),
        others=(("KeyError: 1", (0, 2, 4)), ("OSError", (5,))),
        unlisted=1,
    )
    assert written(capsys, summary)[3:] == [
        "torchrun_hpc:     the same on 1 other rank: 1",
        "torchrun_hpc:     ranks 0,2,4 of 6: KeyError: 1",
        "torchrun_hpc:     rank 5 of 6: OSError",
        "torchrun_hpc:     and 1 other rank for other reasons",
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "worker 3 on jwb0002 (node 1) ended with exit code 1: ValueError: bad"),
        ({"code": -11, "cause": ""}, "worker 3 on jwb0002 (node 1) was killed by SIG"),
    ],
)
def test_in_one_line(changes, text):
    assert report.cause_of(replace(FIRST, **changes), PLAN).startswith(text)


def test_one_node_has_no_name():
    plan = planned(job=None)
    assert report.cause_of(FIRST, plan).startswith("worker 3 ended with exit code 1: ")


# --- without a coordinator ------------------------------------------------------------


def lines_of(capsys):
    return [line[:60] for line in capsys.readouterr().err.splitlines()]


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setattr(report, "COLLECT_TIMEOUT", NEVER_S)
    return LocalReport(PLAN)


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


def test_no_failure(local, capsys):
    assert local.end() is None
    assert lines_of(capsys) == []


def test_restarts_are_one_line_each(local, capsys):
    for number, left in ((1, 2), (3, 2)):  # others may have come between
        local.add(FIRST, Attempt(number, left))
        local.add(replace(FIRST, rank=4), Attempt(number, left))
    assert local.end() is None
    assert lines_of(capsys) == [
        "torchrun_hpc: HPC128 restart 1 of all workers: worker 3 on j",
        "torchrun_hpc: HPC128 restart 2 of all workers: worker 3 on j",
    ]


def test_the_report_is_of_the_last_round(local, capsys):
    local.add(FIRST, Attempt(1, 1))
    local.add(replace(FIRST, rank=5, cause="KeyError: 1"), Attempt(2, 0))
    assert str(local.end()).endswith("KeyError: 1")
    assert "HPC128" in capsys.readouterr().err
