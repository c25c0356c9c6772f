"""Signals to a step: each reaches each worker once, whomever Slurm sends it to."""

from __future__ import annotations

import signal

import pytest

from tests.support.cluster.commands import FORMS, SCRIPTS, column
from tests.support.cluster.real_job import RealJob

SCRIPT = str(SCRIPTS / "note_signals.py")
WORKERS = 4  # on two nodes


class SignalledJob(RealJob):
    """Four workers on two nodes that note the signals they get."""

    def __init__(self, cluster, folder, form):
        # Up to torch 2.3 an agent looks after its workers every 5 s.
        options = ("--nproc_per_node=2", "--monitor-interval=0.1")
        super().__init__(
            cluster, *options, script=[SCRIPT, folder], environ=FORMS[form]
        )
        self.folder = folder

    def __enter__(self):
        self.start()
        self.wait(lambda: len([*self.folder.glob("*.ready")]) == WORKERS)
        return self

    def scancel(self, name):
        """Signal all that descends from the agents, as Slurm does without cgroups.

        `signal` sends to the agent alone, as Slurm does with cgroups.
        """
        self.cluster.run(["scancel", "-s", name, self.job_id()], check=True)

    def got(self, *names):
        """Wait until each worker has got just these signals."""
        files = [self.folder / f"{rank}.got" for rank in range(WORKERS)]
        self.wait(
            lambda: (
                [f.read_text().split() if f.exists() else [] for f in files] == [*names]
            )
        )

    def probes(self):
        """Return the processes with which agents find out who got a signal.

        When an agent knows that, and has forwarded the signal, it starts another one.
        """
        return {*self.programs("cat")}

    def wait_for_new_probes(self, before):
        """Wait until each agent has another probe."""
        self.wait(lambda: len(self.probes() - before) == 2)


@pytest.mark.release
def test_signals_to_a_step(unpadded, tmp_path):
    first, second = "SIGUSR1", "SIGUSR2"
    with SignalledJob(unpadded, tmp_path, "fork") as job:
        job.signal(0, "SIGUSR1")
        job.got([first], [first], [], [])
        for number in signal.SIGUSR2, signal.SIGUSR1:
            job.wait(lambda: len(job.probes()) == 2)
            before = job.probes()
            if number == signal.SIGUSR2:
                job.scancel("USR2")
            else:
                job.process.send_signal(number)  # srun passes it on
            job.wait_for_new_probes(before)
        for node in range(2):
            job.signal(node, "SIGUSR2")
        every = [second, first, second]
        job.got([first, *every], [first, *every], every, every)
        (tmp_path / "end").touch()
        job.ends(0)
    assert column(job.output, "got") == [
        ([first, *every],), ([first, *every],), (every,), (every,)
    ], job.output  # fmt: skip
    assert "warning" not in job.output


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_before_the_end(unpadded, tmp_path, form):
    """SIGTERM to one agent, and SIGINT to all: each worker has time to write it."""
    with SignalledJob(unpadded, tmp_path, form) as job:
        if form == "exec":
            job.signal(1, "SIGTERM")
        else:
            job.scancel("INT")
        job.ends(1)
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
