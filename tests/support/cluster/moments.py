"""Signals to an agent at random moments of a launch, and what may come of them."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from tests.support.cluster.commands import ENVIRON, FORMS, HPC, KILL, ONE_TASK, SCRIPTS
from tests.support.cluster.real_job import MARK, processes_of, program_of
from tests.support.patience import START, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.cluster.testbed import Cluster

SCRIPT = str(SCRIPTS / "moments.py")
WORKERS = 2  # on each node
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")

# Seconds. A signal that comes so late may find workers that are done: it may wait 1 s,
# and a forwarded one 0.2 s.
_LATE = 1.7
_LONGEST = 5.0  # of a quiet launch on one node
_PAUSE = 0.002
_START = 0.03  # of a worker, until it is its script


@dataclass(frozen=True)
class Moment:
    """A signal, and when an agent gets it.

    Attributes:
        name: The signal's.
        form: How workers are started: a key of `FORMS`.
        nodes: How many.
        restarts: How often rank 0 fails before it is done.
        start: Which start of workers it aims at, from 1; 0 for any time.
        after: Seconds, from the begin of the launch or of that start.
        node: Which agent gets it.
    """

    name: str
    form: str
    nodes: int
    restarts: int
    start: int
    after: float
    node: int


@dataclass(frozen=True)
class End:
    """How a launch ended: ``notes`` are what each rank wrote, with the times."""

    code: int
    stderr: str
    notes: Mapping[int, list[tuple[str, float]]]
    sent: float  # seconds since 1970; 0 if it had ended before
    left: list[str]

    def times(self, what: str) -> list[float]:
        """Return when each rank last noted this, without those that did not."""
        of_ranks = (
            [t for word, t in notes if word == what] for notes in self.notes.values()
        )
        return [times[-1] for times in of_ranks if times]


def moments(seed: int, count: int, nodes: tuple[int, ...] = (1, 3)) -> Iterator[Moment]:
    """Yield random moments of all kinds: half of them at a start of workers."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    kinds = itertools.product((0, 1), NAMES, FORMS, nodes)
    for _, (aims, name, form, number) in zip(
        range(count), itertools.cycle(kinds), strict=False
    ):
        restarts = chance.randrange(2)
        start = aims and chance.randint(1, 1 + restarts)
        after = chance.uniform(0, _START if start else _LONGEST * (1 + (number > 1)))
        yield Moment(
            name, form, number, restarts, start, after, chance.randrange(number)
        )


def strike(moment: Moment, cluster: Cluster | None) -> End:
    """Launch, send the signal, and return how the launch ended.

    Raises:
        AssertionError: If it does not end.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        Path(folder).chmod(0o777)
        words = [
            *HPC, f"--nproc_per_node={WORKERS}", f"--max-restarts={moment.restarts}",
            "--monitor-interval=0.1", SCRIPT, folder, str(moment.restarts),
        ]  # fmt: skip
        environ = {**ENVIRON, **FORMS[moment.form], MARK: folder}
        streams: dict[str, Any] = {"stdout": stderr, "stderr": stderr}
        if cluster is None:
            words[0] = sys.executable
            launch = subprocess.Popen(words, env=environ, text=True, **streams)
        else:
            words[:0] = ["srun", f"-N{moment.nodes}", ONE_TASK, KILL]
            launch = cluster.popen(words, env=environ, **streams)
        sent = _send(moment, launch, folder)
        until(lambda: launch.poll() is not None, lambda: (moment, _read(stderr)))
        left = _left_behind(folder)
        return End(launch.returncode, _read(stderr), _notes(Path(folder)), sent, left)


def wrong(moment: Moment, end: End) -> str:
    """Return what is wrong with an end; nothing if it is as it should be."""
    if end.left:
        return f"left behind: {end.left}"
    if "ignored in" in end.stderr or (end.code == 0 and "Traceback" in end.stderr):
        return "an exception without effect"
    if end.code == 0:
        return _wrong_success(moment, end)
    number = signal.Signals[moment.name]
    may_be = {-number, 128 + number}  # before Python has a handler, or after the job
    if number != signal.SIGUSR1:
        may_be.add(1)
    elif START in end.stderr:
        may_be.clear()
    if may_be and moment.nodes > 1:  # Slurm ends the other tasks
        may_be.add(128 + signal.SIGTERM)
    return "" if end.sent and end.code in may_be else f"exit code {end.code}"


def _wrong_success(moment: Moment, end: End) -> str:
    done, every = end.times("done"), moment.nodes * WORKERS
    if len(done) < every:
        return "exit code 0, but not all workers are done"
    if not 0 < end.sent < min(done) - _LATE:
        return ""
    if moment.name != "SIGUSR1":
        return "the signal is lost"
    workers = range(moment.node * WORKERS, (moment.node + 1) * WORKERS)
    has_all = all("SIGUSR1" in dict(end.notes[rank]) for rank in workers)
    return "" if has_all else "a worker did not get SIGUSR1"


def _send(moment: Moment, launch: subprocess.Popen[str], folder: str) -> float:
    """Send the signal when it is time; return when that was, or 0."""
    begin, starts, workers = time.monotonic(), 0, set[int]()
    agent: psutil.Process | None = launch if moment.nodes == 1 else None  # type: ignore[assignment]
    while launch.poll() is None:
        agent = agent or _agent(folder, moment.node)
        if agent is not None and moment.start:
            new = _workers(agent.pid, moment.form) - workers
            starts += bool(new) and not workers & _workers(agent.pid, moment.form)
            workers |= new
            if starts >= moment.start:
                begin = time.monotonic()
                break
        elif time.monotonic() - begin >= moment.after:
            break
        time.sleep(_PAUSE)
    time.sleep(max(begin + moment.after - time.monotonic(), 0) if moment.start else 0)
    now = time.time()
    if agent is None or launch.poll() is not None:
        return 0
    with suppress(psutil.Error, ProcessLookupError):
        agent.send_signal(signal.Signals[moment.name])
        return now
    return 0


def _workers(agent: int, form: str) -> set[int]:
    children = _children(agent)
    if form == "fork":
        return {pid for child in children for pid in _children(child)}
    return {pid for pid in children if _name(pid) != "cat"}  # the probe of signals


def _children(pid: int) -> set[int]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return {int(number) for number in text.split()}
    return set()


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return "cat"


def _agent(folder: str, node: int) -> psutil.Process | None:
    agents = (p for p in processes_of(folder, node) if program_of(p) == "torchrun_hpc")
    return next(agents, None)


def _left_behind(folder: str) -> list[str]:
    """Return the processes that still run some seconds after the end of a launch."""
    end = time.monotonic() + 5
    while left := processes_of(folder):
        if time.monotonic() > end:
            return [str(process) for process in left]
        time.sleep(0.1)
    return []


def _notes(folder: Path) -> dict[int, list[tuple[str, float]]]:
    notes = {}
    for file in folder.iterdir():
        pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
        notes[int(file.name)] = [(word, float(when)) for word, when in pairs]
    return notes


def _read(file: IO[str]) -> str:
    file.seek(0)
    return str(file.read())
