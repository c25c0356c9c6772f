"""What goes wrong on real clusters, done to real jobs: faults.md comes from here.

Each fault is a function that does something to a job of three nodes, and checks what
follows. Its documentation is its section of the page, and it returns the seconds there.
"Soon" means that nothing else could have ended the job; see `training_job.NEVER`.
"""

from __future__ import annotations

import importlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.cluster.commands import late, on_node, until_there
from tests.support.cluster.real_job import Program, ended
from tests.support.cluster.training_job import NEVER, STARTING, TrainingJob
from tests.support.patience import NEVER_S
from torchrun_hpc.planning import head_node

if TYPE_CHECKING:
    from pathlib import Path

# --- the register ------------------------------------------------------------------

Seconds = dict[str, float]
Scenario = Callable[[TrainingJob], Seconds]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        scenario: Does it, and checks what follows.
        title: Of its section on the page.
        nodes: How many the job has.
        form: How its workers are started; see `FORMS`.
        after: The fault that was done to the same job before; empty if it is the first.
        is_core: Whether the core has it.
    """

    scenario: Scenario
    title: str
    nodes: int = 3
    form: str = "fork"
    after: str = ""
    is_core: bool = False


FAULTS: dict[str, Fault] = {}


def fault(title: str, **changes: Any) -> Callable[[Scenario], Scenario]:
    """Make a section of the page of a function, and part of a test; see `Fault`."""

    def register(function: Scenario) -> Scenario:
        FAULTS[function.__name__] = Fault(function, title, **changes)
        return function

    return register


def chains(*, is_core: bool) -> list[list[str]]:
    """Return the names of faults, those of one job together."""
    found: dict[str, list[str]] = {}
    for name, each in FAULTS.items():
        if each.is_core == is_core:
            found[name] = [*found.pop(each.after, []), name]
    return list(found.values())


# --- the faults -------------------------------------------------------------------

# An agent that is silent for 35 s is lost; or for 20 s.
PATIENT = "--rdzv_conf=keep_alive_interval=5,keep_alive_max_attempt=7"
BRIEF = (
    f"--rdzv_conf=join_timeout={NEVER_S},keep_alive_interval=4,keep_alive_max_attempt=5"
)


@fault("A worker is killed, and there is a restart left")
def worker_killed_and_restarted(job: TrainingJob) -> Seconds:
    """With `--max-restarts=1`. The other workers have ended {others} s later.

    All workers start again, with TORCHELASTIC_RESTART_COUNT=1 on every rank.
    """
    job.start(*NEVER, "--max-restarts=1", words="gloo")
    workers = job.workers()
    workers[1].kill()
    others = job.wait(lambda: ended(*workers))
    job.wait(lambda: job.trains(1))
    job.says("HPC128")
    return {"others": others}


@fault("A worker is killed", after="worker_killed_and_restarted")
def worker_killed(job: TrainingJob) -> Seconds:
    """SIGKILL, as the kernel does if there is no memory left, and no restart is left.

    The last worker of the other nodes has ended {others} s later, and the job {end} s
    later. Node 0 says why, as its last line.
    """
    workers = job.workers()
    workers[1].kill()
    others = job.wait(lambda: ended(*workers))
    end = others + job.ends(1, 1, 1)
    by_first = [line for line in job.output.splitlines() if line.startswith("0: ")]
    assert by_first[-1] == f"0: {job.lines()[-1]}", job.output
    assert job.lines()[-1].endswith(
        f"worker 1 on {job.hosts[1]} (node 1) was killed by SIGKILL (9): probably out "
        "of memory"
    ), job.output
    return {"others": others, "end": end}


@fault("A worker is killed, and the others fail in the same step")
def worker_killed_and_others_fail(job: TrainingJob) -> Seconds:
    """As with gloo, where they see at once that a connection is closed.

    Named is the one that was first. The job has ended {end} s later.
    """
    job.start(*NEVER, words="gloo raises")
    job.workers()[1].kill()
    end = job.end()
    assert job.codes() == [1, 1, 1], job.output
    assert "RuntimeError: " in job.output, job.output
    killed = f"worker 1 on {job.hosts[1]} (node 1) was killed"
    assert killed in job.lines()[-1], job.output
    return {"end": end}


@fault("An agent is killed", form="exec", is_core=True)
def agent_killed(job: TrainingJob) -> Seconds:
    """SIGKILL to the agent of one node, and no restart.

    Its workers have ended {orphans} s later, those of the other nodes {others} s later,
    the job {end} s later.
    """
    job.start(*NEVER)
    workers, agents = job.workers(), job.agents()
    agents[1].kill()
    orphans = job.wait(lambda: ended(workers[1]))
    others = orphans + job.wait(lambda: ended(*workers))
    end = others + job.ends(1, 128 + signal.SIGKILL, 1)
    assert "(node 1) is gone without a message" in job.lines()[-1], job.output
    return {"orphans": orphans, "others": others, "end": end}


@fault("An agent is killed, and started again")
def agent_killed_and_started_again(job: TrainingJob) -> Seconds:
    """With `--max-restarts=1`, and the same command once more on that node.

    The workers of the other nodes have ended {others} s after the agent. The other
    agents wait, and all start with the next round, on every rank
    TORCHELASTIC_RESTART_COUNT=1.
    """
    job.start(*NEVER, "--max-restarts=1")
    workers, agents = job.workers(), job.agents()
    command, environ = agents[1].cmdline(), agents[1].environ()
    agents[1].kill()
    others = job.wait(lambda: ended(*workers))
    job.says("is started again")
    time.sleep(1)
    assert not job.workers(), job.output
    with Program(job.cluster, command, host=job.hosts[1], environ=environ) as again:
        job.wait(lambda: job.trains(1))
        job.stop()
        job.ends(0, 128 + signal.SIGKILL, 0)
        again.ends(0)
    return {"others": others}


@fault("A node is cut off for ten seconds")
def cut_off_for_a_while(job: TrainingJob) -> Seconds:
    """Here an agent may be silent for 35 s, by `keep_alive_interval=5` and
    `keep_alive_max_attempt=7` in `--rdzv-conf`; without, for 120 s. No packet goes to
    node 2 or back, and no connection is closed. The training stands still, and then
    continues.

    It continues {after} s after the network does: as long as TCP takes to try again.
    """
    job.start(PATIENT, words="gloo")
    job.cut(2)
    at_most = job.steps()[-1] + 1  # a step may have ended on some of the workers
    time.sleep(10)
    assert job.steps()[-1] <= at_most, job.output
    job.heal(2)
    after = job.wait(lambda: job.steps()[0] > at_most + 1)
    # By then the agents have heard from each other again.
    job.wait(lambda: job.steps()[0] > at_most + 100)
    return {"after": after}


@fault("A node is cut off", after="cut_off_for_a_while")
def cut_off(job: TrainingJob) -> Seconds:
    """The same, and the network does not come back. An agent at rest says something
    every 5 s, so the 30 s and 35 s of the messages may begin before.

    Node 0 names the silent one after {named} s. After {others} s all workers have
    ended, those of the silent node too, and after {end} s the job has.
    """
    workers = job.workers()
    job.cut(2)
    named = job.says("no answer from")
    others = named + job.wait(lambda: ended(*workers))
    end = others + job.ends(1, 1, 1)
    return {"named": named, "others": others, "end": end}


@fault("A node is cut off while another is still to come", form="exec")
def cut_off_while_joining(job: TrainingJob) -> Seconds:
    """Node 2 did not join yet when node 1 is cut off; again for 35 s at most.

    Node 0 names it after {named} s. After {end} s both agents have ended. Node 1 cannot
    know better, and reports that the head node does not answer.
    """
    job.start(PATIENT, first=late(2), attempt=None)
    job.wait(lambda: "2 of 3 nodes have joined" in job.output)
    agents = job.agents()
    job.cut(1)
    named = job.says("no answer from")
    end = named + job.wait(lambda: ended(*agents))
    job.wait(lambda: job.codes() == [1, 1, None])
    assert "Traceback" not in job.output, job.output
    job.close()
    return {"named": named, "end": end}


@fault("The head node's processes are killed", is_core=True)
def head_killed(job: TrainingJob) -> Seconds:
    """All at once, by SIGKILL. The head node is node 0, if no endpoint says otherwise.

    The other workers have ended {others} s later, the job {end} s later.
    """
    job.start(*NEVER)
    workers = job.workers()
    job.kill(0)
    others = job.wait(lambda: ended(*workers))
    end = others + job.ends(None, 1, 1)
    gone = f"{job.hosts[0]} (node 0), is gone"
    assert gone in job.lines()[-1], job.output
    return {"others": others, "end": end}


@fault("The head node is cut off", form="exec")
def head_cut_off(job: TrainingJob) -> Seconds:
    """No packet goes to it or back; again for 35 s at most.

    Node 1 names it after {named} s. After {others} s all workers have ended, and after
    {end} s the job has. The coordinator on the head node cannot know better, and
    reports that the others do not answer.
    """
    job.start(PATIENT)
    workers = job.workers()
    job.cut(0)
    named = job.says("no answer from the head node")
    others = named + job.wait(lambda: ended(*workers))
    end = others + job.ends(1, 1, 1)
    return {"named": named, "others": others, "end": end}


OTHER_PROGRAM = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
held = []
while True:
    held.append(server.accept())
"""


