"""Which failure was the first, and which others are equal to it."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import planned
from tests.support.simulated_job import worker_failure
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Collection, ending


def failure(rank, cause="ValueError: bad", code=1):
    """Return a failure; the worker of a higher rank failed later by its own clock."""
    return worker_failure(rank, text=cause, code=code, time=rank)


def summary_of(*failures):
    collection = Collection()
    for each in failures:
        collection.add(each)
    return collection.summary()


GLOO = "RuntimeError: Connection closed by peer [10.0.0.{}]:{}. This is typically"


@pytest.mark.parametrize(
    "cause",
    [
        GLOO.format(1, 2),
        "RuntimeError: Read error [::1]:4521: Connection reset by peer",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes",
        "DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "DistBackendError: NCCL error in: x.cpp:1, unhandled system error (run with",
        "The client socket has failed to connect to any network address of (n1, 2100).",
        "torch.distributed.DistNetworkError: recvVector failed on SocketImpl(fd=9)",
        "RuntimeError: Remote peer closed the connection",
        "torch.distributed.DistStoreError: wait timeout after 300000ms",
        "DistNetworkError: The client socket has timed out after 60000ms while trying",
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received",
    ],
)
def test_what_follows_from_another_failure_is_not_the_first(cause):
    killed = failure(2, "", -9)
    found = summary_of(failure(0, cause), killed)
    assert found.first == killed
    assert summary_of(failure(0, cause)).first.rank == 0


UNREAD = {"unread": "it is a terminal"}
RAISES = worker_failure(3, text="ValueError: bad")
CRASHES = worker_failure(3, code=-signal.SIGSEGV, **UNREAD)
KILLED = worker_failure(3, code=-signal.SIGKILL, **UNREAD)
EXITS = worker_failure(3, code=3, **UNREAD)
WAITED = worker_failure(3, text="TimeoutError: timed out reading shard 12")
REFUSED = worker_failure(3, text="ValueError: unknown key 'timeout' in config")
SILENT = worker_failure(2, **UNREAD)
DOUBTFUL = [
    SILENT,
    worker_failure(2, code=-signal.SIGABRT, **UNREAD),
    worker_failure(2, code=128 + signal.SIGABRT, **UNREAD),
    worker_failure(2, code=-signal.SIGTERM),
    worker_failure(2, text=GLOO.format(1, 2)),
    worker_failure(2, text="Timed out waiting 9ms for recv operation to complete"),
    worker_failure(2, text="Watchdog caught collective operation timeout", code=-6),
]


@pytest.mark.parametrize("cause", [RAISES, CRASHES, KILLED, EXITS, WAITED, REFUSED])
@pytest.mark.parametrize("other", DOUBTFUL)
def test_a_cause_is_named_first_whenever_it_comes(cause, other):
    assert not cause.is_doubtful
    assert other.is_doubtful
    assert summary_of(other, cause).first == summary_of(cause, other).first == cause


def test_without_a_cause_the_first_to_end_is_named():
    for first, later in itertools.permutations(DOUBTFUL, 2):
        assert later.worker is not None
        second = replace(later, worker=replace(later.worker, rank=9))
        assert summary_of(first, second).first == first


@pytest.mark.parametrize("other", DOUBTFUL)
def test_no_other_worker_can_be_the_cause(other):
    alone = replace(other, worker=replace(other.worker, rank=0, size=1))
    assert not alone.is_doubtful


def test_whoever_says_nothing_has_failed_if_it_was_read():
    assert not worker_failure(2).is_doubtful
    assert not worker_failure(2, code=-signal.SIGABRT).is_doubtful


_FAILURES = st.builds(
    worker_failure,
    st.integers(0, 11),
    text=st.sampled_from(
        ["", "ValueError: bad", GLOO.format(1, 2), "timed out", "Socket Timeout"]
    ),
    code=st.sampled_from([1, 3, 134, -6, -9, -11, -15]),
    unread=st.sampled_from(["", "it is a terminal"]),
)


@given(st.lists(_FAILURES, min_size=1, unique_by=lambda failure: failure.rank))
def test_the_first_one_and_the_sentence_agree(failures):
    first = summary_of(*failures).first
    causes = [failure for failure in failures if not failure.is_doubtful]
    assert first == [*causes, *failures][0]
    is_in_doubt = "first to end" in report.sentence(first, planned().meeting)
    assert is_in_doubt is (not causes)


@pytest.mark.parametrize(
    ("code", "cause", "was_stopped"),
    [
        (-15, "", True),
        (143, "", True),
        (-15, "KeyError: 1", False),
        (-9, "", False),
        (1, "", False),
    ],
)
def test_one_that_was_only_stopped(code, cause, was_stopped):
    assert failure(1, cause, code).was_stopped is was_stopped


def test_equal_ones_are_counted():
    found = summary_of(
        failure(3),
        failure(1, GLOO.format(1, 4711)),
        failure(5),
        failure(0, GLOO.format(2, 815)),
        failure(2),
    )
    assert found.first.rank == 3
    assert found.same_as_first == (2, 5)
    assert found.others == (("RuntimeError: Connection closed by peer", (0, 1)),)
    assert found.unlisted == 0


def test_a_worker_fails_once():
    found = summary_of(failure(3), failure(3, "another"))
    assert (found.first.text, found.same_as_first, found.others) == (
        "ValueError: bad",
        (),
        (),
    )


@pytest.mark.parametrize(
    ("causes", "listed"),
    [
        (("loss 1.5 at step 3", "loss 17.25 at step 4"), "loss #.# at step #"),
        (("at 0x7fff", "at 0xdead"), "at #"),
        (("KeyError: 1", "KeyError: 1"), "KeyError: 1"),
        (("", ""), "ended with exit code 1"),
        (("x" * 300, "x" * 300), "x" * 150 + " ..."),
    ],
)
def test_what_is_listed_of_others(causes, listed):
    others = (failure(rank, cause) for rank, cause in enumerate(causes, 1))
    assert summary_of(failure(0), *others).others == ((listed, (1, 2)),)


def test_without_a_cause_the_exit_code_says_what_is_equal():
    found = summary_of(*(failure(rank, "", code) for rank, code in ((0, 1), (1, -9))))
    assert found.others == (
        ("was killed by SIGKILL (9): probably out of memory", (1,)),
    )


def test_there_is_a_limit_to_what_is_listed():
    kinds = [failure(rank, "x" * rank) for rank in range(1, 10)]
    found = summary_of(failure(0), *kinds, failure(10, "xx"))
    assert len(found.others) == 5
    assert found.others[0] == ("xx", (2, 10))  # the most frequent one
    assert found.unlisted == 4


def test_another_round():
    collection = Collection()
    collection.add(failure(1))
    collection.clear()
    assert collection.summary() is None


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (255, "ended with exit code 255"),
        (-11, "was killed by SIGSEGV (11)"),
        (-34, "was killed by SIGRTMIN (34)"),
        (-40, "was killed by signal 40"),
        (-9, "was killed by SIGKILL (9): probably out of memory"),
    ],
)
def test_how_a_worker_ended(code, text):
    assert ending(code) == text
