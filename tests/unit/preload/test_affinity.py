"""CPUs are given to a thread, and to what it starts."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrun_hpc.planning.workers import Share
from torchrun_hpc.preload import worker

ALL = os.sched_getaffinity(0)
LAST = Share((max(ALL),), "", "")
OFFLINE = Share((4000,), "", "")  # as one that has gone offline


def of_what_is_started():
    """Return where a new thread may run: processes inherit the same from a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(os.sched_getaffinity, 0).result()


@pytest.fixture
def other_thread():
    """Return a function that tells where a thread from before the test may run."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.getpid).result()
        yield lambda: pool.submit(os.sched_getaffinity, 0).result()


@pytest.fixture(autouse=True)
def _all_again():
    yield
    os.sched_setaffinity(0, ALL)


def test_what_is_started_meanwhile(other_thread):
    with worker.bound(LAST, "worker"):
        assert of_what_is_started() == set(LAST.cpus)
    assert os.sched_getaffinity(0) == ALL
    assert of_what_is_started() == ALL
    assert other_thread() == ALL


def test_an_error_meanwhile():
    with pytest.raises(ZeroDivisionError), worker.bound(LAST, "worker"):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == ALL


@pytest.fixture
def _no_import(monkeypatch):
    monkeypatch.setattr(worker, "chosen_by_import", set())


@pytest.mark.usefixtures("_no_import")
def test_an_import_that_binds_its_thread():
    with worker.restored_after_import():
        os.sched_setaffinity(0, LAST.cpus)
    assert os.sched_getaffinity(0) == ALL
    assert worker.chosen_by_import == (set(LAST.cpus) if len(ALL) > 1 else set())


@pytest.mark.usefixtures("_no_import")
def test_an_import_that_binds_nothing():
    os.sched_setaffinity(0, LAST.cpus)
    with worker.restored_after_import():
        pass
    assert os.sched_getaffinity(0) == set(LAST.cpus)
    assert not worker.chosen_by_import


def test_cpus_that_are_offline(capsys):
    with worker.bound(OFFLINE, "the worker of local rank 1"):
        assert of_what_is_started() == ALL
    assert capsys.readouterr().err == (
        "torchrun_hpc: warning[HPC223]: the worker of local rank 1 on "
        f"{socket.gethostname()} is not bound to CPUs 4000: this job has none of "
        "them now (Invalid argument)\n"
    )


def test_some_that_are_offline(capsys):
    with worker.bound(Share((max(ALL), 4000), "", ""), "worker"):
        assert os.sched_getaffinity(0) == {max(ALL)}
    assert not capsys.readouterr().err
