"""Whatever happens to its nodes and their network, a job is one world, or ends."""

from __future__ import annotations

import itertools

import pytest

from tests.support.virtual_job import LONG, at_work, kill, play, reject, slow_down
from tests.support.virtual_network import Network

FIRST, LAST, PART = 50, 2000, 50


@pytest.mark.parametrize("first", range(FIRST, LAST, PART))
def test_a_job_is_one_world_or_ends_whatever_happens(first):
    for seed in range(first, first + PART):
        play(seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_coordinator_that_hears_nobody(seed):
    """A firewall rejects all messages to it: only the others know that at once."""
    with Network(seed) as network:
        job = at_work(network, 4, 1, LONG)
        slow_down(job, 0)
        network.run(3 + seed % 5)
        reject(job, 0, share=0.9)
        network.run(5 * LONG)
        assert job.world() == (3, 1, 2)


@pytest.mark.parametrize("wait", [5, 15, 25, 35])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_coordinator_that_is_left_renews_leases_before_it_notices(wait, is_killed):
    """Its connections are reset. Then it and another active node are also cut off.

    The node that takes over may be killed before its round has begun.
    """
    left, others = (0, 1), (2, 3, 4)
    for seed in range(5):
        with Network(seed) as network:
            job = at_work(network, 5, 2 - is_killed, LONG)
            network.rejecting |= {(other, 0) for other in others}
            network.cut |= {*itertools.product([1], others)}
            network.cut |= {*itertools.product(others, [1])}
            network.run(wait)
            network.cut |= {left, left[::-1]}
            if is_killed:
                kill(job, 2)
            network.run(5 * LONG)
