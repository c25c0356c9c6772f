"""Faults of jobs with spares: four nodes, of which the last one waits.

The sections that they write are on the same page as those of `test_faults`.
"""

from __future__ import annotations

import json
import signal
import time
from functools import partial

import psutil
from jobs import Job, Seconds, ended, fault

# Forks of one import start at once. How workers are started changes nothing else.
with_spare = partial(fault, nodes=4, forms=("fork",))

KILLED = 128 + signal.SIGKILL
RESTARTS = "--max-restarts=3"
# A silent node is lost after 5 seconds, its workers have ended 13 seconds later.
HURRIED = (
    RESTARTS,
    "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=5",
    "--shutdown-timeout=3",
)


def again(job: Job, attempt: int = 1, *, lost: int, by: int = 3) -> float:
    """Wait until all train again; return how long that took.

    The worker of the node that is lost is on another one, the others where they were.
    """
    seconds = job.wait(partial(job.trains, attempt), 60)
    expected = [*job.hosts[:3]]
    expected[lost] = job.hosts[by]
    assert job.places() == tuple(expected)
    return seconds


def ends_well(job: Job, *lost: int) -> None:
    """Let the training end; all agents that are left end with exit code 0."""
    (job.folder / "stop").touch()
    job.end()
    left = [code for node, code in enumerate(job.codes()) if node not in lost]
    assert left == [0] * len(left), job.output()
    assert "Traceback" not in job.output()


def outcome(job: Job) -> dict[str, object]:
    """Return what was written with ``--hpc-outcome``."""
    return json.loads((job.folder / "outcome").read_text())


@with_spare("With a spare: an agent is killed")
def spare_agent_killed(job: Job) -> Seconds:
    """SIGKILL to the agent of node 1.

    The spare takes its place, node rank 1, and all workers train again {again} s later,
    the others where they were.
    """
    job.start(RESTARTS)
    job.agents()[1].kill()
    seconds = again(job, lost=1)
    assert seconds < 5
    ends_well(job, 1)
    assert job.codes()[1] == KILLED
    return {"again": seconds}


@with_spare("With a spare: all processes of a node are killed")
def spare_node_killed(job: Job) -> Seconds:
    """All of node 1 at once, its agent among them.

    The spare takes its place, and all workers train again {again} s later.
    """
    job.start(RESTARTS)
    job.kill(1)
    seconds = again(job, lost=1)
    assert seconds < 5
    ends_well(job, 1)
    return {"again": seconds}


@with_spare("With a spare: the head node is lost")
def spare_head_killed(job: Job) -> Seconds:
    """All processes of node 0 are killed at once, the coordinator among them.

    Node 1 takes over as the coordinator, the spare gets node rank 0, and all workers
    train again {again} s later.
    """
    job.start(RESTARTS)
    job.kill(0)
    seconds = again(job, lost=0)
    assert seconds < 5
    ends_well(job, 0)
    return {"again": seconds}


@with_spare("With a spare: a node is cut off, and comes back")
def spare_cut_off(job: Job) -> Seconds:
    """No packet goes to node 1 or back; here a node is lost that is silent for 5 s.

    {again} s later all train again: with the time that its agent has to end its own
    workers. Later its network is back, and it is a spare; node 2 is killed, and node 1
    takes its place.
    """
    job.start(*HURRIED)
    first = job.workers()[1]
    job.cluster.cut(job.hosts[1])
    seconds = job.wait(lambda: ended(first), 30)
    seconds += again(job, lost=1)
    job.cluster.heal(job.hosts[1])
    time.sleep(4)
    job.kill(2)
    job.wait(partial(job.trains, 2), 60)
    assert job.places() == (job.hosts[0], job.hosts[3], job.hosts[1])
    ends_well(job, 2)
    return {"again": seconds}


@with_spare("With a spare: the head node is cut off")
def spare_head_cut_off(job: Job) -> Seconds:
    """No packet goes to node 0 or back; again with 5 s instead of 120 s.

    Its agent ends its workers, as all others do.
    Node 1 takes over. After {again} s all train again. When the network is back, node 0
    is a spare, and disturbs nobody.
    """
    job.start(*HURRIED)
    first = job.workers()[0]
    job.cluster.cut(job.hosts[0])
    seconds = job.wait(lambda: ended(first), 30)
    seconds += again(job, lost=0)
    job.cluster.heal(job.hosts[0])
    time.sleep(6)
    assert job.trains(1)
    ends_well(job)
    return {"again": seconds}


