"""Jobs on the test cluster that something is done to, and the register of faults."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from commands import FORMS, HPC, JUELICH, ONE_TASK, SCRIPTS, own_lines
from waiting import PATIENCE

from torchrun_hpc.planning import endpoints
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

SCRIPT = str(SCRIPTS / "training.py")

# The first line, and that others are waited for, where that takes long.
ORDINARY = re.compile("HPC001|HPC113|HPC114")

# Torch is loaded six times by each job that starts. All may wait at the same time.
STARTING = threading.Semaphore(2)

# What a job needs that is to outlive its nodes.
OUTLIVES = ("--no-kill", "--kill-on-bad-exit=0")

# Each node: what is to be done first, the launcher, and how it ended.
SHELL = (
    'echo "$SLURM_JOB_ID.$SLURM_STEP_ID" > "$0/launch_id"; {first}\n'
    '"$@"; echo $? > "$0/exit.$SLURM_NODEID"'
)


@dataclass
class Job:
    """Some nodes, and the job on them, which has three workers.

    Attributes:
        cluster: The cluster.
        hosts: Nodes of it that nobody else uses; those behind the third are spares.
        folder: What the workers write, and what the launcher prints.
        form: How its workers are started; see `FORMS`.
    """

    cluster: Cluster
    hosts: tuple[str, ...]
    folder: Path
    form: str
    program: subprocess.Popen[str] = field(init=False)

    def start(
        self,
        *options: str,
        words: str = "",
        first: str = "",
        attempt: int | None = 0,
    ) -> None:
        """Start it, and wait until all workers are at work, and all spares wait.

        Args:
            options: The launcher's.
            words: The script's arguments.
            first: What the shell on each node does before.
            attempt: Wait until they are after so many restarts; None: do not wait.
        """
        with STARTING:
            shell = SHELL.format(first=first)
            spares = len(self.hosts) - 3
            if spares:
                options = (f"--hpc-spares={spares}", *options)
            with (self.folder / "output").open("w") as output:
                self.program = self.cluster.popen(
                    [
                        *("srun", f"-N{len(self.hosts)}", ONE_TASK, "--label"),
                        *("--nodelist", ",".join(self.hosts)),
                        *(OUTLIVES if spares else ()),
                        *("sh", "-c", shell, str(self.folder)),
                        *(*HPC, *options, SCRIPT, str(self.folder), *words.split()),
                    ],
                    env=JUELICH | FORMS[self.form],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            if attempt is not None:
                self.wait(partial(self.trains, attempt))
                self.wait(lambda: all(map(self.is_accepted, range(3, len(self.hosts)))))

    def launch_id(self) -> str:
        """Return the numbers of job and step, once it runs."""
        file = self.folder / "launch_id"
        return file.read_text().strip() if file.exists() else ""

    def beats(self) -> list[dict[str, Any]]:
        """Return what the workers wrote last."""
        files = [self.folder / f"beat.{rank}" for rank in range(3)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def places(self) -> tuple[str, ...]:
        """Return the nodes of the workers, by rank."""
        return tuple(beat["host"] for beat in self.beats())

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once."""
        for process in self.processes(node):
            process.kill()

    def trains(self, attempt: int = 0) -> bool:
        """Say whether all workers are at work, after so many restarts."""
        return [beat["attempt"] for beat in self.beats()] == [attempt] * 3

    def is_accepted(self, node: int) -> bool:
        """Say whether the coordinator has answered the agent of a node."""
        port = endpoints.ports_of(self.launch_id())[0]
        answered = f"ss -Htin state established dport = :{port}"
        return "bytes_received:" in self.run(node, answered)

    def listens(self, node: int, port: int) -> bool:
        """Say whether a program of a node listens on a port."""
        return bool(self.run(node, f"ss -Htln sport = :{port}"))

    def stop(self) -> None:
        """Let the workers stop as they should, and see that all ends well."""
        (self.folder / "stop").touch()
        self.end()
        assert self.codes() == [0, 0, 0], self.output()

    def output(self) -> str:
        """Return what all nodes have printed, each line behind its node rank."""
        return (self.folder / "output").read_text(errors="replace")

    def wait(self, condition: Callable[[], object], limit: float = PATIENCE) -> float:
        """Wait until it holds; return how many seconds that took."""
        start = time.monotonic()
        while True:
            over = self.program.poll() is not None or time.monotonic() > start + limit
            if condition():
                return time.monotonic() - start
            assert not over, f"{condition} after {limit} s:\n{self.output()}"
            time.sleep(0.02)

    def says(self, text: str, limit: float = PATIENCE) -> float:
        """Wait until the launcher has printed it; return how many seconds that took."""
        return self.wait(lambda: any(text in line for line in self.lines()), limit)

    def lines(self) -> list[str]:
        """Return what the launcher itself has printed, but for what any job prints."""
        lines = own_lines(self.output())
        return [
            line[line.index(PREFIX) :] for line in lines if not ORDINARY.search(line)
        ]

    def end(self, limit: float = 60) -> float:
        """Wait for the end of all; return how many seconds that took."""
        return self.wait(lambda: self.program.poll() is not None, limit)

    def codes(self) -> list[int | None]:
        """Return the agents' exit codes, as a shell sees them."""
        nodes = range(len(self.hosts))
        files = [self.folder / f"exit.{node}" for node in nodes]
        return [int(file.read_text()) if file.exists() else None for file in files]

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """Return all of this job's, shells included, or those of one node."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, KeyError):  # ended, or srun itself
                words = " ".join(process.cmdline())
                if str(self.folder) in words and node in {None, _node_of(process)}:
                    found.append(process)
        return found

    def agents(self) -> list[psutil.Process]:
        """Return the agents, by node rank."""
        return self._programs("torchrun_hpc")

    def workers(self) -> list[psutil.Process]:
        """Return the workers, by rank: each node has one."""
        return self._programs(SCRIPT)

    def _programs(self, name: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, KeyError):
                # Of a fork, all is one word.
                if name in " ".join(process.cmdline()).split()[:3]:
                    found.append((_node_of(process), process))
        return [process for _, process in sorted(found, key=operator.itemgetter(0))]

    def run(self, node: int, command: str) -> str:
        """Run a shell command on a node."""
        done = self.cluster.run(
            ["sh", "-c", command], host=self.hosts[node], check=True
        )
        return done.stdout.strip()


def _node_of(process: psutil.Process) -> int:
    """Return the rank of its node; a fork's own variables are not to be seen."""
    line = (process, *process.parents())
    first = next(each for each in line if "SLURM_NODEID" in each.environ())
    return int(first.environ()["SLURM_NODEID"])


def ended(*processes: psutil.Process) -> bool:
    """Say whether processes have ended, collected or not."""
    return not any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the register ------------------------------------------------------------------

Seconds = dict[str, float]
Scenario = Callable[["Job"], Seconds]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        scenario: Does it, and checks what follows.
        title: Of its section on the page.
        nodes: How many there are.
        forms: How workers are started; see `FORMS`. One is enough for what agents
            alone have to do with.
    """

    scenario: Scenario
    title: str
    nodes: int
    forms: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def fault(
    title: str, nodes: int = 3, forms: tuple[str, ...] = tuple(FORMS)
) -> Callable[[Scenario], Scenario]:
    """Make a test and a section of the page of a function; see `Fault`."""

    def register(function: Scenario) -> Scenario:
        FAULTS[function.__name__] = Fault(function, title, nodes, forms)
        return function

    return register
