"""Whatever happens to its members, a job is one world, or ends on all of them."""

from __future__ import annotations

import pytest
import schedules
from members import Job
from schedules import LEASE, at_rest, play


@pytest.fixture
def job():
    made = Job(4, 1, seed=1)
    assert at_rest(made) == (0, 1, 2)
    return made


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_spare_takes_the_place_of_a_member_that_is_killed(job, lost):
    job.kill(lost)
    expected = [0, 1, 2]
    expected[lost] = 3
    assert at_rest(job) == tuple(expected)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_that_was_cut_off_is_a_spare_later(job, lost):
    schedules.cut(job, lost, 0, 0.5)
    expected = [0, 1, 2]
    expected[lost] = 3
    for _ in range(3 * LEASE):
        job.tick()
    assert job.world() == tuple(expected)
    schedules.heal(job, 0, 0, 0)
    for _ in range(LEASE):
        job.tick()
    assert job.world() == tuple(expected)
    job.kill(3)
    expected[lost] = lost
    assert at_rest(job) == tuple(expected)


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (0, 2)])
def test_two_that_are_killed_are_the_end(job, lost):
    for member in lost:
        job.kill(member)
    assert at_rest(job) is None
    assert job.has_ended()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_one_that_does_not_come_is_replaced(missing):
    job = Job(4, 1, seed=1)
    job.kill(missing)
    expected = [0, 1, 2]
    expected[missing] = 3
    assert at_rest(job) == tuple(expected)


# --- whatever happens -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_a_job_is_one_world_or_ends_whatever_happens(seed):
    play(seed)


# Schedules that show a fault which the code had, or could have.
FAULTS = {
    "a suspended member reads the reset of its connection before its tick": 412,
    "it reads that the round is over": 628,
    "it reads that the next round begins": 869,
    "the last member is unwell, and waits for the others forever": 646,
    "the lease is counted in ticks": 8,
    "the same, with a takeover": 50,
    "a reset is taken for the end of a process": 20,
    "the same, behind a firewall": 27,
    "a living process closes its connection as if it had ended": 709,
    "a record of a round that never began hides who may have workers": 104_305,
    "a coordinator notices late, after a pause, that all have left it": 148_812,
    "a coordinator loses its connection to itself, and follows another": 35_257,
    "a later round of a lower term hides one that may still begin": 1_014_294,
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_schedule_that_has_shown_a_fault(case):
    play(FAULTS[case])


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_coordinator_that_hears_nobody(seed):
    """A firewall rejects what it is sent: the others know at once, and it does not."""
    job = Job(4, 1, seed)
    assert at_rest(job) == (0, 1, 2)
    schedules.slow_down(job, 0, 1, 0)
    schedules.pass_time(job, 3 + seed % 5)
    schedules.reject(job, 0, 1, 0.9)
    schedules.pass_time(job, 3 * LEASE)
    assert job.world() == (3, 1, 2)


def both(one, other):
    return {(one, other), (other, one)}


@pytest.mark.parametrize("wait", [5, 11, 17, 23])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_coordinator_that_is_left_renews_leases_before_it_notices(wait, is_killed):
    """Its connections are reset. Then it and another active member are cut off, too.

    The member that takes over may be killed before its round has begun.
    """
    for seed in range(5):
        job = Job(5, 2 - is_killed, seed)
        assert at_rest(job) is not None
        left = (0, 1)
        others = (2, 3, 4)
        job.rejecting |= {(other, 0) for other in others}
        for other in others:
            job.cut |= both(1, other)
        schedules.pass_time(job, wait)
        job.cut |= both(*left)
        if is_killed:
            job.kill(2)
        schedules.pass_time(job, 5 * LEASE)
