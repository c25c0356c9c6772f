"""What happens to nodes and their network, one by one; and 50 times, anything."""

from __future__ import annotations

import pytest

from tests.support.virtual_job import (
    FINISHED,
    JOIN,
    LEASE,
    Agent,
    VirtualJob,
    at_rest,
    at_work,
    cut,
    fail_a_worker,
    finish_everywhere,
    heal,
    kill,
    play,
    resume,
    suspend,
)
from tests.support.virtual_network import Network
from torchrun_hpc.failures.failure import Kind


def replaced(lost):
    """Return the active ones of three nodes after a loss, with one spare."""
    return tuple(3 if node == lost else node for node in range(3))


@pytest.fixture
def network():
    with Network(1) as network:
        yield network


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", [0, 1])
def test_a_spare_takes_the_place_of_a_node_that_is_killed(network, lost, how):
    job = at_work(network, 4, 1)
    kill(job, lost, share=how)
    assert at_rest(job) == replaced(lost)
    finish_everywhere(job)
    ends = {agent.ended for agent in job.agents if agent.number != lost}
    assert ends == {FINISHED}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_that_was_cut_off_is_a_spare_later(network, lost):
    job = at_work(network, 4, 1)
    cut(job, lost, share=0.5)
    network.run(3 * LEASE)
    assert job.world() == replaced(lost)
    heal(job)
    network.run(LEASE)
    assert job.world() == replaced(lost)
    kill(job, 3)
    assert at_rest(job) == (0, 1, 2)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("wait", [0, 0.6])
def test_one_that_is_suspended_while_its_workers_end(network, wait, is_host):
    """Its lease is over by then: they must not run on later."""
    job = at_work(network, 4, 1)
    job.delays = 1
    cut(job, 1, share=0.5)
    while not job.agents[1].client.state.is_over:
        network.run(0.1)
    network.run(wait)
    suspend(job, 1, share=0 if is_host else 1)
    network.run(3 * LEASE)
    assert max(job.worlds) == 1  # without it
    resume(job, 1)
    network.run(LEASE)
    assert job.world() == (0, 3, 2)


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (0, 2)])
def test_two_that_are_killed_are_the_end(network, lost):
    job = at_work(network, 4, 1)
    for node in lost:
        kill(job, node)
    assert at_rest(job) is None
    assert not job.alive


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_one_that_does_not_come_is_replaced(network, missing):
    job = VirtualJob(network, 4, 1, late=0)
    kill(job, missing)
    assert at_rest(job) == replaced(missing)


def test_a_failed_worker_restarts_a_job_without_spares(network):
    job = at_work(network, 3, 0)
    for number in (1, 2):
        fail_a_worker(job, number)
        assert at_rest(job) == (0, 1, 2)
        assert max(job.worlds) == number
    finish_everywhere(job)
    assert {agent.ended for agent in job.agents} == {FINISHED}


def test_the_last_failed_worker_ends_a_job_everywhere(network):
    job = VirtualJob(network, 3, 0, 0, late=0)
    at_rest(job)
    fail_a_worker(job, 1)
    assert at_rest(job) is None
    assert {agent.ended for agent in job.agents} == {Kind.WORKER}


def test_without_spares_a_killed_agent_may_be_started_again(network):
    job = at_work(network, 3, 0)
    kill(job, 1)
    network.run(JOIN / 2)
    assert job.world() is None
    job.start_again(1)
    assert at_rest(job) == (0, 1, 2)


@pytest.mark.parametrize(("lost", "kind"), [(0, Kind.COORDINATOR), (1, Kind.MISSING)])
def test_without_spares_a_job_ends_with_a_node(network, lost, kind):
    job = at_work(network, 3, 0)
    kill(job, lost)
    assert at_rest(job) is None
    assert {a.ended for a in job.agents if a.number != lost} == {kind}


@pytest.mark.parametrize("spares", [0, 1])
def test_a_stranger_takes_no_part(network, spares):
    job = VirtualJob(network, 4, spares, late=0)
    stranger = Agent(job, 2, stranger_on=4)
    kill(job, 2)
    assert at_rest(job) == ((0, 1, 3) if spares else None)
    assert stranger.round is None


# --- whatever happens -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_job_is_one_world_or_ends_whatever_happens(seed):
    play(seed)
