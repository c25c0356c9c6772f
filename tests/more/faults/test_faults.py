"""What goes wrong on real clusters, done to real jobs: docs/faults.md comes from here.

Each fault is a function that starts a job of three nodes, does something to it, and
checks what follows. All of them run side by side, each on nodes of its own, and most of
the time wait. The function's documentation is its section of the page; what it returns
are the seconds in it. With WRITE_FAULTS=1 the sections are written anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import textwrap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import psutil
import pytest
from commands import FORMS, JUELICH, ROOT
from jobs import FAULTS, STARTING, Job, Seconds, ended, fault
from testbed import Cluster

from torchrun_hpc.planning import endpoints
from torchrun_hpc.rendezvous import server
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("machine")

PAGE = ROOT / "docs" / "faults.md"
WRITES = bool(os.environ.get("WRITE_FAULTS"))

# Silent for 35 seconds is gone for good.
PATIENT = "--rdzv_conf=keep_alive_interval=5,keep_alive_max_attempt=7"
HURRIED = "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=5"
# An agent is asked every 5 seconds, so the last answer may be as old.
SILENT = pytest.approx(30 - 5 / 2, abs=6)
GONE = pytest.approx(35 - 5 / 2, abs=8)
# The coordinator stays for a while, for nodes that are not informed of the end.
OVER = pytest.approx(35 + server.CLOSE_TIMEOUT, abs=12)

EXEC = ("exec",)

# For faults that are tried once more.
SPARE_NODES = 8

# --- the faults -------------------------------------------------------------------


@fault("A worker is killed")
def worker_killed(job: Job) -> Seconds:
    """SIGKILL, as the kernel does where there is no memory left, and no restart.

    The last worker of the other nodes has ended {others} s later, and the job {end} s
    later. Node 0 says why, as its last line.
    """
    job.start()
    workers = job.workers()
    workers[1].kill()
    others = job.wait(lambda: ended(*workers), 10)
    end = others + job.end(30)
    assert others < 2
    assert job.codes() == [1, 1, 1]
    by_first = [line for line in job.output().splitlines() if line.startswith("0: ")]
    assert by_first[-1] == f"0: {job.lines()[-1]}"
    assert job.lines()[-1].endswith(
        f"worker 1 on {job.hosts[1]} (node 1) was killed by SIGKILL (9): probably out "
        "of memory"
    )
    return {"others": others, "end": end}


@fault("A worker is killed, and the others fail in the same step")
def worker_killed_and_others_fail(job: Job) -> Seconds:
    """As with gloo, where they see at once that a connection is closed.

    Named is the one that was first. The job has ended {end} s later.
    """
    job.start(words="raises")
    job.workers()[1].kill()
    end = job.end(30)
    assert job.codes() == [1, 1, 1]
    assert "RuntimeError: " in job.output()
    assert f"worker 1 on {job.hosts[1]} (node 1) was killed" in job.lines()[-1]
    return {"end": end}


@fault("A worker is killed, and there is a restart left")
def worker_killed_and_restarted(job: Job) -> Seconds:
    """With `--max-restarts=1`. The other workers have ended {others} s later.

    All workers start again, with TORCHELASTIC_RESTART_COUNT=1 on every rank.
    """
    job.start("--max-restarts=1")
    workers = job.workers()
    workers[1].kill()
    others = job.wait(lambda: ended(*workers), 10)
    assert others < 2
    job.wait(lambda: job.trains(1))
    job.stop()
    return {"others": others}


@fault("An agent is killed")
def agent_killed(job: Job) -> Seconds:
    """SIGKILL to the agent of one node, and no restart.

    Its workers have ended {orphans} s later, those of the other nodes {others} s later,
    the job {end} s later.
    """
    job.start()
    workers, agents = job.workers(), job.agents()
    agents[1].kill()
    orphans = job.wait(lambda: ended(workers[1]), 10)
    others = orphans + job.wait(lambda: ended(*workers), 10)
    end = others + job.end(30)
    assert others < 2
    assert job.codes() == [1, 128 + signal.SIGKILL, 1]
    assert "(node 1) is gone without a word" in job.lines()[-1]
    assert "Traceback" not in job.output()
    return {"orphans": orphans, "others": others, "end": end}


@fault("An agent is killed, and started again")
def agent_killed_and_started_again(job: Job) -> Seconds:
    """With `--max-restarts=1`, and the same command once more on that node.

    The workers of the other nodes have ended {others} s after the agent. The other
    agents wait, and all start with the next round, on every rank
    TORCHELASTIC_RESTART_COUNT=1.
    """
    job.start("--max-restarts=1")
    workers, agents = job.workers(), job.agents()
    command, environ = agents[1].cmdline(), agents[1].environ()
    agents[1].kill()
    others = job.wait(lambda: ended(*workers), 10)
    assert others < 2
    job.says("waiting for it to be started again")
    time.sleep(1)
    assert not job.workers()
    with (job.folder / "again").open("w") as output:
        again = job.cluster.popen(
            command, host=job.hosts[1], env=environ, stdout=output, stderr=output
        )
    job.wait(lambda: job.trains(1))
    (job.folder / "stop").touch()
    job.end()
    assert again.wait(30) == 0, (job.folder / "again").read_text()
    assert job.codes() == [0, 128 + signal.SIGKILL, 0]
    return {"others": others}


@fault("A node is cut off")
def cut_off(job: Job) -> Seconds:
    """No packet goes to node 2 or back, and no connection is closed.

    Here an agent may be silent for 35 s, by `keep_alive_interval=5` and
    `keep_alive_max_attempt=7` in `--rdzv-conf`; without, for 120 s. An agent at rest
    says something every 5 s, so the 30 s and 35 s of the messages may begin before.

    Node 0 names the silent one after {named} s. After {others} s all workers have
    ended, those of the silent node too, and after {end} s the job has.
    """
    job.start(PATIENT)
    workers = job.workers()
    job.cluster.cut(job.hosts[2])
    named = job.says("no sign of", 40)
    others = named + job.wait(lambda: ended(*workers), 40)
    end = others + job.end(40)
    assert named == SILENT
    assert others == GONE
    assert job.codes() == [1, 1, 1]
    assert "Traceback" not in job.output()
    return {"named": named, "others": others, "end": end}


@fault("A node is cut off while another is still to come", forms=EXEC)
def cut_off_while_joining(job: Job) -> Seconds:
    """Node 2 has not come yet when node 1 is cut off; again for 35 s at most.

    Node 0 names it after {named} s. After {end} s both agents have ended. Node 1 cannot
    know better, and reports that the head node does not answer.
    """
    first = 'test "$SLURM_NODEID" = 2 && exec sleep 200'
    job.start(PATIENT, first=first, attempt=None)
    job.wait(lambda: len(job.agents()) == 2)
    job.wait(lambda: "2 of 3 nodes are there" in job.output())
    agents = job.agents()
    job.cluster.cut(job.hosts[1])
    named = job.says("no sign of", 40)
    end = named + job.wait(lambda: ended(*agents), 40)
    assert named == SILENT
    assert end == OVER
    job.wait(lambda: job.codes() == [1, 1, None], 10)
    assert "Traceback" not in job.output()
    job.cluster.end(job.program)
    return {"named": named, "end": end}


@fault("A node is cut off for ten seconds", forms=EXEC)
def cut_off_for_a_while(job: Job) -> Seconds:
    """Again with 35 s at most. The training stands still and goes on.

    It goes on {after} s after the network does: as long as TCP takes to try again.
    """
    job.start(PATIENT)
    job.cluster.cut(job.hosts[2])
    time.sleep(2)
    steps = [beat["steps"] for beat in job.beats()]
    time.sleep(8)
    assert [beat["steps"] for beat in job.beats()] == steps
    job.cluster.heal(job.hosts[2])
    after = job.wait(
        lambda: min(beat["steps"] for beat in job.beats()) > max(steps) + 1
    )
    job.stop()
    assert job.lines() == []
    return {"after": after}


@fault("The head node's processes are killed")
def head_killed(job: Job) -> Seconds:
    """All at once, by SIGKILL. The head node is node 0, if no endpoint says otherwise.

    The other workers have ended {others} s later, the job {end} s later.
    """
    job.start()
    workers, processes = job.workers(), job.processes(node=0)
    for process in processes:
        process.kill()
    others = job.wait(lambda: ended(*workers), 10)
    end = others + job.end(30)
    assert others < 3
    assert job.codes() == [None, 1, 1]
    assert f"{job.hosts[0]} (node 0), is gone" in job.lines()[-1]
    assert "Traceback" not in job.output()
    return {"others": others, "end": end}


@fault("The head node is cut off", forms=EXEC)
def head_cut_off(job: Job) -> Seconds:
    """No packet goes to it or back; again for 35 s at most.

    Node 1 names it after {named} s. After {others} s all workers have ended, and after
    {end} s the job has. The coordinator on the head node cannot know better, and
    reports that the others do not answer.
    """
    job.start(PATIENT)
    workers = job.workers()
    job.cluster.cut(job.hosts[0])
    named = job.says("no sign of the head node", 40)
    others = named + job.wait(lambda: ended(*workers), 40)
    end = others + job.end(40)
    assert named == SILENT
    assert others == GONE
    assert job.codes() == [1, 1, 1]
    assert "Traceback" not in job.output()
    return {"named": named, "others": others, "end": end}


OTHER_PROGRAM = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
held = []
while True:
    held.append(server.accept())
"""


