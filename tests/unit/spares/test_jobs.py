"""Whatever happens to its members, a job is one world, or ends on all."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from members import JOIN, KILL, SILENCE, Job

ENOUGH = 2 * (SILENCE + KILL) + JOIN


def at_rest(job, seconds=ENOUGH):
    """Let time pass until there is a world, or all have ended."""
    for _ in range(seconds):
        job.tick()
        if job.world() is not None or job.has_ended():
            return


@pytest.fixture
def job():
    made = Job(4, 1, random.Random(1))
    at_rest(made)
    assert made.world() == (0, 1, 2)
    return made


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_spare_takes_the_place_of_a_member_that_is_killed(job, lost):
    job.kill(lost)
    at_rest(job)
    expected = [0, 1, 2]
    expected[lost] = 3
    assert job.world() == tuple(expected)


class AnyJob(RuleBasedStateMachine):
    """Members that are killed, cut off and suspended, at any time."""

    @initialize(
        seed=st.integers(0, 2**32),
        size=st.sampled_from([(2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)]),
    )
    def begin(self, seed, size):
        self.job = Job(*size, random.Random(seed))

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds):
        for _ in range(seconds):
            self.job.tick()

    @rule(number=st.integers(0, 6))
    def kill(self, number):
        if number < self.job.nodes:
            self.job.kill(number)

    @rule(number=st.integers(0, 6), is_cut=st.booleans())
    def cut(self, number, is_cut):
        if number < self.job.nodes:
            self.job.agents[number].is_cut = is_cut

    @rule(number=st.integers(0, 6), suspended=st.booleans())
    def suspend(self, number, suspended):
        if number < self.job.nodes:
            self.job.agents[number].suspended = suspended

    def teardown(self):
        if not hasattr(self, "job"):
            return
        for agent in self.job.agents:
            agent.is_cut = agent.suspended = False
        at_rest(self.job, 3 * ENOUGH)
        assert self.job.world() is not None or self.job.has_ended(), "\n".join(
            f"{a} alive={a.alive} workers={a.workers} ends={a.ends_in} ended={a.ended} link={a.link} ready={a.member.is_ready} co={a.standby.coordinator and vars(a.standby.coordinator)} rec={a.member.record}"
            for a in self.job.agents
        )


AnyJob.TestCase.settings = hypothesis_settings(
    max_examples=200, stateful_step_count=25, deadline=None
)
TestAnyJob = AnyJob.TestCase