@with_spare("With a spare: the head node is suspended, and goes on later")
def spare_head_suspended(job: Job) -> Seconds:
    """All processes of node 0 get SIGSTOP, and SIGCONT when the spare has its place.

    That is after {again} s, again with 5 s instead of 120 s. Its agent kills the
    workers that it had, before anything else, and is a spare.
    """
    job.start(*HURRIED)
    processes, first = job.processes(0), job.workers()[0]
    for process in processes:
        process.suspend()
    seconds = again(job, lost=0)
    for process in processes:
        process.resume()
    assert job.wait(lambda: ended(first), 10) < 2
    time.sleep(4)
    assert job.trains(1)
    assert len(job.workers()) == 3
    ends_well(job)
    return {"again": seconds}


@with_spare("With a spare: it is lost while it waits")
def spare_lost(job: Job) -> Seconds:
    """All processes of node 3 are killed, and a second later those of node 1.

    Nothing follows from the first. After the second there are too few nodes: the job
    ends {end} s later, and names both.
    """
    job.start(RESTARTS)
    job.kill(3)
    time.sleep(1)
    assert job.trains(0)
    job.kill(1)
    seconds = job.end(30)
    assert job.codes()[::2] == [1, 1]
    return {"end": seconds}


@with_spare("With a spare: two nodes are lost at once")
def spare_two_lost(job: Job) -> Seconds:
    """Nodes 0 and 2 are killed at the same time; there is `--hpc-outcome=FILE`.

    The job ends {end} s later, and names both, as the file does.
    """
    file = job.folder / "outcome"
    job.start(RESTARTS, f"--hpc-outcome={file}")
    processes = [*job.processes(0), *job.processes(2)]
    for process in processes:
        process.kill()
    seconds = job.end(30)
    assert job.codes()[1::2] == [1, 1]
    found = outcome(job)
    assert found["outcome"] == "nodes failed"
    assert found["exclude"] == [job.hosts[0], job.hosts[2]], (found, job.output())
    return {"end": seconds}


@with_spare("With a spare: another node is lost while the round forms")
def spare_lost_while_forming(job: Job) -> Seconds:
    """With a health check that takes 3 s, in which the round of node 1's loss forms.

    Node 2 is lost, too, before the round begins: the job ends {end} s later.
    """
    job.start(RESTARTS, "--hpc-health-check=sleep 3")
    job.kill(1)
    time.sleep(1.5)
    job.kill(2)
    seconds = job.end(30)
    assert job.codes()[0::3] == [1, 1]
    return {"end": seconds}


@with_spare("With a spare: a health check fails")
def spare_unhealthy(job: Job) -> Seconds:
    """`--hpc-health-check` ends with exit code 1 on node 2, before the first round.

    The spare has its place from the beginning.
    """
    bad = job.hosts[2]
    job.start(f"--hpc-health-check=echo GPU 3 is missing; test $(hostname) != {bad}")
    assert job.places() == (*job.hosts[:2], job.hosts[3])
    ends_well(job)
    return {}


@with_spare("With a spare: a health check hangs")
def spare_health_check_hangs(job: Job) -> Seconds:
    """On node 2, with `--hpc-health-check-timeout=5`, when a worker has failed.

    The check is killed with all that it has started; after {again} s all train again.
    """
    file = job.folder / "hangs"
    job.start(
        RESTARTS,
        "--hpc-health-check-timeout=5",
        f"--hpc-health-check=test -e {file}.$(hostname) && sleep 100; true",
    )
    (job.folder / f"hangs.{job.hosts[2]}").touch()
    job.workers()[0].kill()
    seconds = again(job, lost=2)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] == ["sleep", "100"]
    ]
    ends_well(job)
    return {"again": seconds}


@with_spare("With a spare: the worker of one node fails twice")
def spare_bad_node(job: Job) -> Seconds:
    """The worker on node 1 is the first to fail in two rounds running: the node is out.

    On the spare it does not fail.
    """
    job.start(RESTARTS, words=f"fails_on={job.hosts[1]}", attempt=2)
    again(job, 2, lost=1)
    ends_well(job)
    return {}