@fault("The port is taken", forms=EXEC)
def port_taken(job: Job) -> Seconds:
    """By other programs, which accept connections and never answer.

    The derived port is taken before the start, and the second one while the launcher
    starts: the coordinator listens on the third, and the other nodes have found it
    there {found} s later.
    """
    first = 'until test -e "$0/go"; do sleep 0.05; done'
    job.start(first=first, attempt=None)
    job.wait(job.launch_id)
    ports = endpoints.ports_of(job.launch_id())
    address = job.run(0, f"getent hosts {job.hosts[0]}i").split()[0]
    occupy = partial(_other_program, job, address)
    with STARTING:
        occupy(ports[0])
        (job.folder / "go").touch()
        job.wait(lambda: len(job.agents()) == 3)
        agent = job.agents()[0]
        agent.suspend()  # while it imports torch
        # The others have found nobody on the second port by then.
        job.wait(lambda: "HPC113" in job.output())
        occupy(ports[1])
        agent.resume()
        job.wait(lambda: job.listens(0, ports[2]))
        found = job.wait(lambda: len(job.workers()) == 3)
        job.wait(job.trains)
    job.stop()
    assert f"{job.hosts[0]}i:{ports[0]}" in job.output()
    assert job.lines() == []
    assert found < 10
    return {"found": found}


