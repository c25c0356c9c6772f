"""Workers without progress are reported, once; others never."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.patience import NEVER_S, PATIENCE
from tests.support.plans import PLAN
from torchrun_hpc import limits
from torchrun_hpc.errors import Setting
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.workers import Preload, Workers
from torchrun_hpc.stacks import inspection
from torchrun_hpc.stacks.inspection import FORKS, FRAMES, STACKS, StallReport, limit_of
from torchrun_hpc.stacks.sampling import ENDED, WorkerStack

HOSTS = {0: "jwb0001", 1: "jwb0002"}
REDUCE = ("<module> train.py:12", "all_reduce c10d.py:9")
READ = ("<module> train.py:12", "read data.py:31")

WAITING = [WorkerStack(rank, rank // 2, REDUCE) for rank in range(4)]
ONE_READS = [*WAITING[:3], WorkerStack(3, 1, READ)]
NO_ANSWER = [*WAITING[:3], WorkerStack(3, 1, problem="py-spy did not answer")]
A_NODE_IS_MISSING: list[WorkerStack] = []  # as of Inspection

REPORT = [
    (
        "torchrun_hpc: warning[HPC171]: the stacks of 4 workers have not changed for "
        "10 s (--hpc-stall-report). The job continues:"
    ),
    "    4 ranks: <module> train.py:12",
    "      3 of 4 ranks (0-2): all_reduce c10d.py:9",
    "    * 1 rank (3, jwb0002): read data.py:31",
]


@pytest.fixture
def report(monkeypatch, capfd):
    """Return what is reported of such samples, where the limit is ten seconds.

    There is one in each second; the launch ends while one more of the last is
    collected. One that is an error is raised.
    """

    def report(*samples):
        rest, taken = list(samples), []

        def collect(_):
            taken.append(1)
            if not rest:
                made.end()
                return samples[-1] if samples else []
            sample = rest.pop(0)
            if isinstance(sample, Exception):
                raise sample
            return sample

        clock = SimpleNamespace(monotonic=lambda: float(len(taken)))
        monkeypatch.setattr(inspection, "time", clock)
        monkeypatch.setattr(limits, "SHORTEST_STALL_INTERVAL", 0)
        monkeypatch.setattr(limits, "LONGEST_STALL_INTERVAL", 0)  # no pause between two
        made = StallReport(10, FRAMES, collect, lambda: HOSTS)
        made.start()
        made._thread.join(PATIENCE)
        assert not made._thread.is_alive()
        return capfd.readouterr().err.splitlines()

    return report


# --- whether there is a report ------------------------------------------------------

PRELOADED = Preload(("torch",), Setting("torch", "--hpc-preload"))
BY_EXEC = Preload(("torch",), Setting("torch", "--hpc-preload"), problem="-X dev")


@pytest.mark.parametrize(
    ("asked", "preload", "hears_all", "expected"),
    [
        (None, PRELOADED, True, (1800, FORKS)),
        (None, PRELOADED, False, (0, FORKS)),
        (None, BY_EXEC, True, (0, FORKS)),
        (None, None, True, (0, FORKS)),
        *(
            (seconds, preload, hears_all, (seconds, FRAMES))
            for seconds in (0, 600)
            for preload in (PRELOADED, BY_EXEC, None)
            for hears_all in (True, False)
        ),
    ],
)
def test_when_a_stall_is_reported(asked, preload, hears_all, expected):
    plan = replace(
        PLAN, asked=Options(hpc_stall_report=asked), workers=Workers(preload=preload)
    )
    assert limit_of(plan, hears_all=hears_all) == expected


def test_what_it_asks(monkeypatch, capfd):
    """Its question until there is a stall, and then all that is reported."""
    asked, clock = [], itertools.count(step=10.0)

    def collect(question):
        asked.append(question)
        return NO_ANSWER if question == FORKS else ONE_READS

    monkeypatch.setattr(
        inspection, "time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    monkeypatch.setattr(limits, "LONGEST_STALL_INTERVAL", 0)
    monkeypatch.setattr(limits, "SHORTEST_STALL_INTERVAL", 0)
    made = StallReport(10, FORKS, collect, lambda: HOSTS)
    made.start()
    made._thread.join(PATIENCE)
    assert asked == [FORKS, FORKS, STACKS]
    assert capfd.readouterr().err.splitlines() == REPORT


# --- what is reported ---------------------------------------------------------------


@pytest.mark.parametrize("seconds", [11, 12, 100])
def test_the_same_stacks_are_reported_once(report, seconds):
    assert report(*[ONE_READS] * seconds) == REPORT


def test_what_was_before_does_not_count(report):
    assert report(*[WAITING] * 9, *[ONE_READS] * 11) == REPORT


# What comes between, after nine seconds and before nine others.
BETWEEN = {
    "a worker does something else": WAITING,
    "a worker is at another line": [
        *(*WAITING[:3], WorkerStack(3, 1, (*READ[:1], "read data.py:32"))),
    ],
    "a worker has no stack": NO_ANSWER,
    "a worker has ended": ONE_READS[:3],
    "all have ended": [],
    "a node is missing": A_NODE_IS_MISSING,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_it_begins_anew(report, name):
    half = [ONE_READS] * 9
    assert report(*half, BETWEEN[name], *half) == []
    assert report(*half, BETWEEN[name], *half, ONE_READS, ONE_READS) == REPORT


ALL_ENDED = [WorkerStack(rank, rank // 2, problem=ENDED) for rank in range(4)]


@pytest.mark.parametrize(
    "samples", [[WAITING, ONE_READS], [ONE_READS, NO_ANSWER], [[]], [ALL_ENDED]]
)
def test_workers_that_go_on_or_have_ended(report, samples):
    assert report(*samples * 50) == []


NOT_INSTALLED = [
    WorkerStack(rank, rank // 2, problem="py-spy is not installed", is_lasting=True)
    for rank in range(4)
]
TOO_SLOW = [
    WorkerStack(rank, rank // 2, problem="py-spy did not answer") for rank in range(4)
]


def test_it_says_once_that_nothing_can_be_seen(report):
    assert report(*[NOT_INSTALLED] * 100) == [
        (
            "torchrun_hpc: warning[HPC175]: --hpc-stall-report cannot "
            "report a stall: no stack from 4 ranks: py-spy is not installed"
        )
    ]


def test_nodes_that_were_too_busy_once_are_looked_at_again(report):
    """As where all workers import torch."""
    assert report(TOO_SLOW, *[ONE_READS] * 11) == REPORT


def test_a_worker_that_has_ended_is_part_of_it(report):
    """The others may wait for it."""
    samples = [*WAITING[:3], WorkerStack(3, 1, problem=ENDED)]
    lines = report(*[samples] * 12)
    assert lines[0] == REPORT[0]
    assert lines[-1] == f"    no stack from 1 rank (3, jwb0002): {ENDED}"


def test_the_end_of_the_workers_is_no_reason_to_say_something(report):
    """One has just ended when py-spy looks at it, and the agent has not seen it yet."""
    gone = "Failed to get process executable name. Check that the process is running."
    ending = [WorkerStack(0, 0, problem=ENDED), WorkerStack(1, 0, problem=gone)]
    assert report(*[WAITING] * 3, ending, []) == []


def test_workers_without_a_frame_of_python(report):
    """All of them have ended but for their C++."""
    found = report(*[[WorkerStack(rank, 0) for rank in (0, 1)]] * 12)
    assert found[1:] == ["    2 ranks: no Python frame"]


def test_a_look_that_fails_is_not_the_last_one(report):
    """As where no process can be started just now."""
    assert report(OSError(), RuntimeError(), *[ONE_READS] * 11) == REPORT


# --- the end --------------------------------------------------------------------------


def test_no_report_after_the_end(capfd, monkeypatch):
    """Whatever the pause between two looks."""
    monkeypatch.setattr(limits, "SHORTEST_STALL_INTERVAL", NEVER_S)
    monkeypatch.setattr(limits, "LONGEST_STALL_INTERVAL", NEVER_S)
    made = StallReport(1, FRAMES, lambda _: WAITING, lambda: HOSTS)
    made.start()
    made.end()
    made._thread.join(PATIENCE)
    assert not made._thread.is_alive()
    assert capfd.readouterr().err == ""


def test_no_report_of_what_is_still_collected_at_the_end(report):
    """The answers of other nodes take seconds; meanwhile the job is over."""
    assert report(*[ONE_READS] * 10) == []
    assert len(report(*[ONE_READS] * 11)) > 1


@pytest.mark.parametrize(
    ("seconds", "pause"),
    [(1, 0.5), (30, 0.5), (60, 1), (600, 10), (1800, 30), (86400, 30)],
)
def test_how_often_it_looks(monkeypatch, seconds, pause):
    pauses = []
    made = StallReport(seconds, FRAMES, lambda _: [], lambda: HOSTS)

    def wait(timeout):
        pauses.append(timeout)
        return True

    monkeypatch.setattr(made._ended, "wait", wait)
    made.start()
    made._thread.join(PATIENCE)
    assert pauses == [pause]
