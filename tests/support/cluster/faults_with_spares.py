"""Faults of jobs with spares: of four nodes the last one waits, of five the last two.

The sections that they write are on the same page as those of `faults`.
"""

from __future__ import annotations

import json
import signal
import time
from functools import partial

from tests.support.cluster.faults import Seconds, fault
from tests.support.cluster.real_job import ended
from tests.support.cluster.training_job import NEVER, TrainingJob
from tests.support.patience import NEVER_S

# How workers are started changes nothing here, and forks of one import start at once.
with_spare = partial(fault, nodes=4)

KILLED = 128 + signal.SIGKILL
RESTARTS = (*NEVER, "--max-restarts=3")
# A silent node is lost after 15 seconds, its workers have ended 13 seconds later.
HURRIED = (
    "--max-restarts=3",
    "--rdzv_conf=keep_alive_interval=3,keep_alive_max_attempt=5",
    "--shutdown-timeout=3",
)


def again(job: TrainingJob, attempt: int = 1, *, lost: int, by: int = 3) -> float:
    """Wait until all train again; return how long that took.

    The lost node's worker is on another node. All others are on their old ones.
    """
    seconds = job.wait(partial(job.trains, attempt))
    job.expected[lost] = job.hosts[by]
    assert job.places() == job.expected, job.output
    job.says(f"HPC207]: restart {attempt} of all workers")
    return seconds


def outcome(job: TrainingJob) -> dict[str, object]:
    """Return what was written with ``--hpc-outcome``."""
    found: dict[str, object] = json.loads((job.folder / "outcome").read_text())
    return found


@with_spare("With a spare: all processes of a node are killed", is_core=True)
def spare_node_killed(job: TrainingJob) -> Seconds:
    """All of node 1 at once, its agent among them; there is `--hpc-outcome=FILE`.

    The spare takes its place, and all workers train again {again} s later. The file
    names the node in the end.
    """
    job.start(*RESTARTS, f"--hpc-outcome={job.folder}/outcome")
    job.kill(1)
    seconds = again(job, lost=1)
    job.ends_well(1)
    found = outcome(job)
    assert found["outcome"] == "done", (found, job.output)
    assert found["exclude"] == [job.hosts[1]], (found, job.output)
    return {"again": seconds}


@fault("With a spare: an agent is killed", nodes=5)
def spare_agent_killed(job: TrainingJob) -> Seconds:
    """SIGKILL to the agent of node 1; here there are two spares.

    One takes its place, node rank 1, and all workers train again {again} s later, the
    others where they were.
    """
    job.start(*RESTARTS, words="gloo")
    job.agents()[1].kill()
    return {"again": again(job, lost=1)}


@fault("With a spare: the head node is lost", nodes=5, after="spare_agent_killed")
def spare_head_killed(job: TrainingJob) -> Seconds:
    """Then all processes of node 0 are killed at once, the coordinator among them.

    Node 2 takes over as the coordinator, the other spare gets node rank 0, and all
    workers train again {again} s later.
    """
    job.kill(0)
    seconds = again(job, 2, lost=0, by=4)
    job.ends_well(0, 1)
    assert job.codes()[1] == KILLED, job.output
    return {"again": seconds}


@with_spare("With a spare: a node is cut off, and comes back")
def spare_cut_off(job: TrainingJob) -> Seconds:
    """No packet goes to node 1 or back; here a node is lost that is silent for 15 s.

    {again} s later all train again: with the time that its agent has to end its own
    workers. Later its network is back, and it is a spare; node 2 is killed, and node 1
    takes its place.
    """
    job.start(*HURRIED)
    first = job.workers()[1]
    job.cut(1)
    seconds = job.wait(lambda: ended(first))
    seconds += again(job, lost=1)
    job.heal(1)
    job.wait(partial(job.is_accepted, 1))
    job.kill(2)
    again(job, 2, lost=2, by=1)
    job.ends_well(2)
    return {"again": seconds}


@with_spare("With a spare: the head node is cut off")
def spare_head_cut_off(job: TrainingJob) -> Seconds:
    """No packet goes to node 0 or back; again with 15 s instead of 120 s.

    Its agent ends its workers, as all others do.
    Node 1 takes over. After {again} s all train again. When the network is back, node 0
    is a spare, and disturbs nobody.
    """
    job.start(*HURRIED)
    first = job.workers()[0]
    job.cut(0)
    seconds = job.wait(lambda: ended(first))
    seconds += again(job, lost=0)
    job.heal(0)
    job.wait(partial(job.is_accepted, 0, by=1))
    time.sleep(2)
    assert job.trains(1), job.output
    job.ends_well()
    return {"again": seconds}


@with_spare("With a spare: a firewall rejects the packets of a node")
def spare_rejected(job: TrainingJob) -> Seconds:
    """It answers TCP with a reset: what node 1 is sent; later, what node 2 sends.

    Last it does both to the head node. No process has ended there, so the next round
    waits until the node must have ended its workers: {input} s, {output} s and {both}
    s, with 15 s instead of 120 s. When the firewall lets all through again, the node is
    a spare.
    """
    job.start(*HURRIED)
    seconds = {}
    steps = (("input", 1, 3), ("output", 2, 1), ("both", 0, 2))
    for attempt, (name, lost, by) in enumerate(steps, 1):
        hooks = ("input", "output") if name == "both" else (name,)
        first = job.workers()[lost]
        job.reject(lost, *hooks)
        seconds[name] = job.wait(partial(ended, first))
        assert not job.trains(attempt), job.output
        seconds[name] += again(job, attempt, lost=lost, by=by)
        job.reject(lost)
        job.wait(partial(job.is_accepted, lost, by=1 if lost == 0 else 0))
    job.ends_well()
    return seconds