@fault("The port is taken")
def port_taken(job: TrainingJob) -> Seconds:
    """By other programs, which accept connections and never answer.

    The derived port is taken before the start, and the second one while the other nodes
    look for the coordinator: it listens on the third, and they have found it there
    {found} s later.
    """
    go = f"{job.folder}/go.$SLURM_NODEID"
    job.start(BRIEF, words="saves", first=until_there(go), attempt=None)
    job.wait(job.launch_id)
    ports, _ = head_node.ports_of(job.launch_id())
    with STARTING:
        _occupy(job, ports[0])
        for node in 1, 2:
            (job.folder / f"go.{node}").touch()
        # By then both have found nobody on the second port.
        job.wait(lambda: job.output.count("HPC113") == 2)
        _occupy(job, ports[1])
        (job.folder / "go.0").touch()
        job.wait(lambda: job.run(0, f"ss -Htln sport = :{ports[2]}"))
        found = job.wait(lambda: len(job.workers()) == 3)
        job.wait(job.trains)
    assert f"{job.hosts[0]}i:{ports[0]}" in job.output, job.output
    return {"found": found}


def _occupy(job: TrainingJob, port: int) -> None:
    """Let another program listen on a port of the head node, until the cluster ends."""
    address = f"{job.hosts[0]}i"
    words = ["python3", "-c", OTHER_PROGRAM, address, str(port)]
    program = Program(job.cluster, words, host=job.hosts[0])
    program.start()
    program.says("listening")


