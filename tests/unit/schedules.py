"""What happens to a simulated job, drawn from a seed, and what must hold then.

Many more by hand, with ``tests/harness`` in ``PYTHONPATH``:
``python tests/unit/schedules.py FIRST LAST``.
"""

from __future__ import annotations

import random
import sys

from members import JOIN, KILL, MARGIN, SILENCE, Job

LEASE = SILENCE + KILL + MARGIN
ENOUGH = 6 * LEASE + 3 * JOIN  # seconds, in which a stable network comes to rest
SIZES = (8, 3), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)  # nodes, and spares of them
STEPS = 25


def at_rest(job):
    """Let time pass until there is a world, or all have ended; return the world."""
    for _ in range(ENOUGH):
        job.tick()
        if job.world() is not None or job.has_ended():
            break
    return job.world()


def pass_time(job, seconds):
    for _ in range(seconds):
        job.tick()


# Each takes a job, two of its members, and a random number from 0 to 1.


def pass_a_moment(job, _one, _other, share):
    pass_time(job, 1 + int(share * 5))


def pass_a_while(job, _one, _other, share):
    pass_time(job, 1 + int(share * 3 * LEASE))


def kill(job, one, _other, _share):
    job.kill(one)


def start_again(job, one, _other, _share):
    """Start an agent again, which has forgotten what it has confirmed.

    Of two sets of N members, enough must have forgotten nothing.
    """
    active = job.nodes - job.spares
    if sum(agent.generation for agent in job.agents) + 1 < active - job.spares:
        job.start_again(one)


def _ways(job, one, share):
    """Return pairs: from a member to all others, or back, or both."""
    others = [each for each in range(job.nodes) if each != one]
    there = {(one, each) for each in others} if share < 0.7 else set()
    back = {(each, one) for each in others} if share > 0.3 else set()
    return there | back


def cut(job, one, _other, share):
    """Cut a member off from all others."""
    job.cut |= _ways(job, one, share)


def separate(job, one, other, share):
    """Cut two members off from each other: in one direction or both."""
    job.cut.add((one, other))
    if share > 0.3:
        job.cut.add((other, one))


def reject(job, one, _other, share):
    """Let a firewall reject what a member sends, or what it is sent, or both."""
    job.rejecting |= _ways(job, one, share)


def heal(job, _one, _other, _share):
    job.cut.clear()
    job.rejecting.clear()


def break_links(job, one, other, _share):
    job.break_links(one, other)


def suspend(job, one, _other, _share):
    job.agents[one].suspended = True


def resume(job, one, _other, _share):
    job.resume(one)


def pause(job, one, _other, share):
    """Suspend a member for a while."""
    job.agents[one].suspended = True
    pass_time(job, 1 + int(share * 2 * LEASE))
    job.resume(one)


def slow_down(job, one, _other, _share):
    """Let each tick of a member be late."""
    job.agents[one].lateness = 2.5


def speed_up(job, one, _other, _share):
    job.agents[one].lateness = 1.0


def fail_a_worker(job, one, _other, _share):
    job.agents[one].worker_fails()


def finish(job, one, _other, _share):
    job.agents[one].workers_finish()


def finish_all(job, _one, _other, _share):
    for agent in job.agents:
        agent.workers_finish()


def give_up(job, one, _other, _share):
    job.agents[one].give_up()


def be_unwell(job, one, _other, share):
    job.agents[one].health = "fails" if share < 0.5 else "hangs"


def slow_store(job, one, _other, share):
    job.agents[one].store_takes = share * 10


ACTIONS = (
    *(pass_a_moment, pass_a_while) * 8,
    *(heal, resume) * 5,
    *(cut, separate, reject, pause, slow_down, break_links, start_again) * 3,
    *(kill, suspend, speed_up, fail_a_worker, finish, slow_store) * 2,
    *(finish_all, give_up, be_unwell),
)


def play(seed):
    """Let things happen to a job, and see that it is one world, or ends everywhere.

    The simulation itself sees that no round begins while workers of another run.
    """
    drawn = random.Random(seed)  # noqa: S311 - no secret
    job = Job(*drawn.choice(SIZES), seed)
    if drawn.random() < 0.7:
        at_rest(job)
    for _ in range(STEPS):
        one, other = drawn.randrange(job.nodes), drawn.randrange(job.nodes)
        drawn.choice(ACTIONS)(job, one, other, drawn.random())
    come_to_rest(job)


def come_to_rest(job):
    """See that a job whose network is well is one world, or ends everywhere."""
    job.cut.clear()
    job.rejecting.clear()
    for agent in job.agents:
        job.resume(agent.number)
        agent.lateness, agent.store_takes = 1.0, 0
    pass_time(job, 3 * SILENCE)  # what is lost may not have been noticed yet
    for _ in range(3):
        if job.may_finish:
            finish_all(job, 0, 0, 0)
        world = at_rest(job)
        if world is None:
            assert job.has_ended(), [(a, a.workers, a.ended) for a in job.agents]
            return
    pass_time(job, 3 * SILENCE)
    if job.world() != world:
        assert any(agent.member.is_done for agent in job.agents)
        return
    left = [a for a in job.agents if a.alive and a.ended is None]
    assert len({agent.member.follows for agent in left}) == 1


if __name__ == "__main__":
    for number in range(*map(int, sys.argv[1:])):
        print(
            f"seed {number}", end="\r", flush=True
        )  # the last one that is shown fails
        play(number)