@with_spare("With a spare: it is lost while it waits")
def spare_lost(job: TrainingJob) -> Seconds:
    """All processes of node 3 are killed, and a second later those of node 1.

    Nothing follows from the first. After the second there are too few nodes: the job
    ends {end} s later, and names both.
    """
    job.start(*RESTARTS)
    job.kill(3)
    time.sleep(1)
    assert job.trains(0), job.output
    job.kill(1)
    seconds = job.end()
    assert job.codes()[::2] == [1, 1], job.output
    return {"end": seconds}


@with_spare("With a spare: the head node is suspended, and continues later")
def spare_head_suspended(job: TrainingJob) -> Seconds:
    """All processes of node 0 get SIGSTOP, and SIGCONT when the spare has its place.

    That is after {again} s, again with 15 s instead of 120 s. Its agent kills the
    workers that it had, before anything else, and is a spare.
    """
    job.start(*HURRIED)
    processes, first = job.processes(0), job.workers()[0]
    for process in processes:
        process.suspend()
    seconds = again(job, lost=0)
    for process in processes:
        process.resume()
    job.wait(lambda: ended(first))
    job.says("HPC210")
    job.wait(partial(job.is_accepted, 0, by=1))
    time.sleep(2)
    assert job.trains(1), job.output
    assert len(job.workers()) == 3, job.output
    job.ends_well()
    return {"again": seconds}


@with_spare("With a spare: two nodes are lost at once")
def spare_two_lost(job: TrainingJob) -> Seconds:
    """Nodes 0 and 2 are killed at the same time; there is `--hpc-outcome=FILE`.

    Nobody is left who has seen the end of node 2. So the job ends {end} s later, with
    15 s instead of 120 s. It names both, as the file does.
    """
    job.start(*HURRIED, f"--hpc-outcome={job.folder}/outcome")
    job.kill(0, 2)
    seconds = job.end()
    assert job.codes()[1::2] == [1, 1], job.output
    found = outcome(job)
    assert found["outcome"] == "nodes failed", (found, job.output)
    assert found["exclude"] == [job.hosts[0], job.hosts[2]], (found, job.output)
    return {"end": seconds}


@with_spare("With a spare: another node is lost while the round forms")
def spare_lost_while_forming(job: TrainingJob) -> Seconds:
    """With a health check that takes long, in which the round of node 1's loss forms.

    Node 2 is also lost before the round begins: the job ends {end} s later.
    """
    hold, asked = job.folder / "hold", job.folder / "asked"
    job.start(
        *RESTARTS,
        f"--hpc-health-check=test -e {hold} && touch {asked} && sleep {NEVER_S}; true",
        f"--hpc-health-check-timeout={NEVER_S}",
    )
    hold.touch()
    job.kill(1)
    job.wait(asked.exists)
    job.kill(2)
    seconds = job.end()
    assert job.codes()[0::3] == [1, 1], job.output
    return {"end": seconds}


@fault("With a spare: a health check fails", nodes=5, is_core=True)
def spare_unhealthy(job: TrainingJob) -> Seconds:
    """`--hpc-health-check` ends with exit code 1 on node 2, before the first round.

    One of two spares has its place from the beginning.
    """
    bad = job.hosts[2]
    check = f"echo GPU 3 is missing; test $(hostname) != {bad}"
    job.start(*RESTARTS, f"--hpc-health-check={check}")
    job.expected[2] = job.places()[2]
    assert job.expected[2] in job.hosts[3:], job.output
    assert job.places() == job.expected, job.output
    job.says("HPC207")
    return {}


@fault(
    "With a spare: the worker of one node fails twice",
    nodes=5,
    after="spare_unhealthy",
    is_core=True,
)
def spare_bad_node(job: TrainingJob) -> Seconds:
    """The worker on node 1 is the first to fail in two consecutive rounds: the node is
    excluded.

    On the spare it does not fail.
    """
    (job.folder / f"fail.{job.hosts[1]}").touch()
    again(job, 2, lost=1, by=3 if job.hosts[4] in job.expected else 4)
    job.ends_well()
    return {}


@with_spare("With a spare: a health check hangs")
def spare_health_check_hangs(job: TrainingJob) -> Seconds:
    """On node 2, with `--hpc-health-check-timeout=20`, when a worker has failed.

    The check is killed with all that it has started; after {again} s all train again.
    """
    file = job.folder / "hangs"
    hangs = f"cd {job.folder}; test -e {file}.$(hostname) && sleep {NEVER_S}; true"
    job.start(*RESTARTS, "--hpc-health-check-timeout=20", f"--hpc-health-check={hangs}")
    (job.folder / f"hangs.{job.hosts[2]}").touch()
    job.workers()[0].kill()
    sleeping = partial(job.programs, str(NEVER_S))  # "sleep 900"
    seconds = job.wait(sleeping) + again(job, lost=2)
    job.wait(lambda: not sleeping())
    job.ends_well()
    return {"again": seconds}
