"""Clients that do not belong to a job, and do to its ports whatever they can."""

from __future__ import annotations

import pytest

from tests.support.cluster.attack import attacked
from tests.support.cluster.commands import late
from tests.support.cluster.steady_job import SteadyJob

# What they may cost the agent of the head node: a gigabyte of garbage, three hundred
# connections, and messages that are wrong.
MOST_CPU_S = 0.5


@pytest.mark.release
def test_hostile_clients_while_a_node_is_missing(unpadded, tmp_path):
    """The job starts among them; nothing of theirs is run, and they cost little."""
    go = tmp_path / "go"
    with SteadyJob(unpadded, tmp_path, nodes=3, first=late(2, go)) as job:
        job.wait(lambda: job.is_accepted(1))
        before = cpu_seconds_of(job)
        with attacked(job, tmp_path):
            cost = cpu_seconds_of(job) - before
            print(f"{cost:.2f} CPU seconds")
            go.touch()  # while their connections are open
            job.works()
            job.stop()
            job.ends(0)
    assert cost < MOST_CPU_S, job.output


def cpu_seconds_of(job):
    """Return what the agent of the head node has used."""
    (agent,) = job.agents(0)
    return sum(agent.cpu_times()[:2])
