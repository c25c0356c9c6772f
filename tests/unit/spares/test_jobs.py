"""Whatever happens to its members, a job is one world, or ends on all of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from members import JOIN, KILL, SILENCE, Job

LEASE = SILENCE + KILL
ENOUGH = 6 * LEASE + 3 * JOIN  # seconds, in which a stable network comes to rest


def job_of(nodes, spares, seed=1):
    return Job(nodes, spares, random.Random(seed))  # noqa: S311 - no secret


def at_rest(job):
    """Let time pass until there is a world, or all have ended; return the world."""
    for _ in range(ENOUGH):
        job.tick()
        if job.world() is not None or job.has_ended():
            break
    return job.world()


@pytest.fixture
def job():
    made = job_of(4, 1)
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
    job.agents[lost].is_cut = True
    expected = [0, 1, 2]
    expected[lost] = 3
    for _ in range(3 * LEASE):
        job.tick()
    assert job.world() == tuple(expected)
    job.agents[lost].is_cut = False
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
    job = job_of(4, 1)
    job.kill(missing)
    expected = [0, 1, 2]
    expected[missing] = 3
    assert at_rest(job) == tuple(expected)


class AnyJob(RuleBasedStateMachine):
    """Members that are killed, cut off and suspended, at any time.

    The simulation itself sees that no round begins while workers of another run.
    """

    @initialize(
        seed=st.integers(0, 2**32),
        size=st.sampled_from([(2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)]),
    )
    def begin(self, seed, size):
        self.job = job_of(*size, seed)

    @rule(seconds=st.integers(1, 3 * LEASE))
    def pass_time(self, seconds):
        for _ in range(seconds):
            self.job.tick()

    @rule(number=st.integers(0, 6))
    def kill(self, number):
        self.job.kill(number % self.job.nodes)

    @rule(number=st.integers(0, 6), is_cut=st.booleans())
    def cut(self, number, is_cut):
        self.job.agents[number % self.job.nodes].is_cut = is_cut

    @rule(number=st.integers(0, 6), is_suspended=st.booleans())
    def suspend(self, number, is_suspended):
        self.job.agents[number % self.job.nodes].suspended = is_suspended

    @rule(one=st.integers(0, 6), other=st.integers(0, 6))
    def separate(self, one, other):
        self.job.separated.append({one % self.job.nodes, other % self.job.nodes})

    @rule()
    def join_again(self):
        self.job.separated.clear()

    @rule(number=st.integers(0, 6))
    def fail_a_worker(self, number):
        self.job.agents[number % self.job.nodes].worker_fails()

    def teardown(self):
        if not hasattr(self, "job"):
            return
        self.job.separated.clear()
        for agent in self.job.agents:
            agent.is_cut = agent.suspended = False
        for _ in range(3 * SILENCE):
            self.job.tick()  # what is lost may not have been noticed yet
        world = at_rest(self.job)
        if world is None:
            assert self.job.has_ended()
            return
        for _ in range(3 * SILENCE):
            self.job.tick()
        assert self.job.world() == world
        left = [a for a in self.job.agents if a.alive and a.ended is None]
        assert len({agent.member.follows for agent in left}) == 1


AnyJob.TestCase.settings = hypothesis_settings(
    max_examples=150, stateful_step_count=20, deadline=None
)
TestAnyJob = AnyJob.TestCase