@fault("The job is suspended", after="port_taken")
def suspended(job: TrainingJob) -> Seconds:
    """For 25 s, by `scontrol suspend`, where an agent may be silent for 20 s only.

    Nothing follows: the seconds in which an agent itself does not run do not count.
    """
    job.cluster.run(["scontrol", "suspend", job.job_id()], check=True)
    processes = [*job.agents(), *job.workers()]
    assert len(processes) == 6, job.output
    job.wait(lambda: {p.status() for p in processes} == {psutil.STATUS_STOPPED})
    steps = job.steps()
    time.sleep(25)
    assert job.steps() == steps, job.output
    job.cluster.run(["scontrol", "resume", job.job_id()], check=True)
    job.wait(lambda: job.steps()[0] > steps[0] + 70)
    return {}


@fault("An agent gets SIGTERM", after="suspended")
def agent_terminated(job: TrainingJob) -> Seconds:
    """The workers of all nodes get it, and have `--shutdown-timeout` seconds (30).

    Here each takes 1 s to save its state; the last one has ended after {others} s, the
    job after {end} s.
    """
    workers = job.workers()
    job.agents()[1].terminate()
    others = job.wait(lambda: ended(*workers))
    end = others + job.ends(1, 1, 1)
    saved = [(job.folder / f"saved.{rank}").exists() for rank in range(3)]
    assert saved == [True] * 3, job.output
    received = f"{job.hosts[1]} (node 1) received SIGTERM (15)"
    assert received in job.lines()[-1], job.output
    return {"others": others, "end": end}


