"""Signals to a step: each reaches each worker once, whomever Slurm sends it to."""

from __future__ import annotations

import signal

import pytest

from tests.support.cluster.commands import FORMS, HPC, SCRIPTS, column
from tests.support.cluster.steps import Step
from tests.support.patience import until

SCRIPT = str(SCRIPTS / "signals.py")
WORKERS = 4  # on two nodes


class Signalled(Step):
    """A step, and what its workers have got."""

    def __init__(self, cluster, folder, form):
        # Up to torch 2.3 an agent looks after its workers every 5 s.
        options = ("--nproc_per_node=2", "--monitor-interval=0.1")
        argv = (*HPC, *options, SCRIPT, str(folder))
        super().__init__(cluster, *argv, nodes=2, environ=FORMS[form])
        self.folder = folder
        self.form = form
        self.agents = {}

    def __enter__(self):
        files = [self.folder / f"{rank}.ready" for rank in range(WORKERS)]
        try:
            self.wait(lambda: all(file.exists() for file in files))
        except BaseException:
            self.__exit__()
            raise
        for file in files[::2]:
            host, parent, self.job = file.read_text().split()
            if self.form == "fork":  # that is the fork server
                parent = self.run(host, "ps", "-o", "ppid=", "-p", parent)
            self.agents[host] = parent
        return self

    def run(self, host, *words):
        return self.cluster.run(words, host=host, check=True).stdout.strip()

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

        until(lambda: found() == expected, lambda: f"{found()}\n{self.output}")

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

    def wait_for_new_probes(self, before):
        """Wait until each agent has a new probe process.

        Process numbers are per host: a new one here can equal an old one there.
        """

        def all_are_new():
            pairs = zip(before, self.probes(), strict=True)
            return all(new and new != old for old, new in pairs)

        self.wait(all_are_new)


@pytest.mark.release
def test_signals_to_a_step(unpadded, tmp_path):
    first, second = "SIGUSR1", "SIGUSR2"
    with Signalled(unpadded, tmp_path, "fork") as job:
        job.kill("USR1", "n9")
        job.got([first], [first], [], [])
        for number in signal.SIGUSR2, signal.SIGUSR1:
            job.wait(lambda: all(job.probes()))
            before = job.probes()
            if number == signal.SIGUSR2:
                job.scancel("USR2")
            else:
                job.program.send_signal(number)  # srun passes it on
            job.wait_for_new_probes(before)
        job.kill("USR2", "n9", "n10")
        every = [second, first, second]
        job.got([first, *every], [first, *every], every, every)
        (tmp_path / "end").touch()
        assert job.end() == 0, job.output
    assert column(job.output, "got") == [
        ([first, *every],), ([first, *every],), (every,), (every,)
    ], job.output  # fmt: skip
    assert "warning" not in job.output


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_before_the_end(unpadded, tmp_path, form):
    """SIGTERM to one agent, and SIGINT to all: each worker has time to write it."""
    with Signalled(unpadded, tmp_path, form) as job:
        if form == "exec":
            job.kill("TERM", "n10")
        else:
            job.scancel("INT")
        assert job.end() == 1, job.output
    assert len([*tmp_path.glob("*.saved")]) == WORKERS, job.output
    workers = column(job.output, "got")
    if form == "exec":
        assert "received SIGTERM (15)" in job.output
        assert workers == [(["SIGTERM"],)] * WORKERS, job.output
    else:  # Slurm sends SIGINT; an agent that hears of it from the other, SIGTERM
        assert "received SIGINT (2)" in job.output
        assert len(workers) == WORKERS, job.output
        for (got,) in workers:
            assert "SIGINT" in got, job.output
            assert {*got} <= {"SIGINT", "SIGTERM"}, job.output
    assert "Traceback" not in job.output
