"""Launches on the test cluster. `launch` waits for the end; a `RealJob` runs meanwhile.

A test reads the end of a launch::

    done = launch(unpadded, "--nproc_per_node=2", nodes=3)
    assert column(done, "host") == ...

Or it does something to a launch that runs until the end of the block::

    with RealJob(unpadded, script=[STEADY, tmp_path], nodes=3) as job:
        job.says("HPC120")
        job.signal(1, "SIGINT")
        job.agent_ends(0)

Nodes have the numbers that the launcher gives them: 0 is the head node.
"""

from __future__ import annotations

import contextlib
import operator
import re
import secrets
import signal
import subprocess
import time
from typing import TYPE_CHECKING, TypedDict

import psutil

from tests.support.cluster.commands import ENVIRON, HPC, WORLD, own_lines
from tests.support.cluster.testbed import LOGIN
from tests.support.patience import START, until
from torchrun_hpc.reporting.console import PREFIX

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self, Unpack

    from tests.support.cluster.testbed import Cluster

    Words = Sequence[str | os.PathLike[str]]

# In the environment of all processes of a launch, and in no other.
MARK = "REAL_JOB"
_MEETING = re.compile(r"(?:meeting|rendezvous) at [\w.-]+:(\d+)")


class Program:
    """A program on a host of the cluster, which ends with its block.

    Args:
        cluster: The cluster.
        words: The program and its arguments.
        host: The host.
        environ: Variables in addition to `ENVIRON`.
        cwd: The working directory.
    """

    def __init__(
        self,
        cluster: Cluster,
        words: Words,
        *,
        host: str = LOGIN,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.cluster = cluster
        self.words = words
        self.mark = secrets.token_hex()
        self._host = host
        self._environ = ENVIRON | dict(environ or {}) | {MARK: self.mark}
        self._cwd = cwd
        self._exit = contextlib.ExitStack()
        self._final: dict[str, str] = {}
        self._forgotten = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it. A block does so, and calls `close` at its end."""
        self._folder = self.cluster.new_folder()
        # Not into pipes: a process that lives longer would keep them open.
        out, err = self._file("stdout"), self._file("stderr")
        with out.open("w") as stdout, err.open("w") as stderr:
            self.process = self.cluster.popen(
                self.words,
                host=self._host,
                env=self._environ,
                cwd=self._cwd,
                stdout=stdout,
                stderr=stderr,
            )
        self._exit.callback(self._keep)
        self._exit.callback(self.cluster.end, self.process)

    def close(self) -> None:
        """End it, if it still runs. Pytest shows what it printed if the test fails."""
        self._exit.close()

    def _keep(self) -> None:
        self._final = {name: self._read(name) for name in ("stdout", "stderr")}
        print(self.output)

    def _file(self, name: str) -> Path:
        return self._folder / name

    def _read(self, name: str) -> str:
        """Return the whole lines that it has printed."""
        if self._final:
            return self._final[name]
        ended = self.has_ended()
        text = self._file(name).read_text(encoding="utf-8", errors="replace")
        return text if ended else text[: text.rfind("\n") + 1]

    # Read

    @property
    def stdout(self) -> str:
        """The standard output so far."""
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return self._read("stderr")

    @property
    def output(self) -> str:
        """Both."""
        return self.stdout + self.stderr

    def lines(self) -> list[str]:
        """Return the launcher's lines since `forget`, without the start line."""
        lines = own_lines(self.stderr[self._forgotten :])
        return [line[line.index(PREFIX) :] for line in lines if START not in line]

    def errors(self) -> list[str]:
        """Return the launcher's errors since `forget`."""
        return [line for line in self.lines() if "error[" in line]

    def forget(self) -> None:
        """Leave out of `lines` and `says` what the launcher has printed so far."""
        self._forgotten = len(self.stderr)

    # Wait

    def wait(self, condition: Callable[[], object]) -> float:
        """Wait until a condition holds or the program has ended.

        Returns:
            The seconds that this took.

        Raises:
            AssertionError: If it does not hold, with the output.
        """
        start = time.monotonic()
        last = until(
            lambda: (condition() and "it holds") or self.has_ended(),
            lambda: self.output,
        )
        seconds = time.monotonic() - start
        assert last == "it holds" or condition(), f"no {condition}:\n{self.output}"
        return seconds

    def says(self, pattern: str) -> float:
        """Wait until it prints text that has this pattern; see `wait`."""
        return self.wait(
            lambda: re.search(pattern, self.stdout + self.stderr[self._forgotten :])
        )

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        return self.process.poll() is not None

    def end(self) -> float:
        """Wait for the end; see `wait`."""
        return self.wait(self.has_ended)

    def ends(self, *codes: int | None) -> float:
        """Wait for the end with these `codes` and without a traceback; see `wait`."""
        seconds = self.end()
        assert self.codes() == [*codes], self.output
        assert "Traceback" not in self.output, self.output
        return seconds

    def codes(self) -> list[int | None]:
        """Return the exit code; None before the end."""
        return [self.process.poll()]

    def done(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end, and return it."""
        self.end()
        return subprocess.CompletedProcess(
            [*self.words], self.process.returncode, self.stdout, self.stderr
        )


class Command(TypedDict, total=False):
    """The command of a launch; see `RealJob`."""

    script: Words
    nodes: int
    hosts: Sequence[str]
    tasks: int
    srun: Words
    first: str
    program: Words
    by: Words


class How(Command, total=False):
    """A command, and where it runs; see `RealJob`."""

    host: str
    environ: Mapping[str, str] | None
    cwd: Path | None


class RealJob(Program):
    """A launch on nodes of the cluster: by default ``srun -N2 python -m torchrun_hpc``.

    Args:
        cluster: The cluster.
        *options: The launcher's options.
        host: Where ``srun`` runs.
        environ: Variables in addition to `ENVIRON`.
        cwd: The working directory.
        **command: The command.

            - script: The script and its arguments.
            - nodes: How many nodes.
            - hosts: The nodes, if Slurm does not choose them.
            - tasks: Tasks on each node.
            - srun: The words between srun and the launcher: options, or a program.
            - first: Shell commands that each task runs first. They may run the launcher
              themselves, as ``"$@"``, and exit.
            - program: The launcher, or another of its commands.
            - by: What starts the tasks, instead of ``srun`` and its options.

    Attributes:
        hosts: The names of the nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        *options: str,
        host: str = LOGIN,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **command: Unpack[Command],
    ) -> None:
        super().__init__(cluster, (), host=host, environ=environ, cwd=cwd)
        self.set_command(*options, **command)

    def set_command(  # noqa: PLR0913
        self,
        *options: str,
        script: Words = (WORLD,),
        nodes: int = 2,
        hosts: Sequence[str] = (),
        tasks: int = 1,
        srun: Words = (),
        first: str = "",
        program: Words = HPC,
        by: Words = (),
    ) -> None:
        """Set the command that `start` runs; see `RealJob`."""
        self.hosts = hosts or self.cluster.names[:nodes]
        self._script = str(script[0]) if script else ""
        self._launch_id = ""
        places = [f"--nodelist={','.join(hosts)}"] if hosts else []
        start = ("srun", f"-N{len(self.hosts)}", *places, f"--ntasks-per-node={tasks}")
        self.words = (
            *(by or (*start, *srun)),
            *(("sh", "-c", f'{first}; exec "$@"', "sh") if first else ()),
            *(*program, *options, *script),
        )

    # What runs

    def processes(self, *nodes: int) -> list[psutil.Process]:
        """Return the processes, shells included, of all nodes or of some."""
        return processes_of(self.mark, *nodes)

    def programs(self, name: str, *nodes: int) -> list[psutil.Process]:
        """Return the processes that run a module or a script, by node."""
        return [each for each in self.processes(*nodes) if program_of(each) == name]

    def agents(self, *nodes: int) -> list[psutil.Process]:
        """Return the agents, by node: their forks may have the same command line."""
        launchers = self.programs("torchrun_hpc", *nodes)
        numbers = {each.pid for each in launchers}
        return [each for each in launchers if _parent_of(each) not in numbers]

    def workers(self) -> list[psutil.Process]:
        """Return the workers, by node."""
        return self.programs(self._script)

    def launch_id(self) -> str:
        """Return the numbers of job and step; an empty text before the first task."""
        for process in () if self._launch_id else self.processes():
            with contextlib.suppress(psutil.Error, KeyError):  # srun, or a fork
                environ = process.environ()
                self._launch_id = (
                    f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
                )
        return self._launch_id

    def job_id(self) -> str:
        """Return the number of the job, as `launch_id`."""
        return self.launch_id().partition(".")[0]

    def port(self) -> int:
        """Wait for the start line, and return the port at which the nodes meet."""
        self.wait(lambda: _MEETING.search(self.stderr))
        (port, *_) = _MEETING.findall(self.stderr)
        return int(port)

    def is_accepted(self, node: int, by: int = 0) -> bool:
        """Return whether the coordinator has answered the agent of a node.

        Args:
            node: The node.
            by: The coordinator's node.
        """
        number = 1 + self.cluster.names.index(self.hosts[by])
        places = f"( dst 10.10.0.{number} or dst 10.20.0.{number} )"
        filters = f"'{places} and dport = :{self.port()}'"
        answered = self.run(node, f"ss -Htin state established {filters}")
        return "bytes_received:" in answered

    def agent_ends(self, *nodes: int) -> None:
        """Wait until the agents of some nodes have ended."""
        self.wait(lambda: not self.agents(*nodes))

    # Act

    def run(self, node: int, command: str) -> str:
        """Run a shell command on a node, and return what it prints."""
        host = self.hosts[node]
        done = self.cluster.run(["sh", "-c", command], host=host, check=True)
        return done.stdout.strip()

    def signal(self, node: int, name: str) -> None:
        """Send a signal to the agent of a node."""
        agents = self.agents(node)
        assert agents, self.output
        for agent in agents:
            agent.send_signal(signal.Signals[name])

    def kill(self, *nodes: int) -> None:
        """Kill all processes of some nodes at once."""
        kill(self.processes(*nodes))

    def cut(self, node: int) -> None:
        """Let nothing through between a node and the others."""
        self.cluster.cut(self.hosts[node])

    def reject(self, node: int, *hooks: str) -> None:
        """Let a firewall answer for a node; see `Cluster.reject`."""
        self.cluster.reject(self.hosts[node], *hooks)

    def heal(self, node: int) -> None:
        """Undo `cut`."""
        self.cluster.heal(self.hosts[node])


def launch(
    cluster: Cluster, *options: str, **how: Unpack[How]
) -> subprocess.CompletedProcess[str]:
    """Run ``srun python -m torchrun_hpc`` to its end.

    Args:
        cluster: The cluster.
        *options: The launcher's options.
        **how: As for `RealJob`.
    """
    with RealJob(cluster, *options, **how) as job:
        return job.done()


def processes_of(mark: str, *nodes: int) -> list[psutil.Process]:
    """Return the processes of a launch, by node.

    Args:
        mark: The value of `MARK` in their environment.
        *nodes: Their nodes; by default all.
    """
    table: dict[int, tuple[psutil.Process, int, Mapping[str, str]]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            table[process.pid] = process, process.ppid(), process.environ()

    def environ_of(pid: int) -> Mapping[str, str]:
        """Return a process's environment. A fork's title hides it: use its parent's."""
        if pid not in table:
            return {}
        _, parent, environ = table[pid]
        return environ if MARK in environ else environ_of(parent)

    processes = []
    for pid, (process, *_) in table.items():
        environ = environ_of(pid)
        node = int(environ.get("SLURM_NODEID", -1))
        if environ.get(MARK) == mark and (not nodes or node in nodes):
            processes.append((node, process))
    return [process for _, process in sorted(processes, key=operator.itemgetter(0))]


def program_of(process: psutil.Process) -> str:
    """Return the module or script that a process runs, or the program without any."""
    with contextlib.suppress(psutil.Error):
        # The title of a fork is one word.
        words = " ".join(process.cmdline()).split()
        names = (word for word in words[1:] if not word.startswith("-"))
        return next(names, "".join(words[:1]))
    return ""


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes at once."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.kill()


def ended(*processes: psutil.Process) -> bool:
    """Return whether processes have ended, collected or not."""
    return not any(map(_runs, processes))


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