# From Python 3.11 on time.sleep is a call that libfaketime up to 0.9.10 spoils
# (wolfcw/libfaketime#426).
SLEEP = """
import select, time
time.sleep = lambda seconds: select.select((), (), (), seconds) and None
"""


@fault("A clock is wrong", form="exec")
def clock_wrong(job: TrainingJob) -> Seconds:
    """The head node's is an hour fast; it is set back by two hours while the job runs.

    Nothing follows; a worker that fails is restarted as usual, and nothing follows when
    the clock is set forth again.
    """
    library = job.run(0, "faketime -m -f +0 printenv LD_PRELOAD")
    (job.folder / "clock").write_text("+3600\n")
    (job.folder / "sitecustomize.py").write_text(SLEEP)
    names = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(job.folder / "clock"),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
        "PYTHONPATH": str(job.folder),
    }
    exports = " ".join(f"{name}='{value}'" for name, value in names.items())
    job.start("--max-restarts=1", first=on_node(0, f"export {exports}"))
    assert _offset(job) > 3000, job.output
    (job.folder / "new").write_text("-3600\n")
    (job.folder / "new").rename(job.folder / "clock")
    job.wait(lambda: _offset(job) < -3000)
    time.sleep(5)
    (job.folder / "fail").touch()
    job.wait(lambda: job.trains(1))
    assert _offset(job) < -3000, job.output
    (job.folder / "clock").write_text("+3600\n")
    job.wait(lambda: _offset(job) > 3000)
    time.sleep(5)
    job.ends_well()
    return {}


def _offset(job: TrainingJob) -> float:
    """Return by how many seconds the clock of node 0 is fast."""
    first, second, _ = (float(beat["clock"]) for beat in job.beats())
    return first - second


def _mount(job: TrainingJob, size: str) -> Path:
    """Mount a small disk on node 1; on the other nodes it is a folder."""
    disk = job.folder / "disk"
    disk.mkdir()
    job.run(1, f"mount -t tmpfs -o {size} small {disk}")
    return disk


@fault("The disk for logs is full")
def disk_full(job: TrainingJob) -> Seconds:
    """On node 1, when the workers are to start: with `--log-dir=FOLDER --tee=3`.

    Node 1 reports it, the others are informed, and {end} s after the first line all
    agents have ended.
    """
    disk = _mount(job, "nr_inodes=2")
    job.start(*NEVER, f"--log-dir={disk}", "--tee=3", attempt=None)
    job.says("No space left on device")
    return {"end": job.ends(1, 1, 1)}


@fault("There is no room for the folder of --log-dir", form="exec")
def disk_full_at_first(job: TrainingJob) -> Seconds:
    """On node 1, as before, but even before the nodes have met.

    Node 1 reports it, the others are informed, and {end} s after the first line all
    agents have ended.
    """
    disk = _mount(job, "nr_inodes=1")
    job.start(*NEVER, f"--log-dir={disk}/logs", "--tee=3", attempt=None)
    job.says("No space left on device")
    end = job.end()
    assert all(job.codes()), job.output
    assert "Traceback" not in job.output, job.output
    return {"end": end}


@fault("The disk for logs fills up")
def disk_fills(job: TrainingJob) -> Seconds:
    """On node 1, while a worker prints, with `--tee=3`.

    The worker's output goes to the file first, so it is the worker that fails. There is
    no room for its traceback either: nothing that is printed says why.
    """
    disk = _mount(job, "size=64k")
    job.start(*NEVER, f"--log-dir={disk}", "--tee=3", words="prints")
    job.end()
    assert job.codes() == [1, 1, 1], job.output
    assert "worker 1 on" in job.lines()[-1], job.output
    assert "No space left" not in job.output, job.output
    return {}


importlib.import_module(
    "tests.support.cluster.faults_with_spares"
)  # registers those, behind these
