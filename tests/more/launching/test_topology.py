"""Where other tasks of a launch may run: they are real processes."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest
from waiting import NEVER_S, until

from torchrun_hpc.launching import topology

FIRST = min(os.sched_getaffinity(0))
BOTH = sorted(os.sched_getaffinity(0))


def is_there(task):
    """Return whether a task does what it is to do: a process of it sleeps."""
    mine = [task, *task.children(recursive=True)]
    return any(process.name() == "sleep" for process in mine)


def found_by_task_0(*others):
    """Start tasks with these command lines; return what a first one finds of them."""
    environ = {"TASK": "0", "LAUNCH": str(os.getpid())}
    started = [
        subprocess.Popen(
            ["sh", "-c", line.replace("sleep", f"sleep {NEVER_S}")],
            env={**os.environ, **environ, "TASK": str(rank)},
            start_new_session=True,
        )
        for rank, line in enumerate(others, 1)
    ]
    try:
        tasks = [psutil.Process(process.pid) for process in started]
        until(lambda: all(map(is_there, tasks)))
        masks = topology.other_masks("TASK", ["LAUNCH"], environ, 3)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return sorted(sorted(mask) for mask in masks)


@pytest.mark.skipif(len(BOTH) < 2, reason="masks that differ need two CPUs")
@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (["exec sleep", "exec sleep"], [BOTH, BOTH]),
        ([f"exec taskset -c {FIRST} sleep", "exec sleep"], [[FIRST], BOTH]),
        # a wrapper: its narrowest process counts
        ([f"taskset -c {FIRST} sleep; :", "sleep; :"], [[FIRST], BOTH]),
        # one that does not come
        (["exec sleep"], [BOTH]),
        # each started by a process of its own, as by ParaStation
        (["sh -c 'sleep; :'; :", "env sh -c 'sleep; :'; :"], [BOTH, BOTH]),
        # a task of another launch, which has ranks of its own
        (["exec sleep", "LAUNCH=2 exec sleep"], [BOTH]),
    ],
)
def test_masks_of_other_tasks(others, expected, monkeypatch):
    monkeypatch.setattr(topology, "_START_TIMEOUT", 0.0)  # all are there
    assert found_by_task_0(*others) == sorted(expected)
