"""Jobs on the test cluster that something is done to."""

from __future__ import annotations

import contextlib
import json
import operator
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.cluster.commands import (
    FORMS,
    HPC,
    JUELICH,
    ONE_TASK,
    SCRIPTS,
    own_lines,
)
from tests.support.patience import NEVER_S, START, until
from torchrun_hpc.planning import head_node
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

SCRIPT = str(SCRIPTS / "training.py")

# No silence ends a job with these, and no worker is killed that does not end: what
# follows a fault is known from connections that close, and from SIGTERM.
NEVER = (
    f"--rdzv_conf=keep_alive_interval={NEVER_S},keep_alive_max_attempt=1",
    f"--shutdown-timeout={NEVER_S}",
)

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
        expected: The nodes where its workers should be, by rank.
    """

    cluster: Cluster
    hosts: tuple[str, ...]
    folder: Path
    form: str
    program: subprocess.Popen[str] = field(init=False)
    expected: list[str] = field(init=False)
    _known: int = 0  # characters of the output

    def __post_init__(self) -> None:
        self.expected = list(self.hosts[:3])

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
                late = f"--hpc-spare-after={NEVER_S}"
                options = (f"--hpc-spares={spares}", late, *options)
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

    def kill(self, *nodes: int) -> None:
        """Kill all processes of some nodes at once."""
        for process in self.processes(*nodes):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with its parent
                process.kill()

    def trains(self, attempt: int = 0) -> bool:
        """Say whether all workers are at work, after so many restarts."""
        return [beat["attempt"] for beat in self.beats()] == [attempt] * 3

    def is_accepted(self, node: int, by: int = 0) -> bool:
        """Say whether the coordinator has answered the agent of a node without workers.

        Args:
            node: The one.
            by: The node of the coordinator.
        """
        port = head_node.port_of(self.launch_id())
        address = self.address(by)
        answered = f"ss -Htin state established dst {address} and dport = :{port}"
        return "bytes_received:" in self.run(node, answered)

    def address(self, node: int) -> str:
        """Return the address of a node on the fast network."""
        return f"10.20.0.{1 + self.cluster.names.index(self.hosts[node])}"

    def listens(self, node: int, port: int) -> bool:
        """Say whether a program of a node listens on a port."""
        return bool(self.run(node, f"ss -Htln sport = :{port}"))

    def stop(self) -> None:
        """Let the workers stop as they should, and see that all ends well."""
        (self.folder / "stop").touch()
        self.ends(0, 0, 0)

    def output(self) -> str:
        """Return what all nodes have printed, each line behind its node rank."""
        return (self.folder / "output").read_text(errors="replace")

    def wait(self, condition: Callable[[], object]) -> float:
        """Wait until it holds, or the job has ended; return how many seconds that took.

        Raises:
            AssertionError: If it does not hold, with the output of the whole job.
        """
        start = time.monotonic()
        last = until(
            lambda: (condition() and "it holds") or self.has_ended(), self.output
        )
        seconds = time.monotonic() - start
        assert last == "it holds" or condition(), f"no {condition}:\n{self.output()}"
        return seconds

    def says(self, text: str) -> float:
        """Wait until the launcher has printed it; return how many seconds that took."""
        return self.wait(lambda: any(text in line for line in self.lines()))

    def lines(self) -> list[str]:
        """Return what the launcher printed since `forget`, but for the start line."""
        lines = own_lines(self.output()[self._known :])
        return [line[line.index(PREFIX) :] for line in lines if START not in line]

    def forget(self) -> None:
        """Leave out of `lines` what has been printed so far."""
        self._known = self.output().rindex("\n") + 1

    def has_ended(self) -> bool:
        """Say whether the job has ended."""
        return self.program.poll() is not None

    def end(self) -> float:
        """Wait for the end of all; return how many seconds that took."""
        return self.wait(self.has_ended)

    def ends(self, *codes: int | None) -> float:
        """Wait for the end of all, with these exit codes of the agents; see `end`."""
        seconds = self.end()
        assert self.codes() == list(codes), self.output()
        assert "Traceback" not in self.output(), self.output()
        return seconds

    def codes(self) -> list[int | None]:
        """Return the agents' exit codes, as a shell sees them."""
        nodes = range(len(self.hosts))
        files = [self.folder / f"exit.{node}" for node in nodes]
        return [int(file.read_text()) if file.exists() else None for file in files]

    def processes(self, *nodes: int) -> list[psutil.Process]:
        """Return all of this job's, shells included, or those of some nodes."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, KeyError):  # ended, or srun itself
                words = " ".join(process.cmdline())
                if str(self.folder) not in words:
                    continue
                if not nodes or _node_of(process) in nodes:
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
