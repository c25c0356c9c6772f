"""Signals to a step: each reaches each worker once, whomever Slurm sends it to."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, FORMS, HPC, ONE_TASK, SCRIPTS, column, read_workers
from waiting import until

if TYPE_CHECKING:
    import subprocess


SCRIPT = str(SCRIPTS / "signals.py")
WORKERS = 4  # on two nodes


class Signalled:
    """A step, and what its workers have got."""

    def __init__(self, cluster, folder, form):
        self.cluster = cluster
        self.folder = folder
        self.output = folder / "output"
        # Up to torch 2.3 an agent looks after its workers every 5 s.
        options = ("--nproc_per_node=2", "--monitor-interval=0.1")
        with self.output.open("w") as output:
            self.program: subprocess.Popen[str] = cluster.popen(
                ["srun", "-N2", ONE_TASK, *HPC, *options, SCRIPT, str(folder)],
                env=ENVIRON | FORMS[form],
                stdout=output,
                stderr=output,
            )
        files = [folder / f"{rank}.ready" for rank in range(WORKERS)]
        self.wait(lambda: all(file.exists() for file in files))
        self.agents = {}
        for file in files[::2]:
            host, parent, self.job = file.read_text().split()
            if form == "fork":  # that is the fork server
                parent = self.run(host, "ps", "-o", "ppid=", "-p", parent)
            self.agents[host] = parent

    def run(self, host, *words):
        return self.cluster.run(words, host=host, check=True).stdout.strip()

    def wait(self, condition):
        until(condition, self.output.read_text)

    def kill(self, name, *hosts):
        """Signal the agents alone, as Slurm does with cgroups."""
        for host in hosts:
            self.run(host, "kill", f"-{name}", self.agents[host])

    def scancel(self, name):
        """Signal all that descends from the agents, as Slurm does without."""
        self.cluster.run(["scancel", "-s", name, self.job], check=True)

    def got(self, *names):
        """Wait until each worker has got just these."""
        files = [self.folder / f"{rank}.got" for rank in range(WORKERS)]
        expected = [*names]

        def found():
            return [f.read_text().split() if f.exists() else [] for f in files]

        until(
            lambda: found() == expected,
            lambda: f"{found()}\n{self.output.read_text()}",
        )

    def probes(self):
        """Return the processes with which agents find out who got a signal.

        There is another one when that is known, and what is left has been delivered.
        """
        return [
            self.cluster.run(
                ["pgrep", "--parent", agent, "--exact", "cat"], host=host
            ).stdout.strip()
            for host, agent in self.agents.items()
        ]

    def is_renewed(self, before):
        """Return whether each agent has another such process than before."""
        return not {*before, ""} & {*self.probes()}

    def end(self):
        """Wait for its end, and return its output."""
        self.wait(lambda: self.program.poll() is not None)
        return self.output.read_text()


@pytest.mark.release
def test_signals_to_a_step(unpadded, tmp_path):
    job = Signalled(unpadded, tmp_path, "fork")
    first, second = "SIGUSR1", "SIGUSR2"
    try:
        job.kill("USR1", "n9")
        job.got([first], [first], [], [])
        for number in signal.SIGUSR2, signal.SIGUSR1:
            job.wait(lambda: all(job.probes()))
            before = job.probes()
            if number == signal.SIGUSR2:
                job.scancel("USR2")
            else:
                job.program.send_signal(number)  # srun passes it on
            job.wait(lambda before=before: job.is_renewed(before))
        job.kill("USR2", "n9", "n10")
        every = [second, first, second]
        job.got([first, *every], [first, *every], every, every)
        (tmp_path / "end").touch()
        output = job.end()
    finally:
        unpadded.end(job.program)
    assert job.program.returncode == 0, output
    assert column(output, "got") == [
        ([first, *every],), ([first, *every],), (every,), (every,)
    ], output  # fmt: skip
    assert "warning" not in output


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_before_the_end(unpadded, tmp_path, form):
    """SIGTERM to one agent, and SIGINT to all: each worker has time to write it."""
    job = Signalled(unpadded, tmp_path, form)
    try:
        if form == "exec":
            job.kill("TERM", "n10")
        else:
            job.scancel("INT")
        output = job.end()
    finally:
        unpadded.end(job.program)
    assert len([*tmp_path.glob("*.saved")]) == WORKERS, output
    assert job.program.returncode == 1, output
    workers = column(read_workers(output), "got")
    if form == "exec":
        assert "received SIGTERM (15)" in output
        assert workers == [(["SIGTERM"],)] * WORKERS, output
    else:  # from Slurm, and from the agent
        assert "received SIGINT (2)" in output
        assert [{*got} for (got,) in workers] == [{"SIGINT"}] * WORKERS, output
    assert "Traceback" not in output
