"""CPUs are given to a thread, to what it starts, and to a process."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from torchrun_hpc.planning.topology import Share
from torchrun_hpc.worker import affinity

ALL = os.sched_getaffinity(0)
LAST = Share((max(ALL),), "", "")
OFFLINE = Share((4000,), "", "")  # as one that has gone offline


def of_what_is_started():
    """Return where a new thread may run: processes inherit the same from a thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def of_another_thread(release, started, found):
    started.set()
    release.wait()
    found.append(os.sched_getaffinity(0))


@pytest.fixture
def other_thread():
    """Return a function that ends another thread, and returns where it may run."""
    release, started, found = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=of_another_thread, args=(release, started, found))
    thread.start()
    started.wait()

    def end():
        release.set()
        thread.join()
        return found[-1]

    yield end
    end()


@pytest.fixture(autouse=True)
def _all_again():
    yield
    os.sched_setaffinity(0, ALL)


def test_what_is_started_meanwhile(other_thread):
    with affinity.bound(LAST, "worker"):
        assert of_what_is_started() == set(LAST.cpus)
    assert os.sched_getaffinity(0) == ALL
    assert of_what_is_started() == ALL
    assert other_thread() == ALL


def test_an_error_meanwhile():
    with pytest.raises(ZeroDivisionError), affinity.bound(LAST, "worker"):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == ALL


def test_cpus_that_are_offline(capsys):
    with affinity.bound(OFFLINE, "the worker of local rank 1"):
        assert of_what_is_started() == ALL
    assert capsys.readouterr().err == (
        "torchrun_hpc: warning: HPC223 the worker of local rank 1 on "
        f"{socket.gethostname()} is not bound to CPUs 4000, of which none is left to "
        "this job (Invalid argument)\n"
    )


def test_some_that_are_offline(capsys):
    with affinity.bound(Share((max(ALL), 4000), "", ""), "worker"):
        assert os.sched_getaffinity(0) == {max(ALL)}
    assert not capsys.readouterr().err


def test_all_threads_of_a_process(other_thread):
    affinity.bind_process(LAST, "task 3")
    assert os.sched_getaffinity(0) == set(LAST.cpus)
    assert other_thread() == set(LAST.cpus)


def test_a_process_whose_cpus_are_offline(other_thread, capsys):
    affinity.bind_process(OFFLINE, "task 3")
    assert os.sched_getaffinity(0) == ALL
    assert other_thread() == ALL
    assert (
        f"task 3 on {socket.gethostname()} is not bound to CPUs 4000"
        in capsys.readouterr().err
    )