def _other_program(job: Job, address: str, port: int) -> None:
    program = job.cluster.popen(
        ["python3", "-c", OTHER_PROGRAM, address, str(port)],
        host=job.hosts[0],
        env=JUELICH,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "listening\n"


# From Python 3.11 on time.sleep is a call that libfaketime up to 0.9.10 spoils
# (wolfcw/libfaketime#426).
SLEEP = """
import select, time
time.sleep = lambda seconds: select.select((), (), (), seconds) and None
"""


@fault("A clock is wrong", forms=EXEC)
def clock_wrong(job: Job) -> Seconds:
    """The head node's is an hour fast; it is set back by two hours while the job runs.

    Nothing follows; a worker that fails is restarted as ever, and nothing follows when
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
    first = f'test "$SLURM_NODEID" = 0 && export {exports}'
    job.start("--max-restarts=1", first=first)
    assert _offset(job) == pytest.approx(3600, abs=30)
    (job.folder / "new").write_text("-3600\n")
    (job.folder / "new").rename(job.folder / "clock")
    job.wait(lambda: _offset(job) < -3000, 20)
    time.sleep(5)
    (job.folder / "fail").touch()
    job.wait(lambda: job.trains(1))
    assert _offset(job) == pytest.approx(-3600, abs=30)
    (job.folder / "clock").write_text("+3600\n")
    job.wait(lambda: _offset(job) > 3000, 20)
    time.sleep(5)
    job.stop()
    (line,) = job.lines()
    assert "HPC128 restart 1 of all workers: worker 1 on" in line
    return {}


def _offset(job: Job) -> float:
    """Return by how many seconds the clock of node 0 is fast."""
    first, second, _ = job.beats()
    return first["clock"] - second["clock"]


def _mount(job: Job, size: str) -> Path:
    """Mount a small disk on node 1; on the other nodes it is a folder."""
    disk = job.folder / "disk"
    disk.mkdir()
    job.run(1, f"mount -t tmpfs -o {size} small {disk}")
    return disk


@fault("The disk for logs is full")
def disk_full(job: Job) -> Seconds:
    """On node 1, when the workers are to start: with `--log-dir=FOLDER --tee=3`.

    Node 1 reports it, the others are informed, and {end} s after the first line all
    agents have ended.
    """
    disk = _mount(job, "nr_inodes=2")
    job.start(f"--log-dir={disk}", "--tee=3", attempt=None)
    job.says("No space left on device")
    end = job.end()
    assert job.codes() == [1, 1, 1]
    assert "Traceback" not in job.output()
    return {"end": end}


@fault("There is no room for the folder of --log-dir", forms=EXEC)
def disk_full_at_first(job: Job) -> Seconds:
    """On node 1, as before, but even before the nodes have met.

    Node 1 reports it, the others are informed, and {end} s after the first line all
    agents have ended.
    """
    disk = _mount(job, "nr_inodes=1")
    job.start(f"--log-dir={disk}/logs", "--tee=3", attempt=None)
    job.says("No space left on device")
    end = job.end(20)
    assert all(job.codes())
    assert "Traceback" not in job.output()
    return {"end": end}


@fault("The disk for logs fills up")
def disk_fills(job: Job) -> Seconds:
    """On node 1, while a worker prints, with `--tee=3`.

    What the worker prints goes to the file first, so it is the worker that fails. There
    is no room for its traceback either: nothing that is printed says why.
    """
    disk = _mount(job, "size=64k")
    job.start(f"--log-dir={disk}", "--tee=3", words="prints")
    job.end()
    assert job.codes() == [1, 1, 1]
    assert "worker 1 on" in job.lines()[-1]
    assert "No space left" not in job.output()
    return {}


@fault("The job is suspended")
def suspended(job: Job) -> Seconds:
    """For 12 s, by `scontrol suspend`, where an agent may be silent for 5 s only.

    Nothing follows: the seconds in which an agent itself does not run do not count.
    """
    job.start(HURRIED)
    number, _, _ = job.launch_id().partition(".")
    job.cluster.run(["scontrol", "suspend", number], check=True)
    processes = [*job.agents(), *job.workers()]
    assert len(processes) == 6
    job.wait(lambda: {p.status() for p in processes} == {psutil.STATUS_STOPPED}, 10)
    steps = job.beats()
    time.sleep(12)
    assert job.beats() == steps
    job.cluster.run(["scontrol", "resume", number], check=True)
    job.wait(lambda: job.beats()[0]["steps"] > steps[0]["steps"] + 70)
    job.stop()
    assert job.lines() == []
    return {}


@fault("An agent gets SIGTERM")
def agent_terminated(job: Job) -> Seconds:
    """The workers of all nodes get it, and have `--shutdown-timeout` seconds (30).

    Here each takes 1 s to save its state; the last one has ended after {others} s, the
    job after {end} s.
    """
    job.start(words="saves")
    workers = job.workers()
    job.agents()[1].terminate()
    others = job.wait(lambda: ended(*workers), 40)
    end = others + job.end(30)
    assert [(job.folder / f"saved.{rank}").exists() for rank in range(3)] == [True] * 3
    assert 1 <= others < 10
    assert job.codes() == [1, 1, 1]
    assert f"{job.hosts[1]} (node 1) received SIGTERM (15)" in job.lines()[-1]
    assert "Traceback" not in job.output()
    return {"others": others, "end": end}


importlib.import_module("faults_with_spares")  # registers those, behind these


# --- the page ---------------------------------------------------------------------

HEAD = """# Faults

<!-- Written by tests/more/faults/test_faults.py with WRITE_FAULTS=1. Do not edit. -->

What follows when something goes wrong, as tests on a real Slurm cluster have seen it:
three nodes, jwb0001 to jwb0003, and one worker on each; with a [spare](spares.md), it
is jwb0004. The workers stand still when a step fails, as NCCL's do, so whatever ends
them is the launcher. Where a job does not go on, all agents that are left end with exit
code 1. The seconds are measured; the tests fail where they are off by more than ten
seconds and more than a quarter, or where another line is printed. Codes lead to
[messages.md](messages.md).
"""
NOTHING = "The launcher prints nothing."
NODE = r"jwb\d+ \(node \d\)"


TITLES = [each.title for each in FAULTS.values()]


def template(name: str) -> str:
    """Return what is written about a fault, with the names of the seconds in it."""
    paragraphs = inspect.cleandoc(FAULTS[name].scenario.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def as_printed(job: Job) -> list[str]:
    """Return the launcher's lines, with names in place of what is another each time."""
    text = "\n".join(job.lines())
    for number, host in enumerate(job.hosts, start=1):
        text = text.replace(host, f"jwb{number:04}")
    text = text.replace(str(job.folder), "FOLDER")
    text = re.sub(r"\d+\.0_\w{8}\b", "JOBID.0_RANDOM", text)
    text = re.sub(r"(i|10\.20\.0\.\d+):\d{5}\b", r"\1:PORT", text)
    text = re.sub(r"(begins in|not run for) \d+ s", r"\1 N s", text)
    text = re.sub(r"at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "at TIME", text)
    # How many others had time to fail, too, is a matter of chance.
    return [line for line in text.splitlines() if not line.startswith(f"{PREFIX}    ")]


def section(name: str, job: Job, seconds: Seconds) -> str:
    """Write a section."""
    shown = {
        key: f"{value:.0f}" if value >= 10 else f"{max(value, 0.1):.1f}"
        for key, value in seconds.items()
    }
    paragraphs = template(name).format(**shown).split("\n\n")
    paragraphs = [
        textwrap.fill(text, 88, break_long_words=False, break_on_hyphens=False)
        for text in paragraphs
    ]
    printed = as_printed(job)
    paragraphs.append("\n".join(["```text", *printed, "```"]) if printed else NOTHING)
    return "\n\n".join([f"## {FAULTS[name].title}", *paragraphs])


def sections() -> dict[str, str]:
    """Read the page's sections, by title."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.strip() for part in parts}


def check(name: str, job: Job, seconds: Seconds) -> None:
    """See that the page says what has happened."""
    written = sections().get(FAULTS[name].title)
    if written is None:
        pytest.fail(f"no section {FAULTS[name].title!r}: run with WRITE_FAULTS=1")
    _, *paragraphs, last = written.split("\n\n")
    text = " ".join(" ".join(paragraphs).split())
    pattern = re.escape(" ".join(template(name).split()))
    for key in seconds:
        pattern = pattern.replace(rf"\{{{key}\}}", rf"(?P<{key}>[0-9.]+)")
    match = re.fullmatch(pattern, text)
    assert match, f"not as in the documentation of {name}: {text}"
    for key, value in seconds.items():
        assert value == pytest.approx(float(match[key]), rel=0.25, abs=10), key
    # Which of two nodes was silent first, or whether both are named in one line, is a
    # matter of chance.
    nodes = f"{NODE}(, {NODE})*"
    lines = [re.sub(nodes, "NODE", line) for line in as_printed(job)]
    known = [re.sub(nodes, "NODE", line) for line in last.splitlines()]
    known = [line for line in known if not line.startswith("```")]
    assert sorted(set(lines or [NOTHING])) == sorted(set(known))


def write(new: dict[str, str]) -> None:
    """Write the page, with the sections that are new."""
    known = sections() | new
    ordered = [known[title] for title in TITLES if title in known]
    PAGE.write_text("\n\n".join([HEAD.strip(), *ordered, ""]), encoding="utf-8")


# --- side by side -----------------------------------------------------------------


Outcome = tuple[Job, Seconds]


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Outcome]]:
    """Start all faults that are asked for, and write the page when it is wanted.

    What is asked for twice, as by ``--reruns``, is started anew on nodes of its own.
    """
    wanted = [
        (item.callspec.params["name"], item.callspec.params["form"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_fault
    ]
    wanted.sort(key=lambda asked: "cut_off" not in asked[0])  # these take longest
    most = sum(FAULTS[name].nodes for name, _ in wanted) + SPARE_NODES
    nodes = [f"jwb{number:04}" for number in range(1, most + 1)]
    unused = iter(nodes)
    pool = ThreadPoolExecutor(most)
    with Cluster(nodes) as cluster:

        def start(name: str, form: str) -> Future[Outcome]:
            hosts = tuple(islice(unused, FAULTS[name].nodes))
            job = Job(cluster, hosts, tmp_path_factory.mktemp(name), form)
            return pool.submit(lambda: (job, FAULTS[name].scenario(job)))

        started = {fault: start(*fault) for fault in wanted}
        asked = set()

        def outcome(name: str, form: str) -> Outcome:
            if (name, form) in asked:
                started[name, form] = start(name, form)
            asked.add((name, form))
            return started[name, form].result()

        try:
            yield outcome
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if WRITES:
        over = {
            name: f
            for (name, form), f in started.items()
            if form == FAULTS[name].forms[0] and f.done() and not f.cancelled()
        }
        write(
            {
                FAULTS[name].title: section(name, *future.result())
                for name, future in over.items()
                if future.exception() is None
            }
        )


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name)
        for form in FORMS
        for name, each in FAULTS.items()
        if form in each.forms
    ],
)
def test_fault(name: str, form: str, outcome: Callable[[str, str], Outcome]) -> None:
    job, seconds = outcome(name, form)
    print({key: round(value, 2) for key, value in seconds.items()})
    if not WRITES:
        check(name, job, seconds)


def test_the_page_has_no_other_sections() -> None:
    assert WRITES or list(sections()) == TITLES
