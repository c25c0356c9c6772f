"""What a launch says at its end of a launcher that may wait for a lost node."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plans import PLAN
from torchrun_hpc.agent import end
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.rendezvous.errors import JobFailedError
from torchrun_hpc.schedulers import hydra, openmpi, pbs

TWO_NODES = Meeting("c10d", nodes=2, hosts=("dec0001", "dec0002"), launch_id="7")
LOST = Failure(Kind.LOST, (1,))
SILENT = Failure(Kind.SILENT, (1,), code=30)
STOP = Failure(Kind.SIGNAL, (1,), code=15)


@pytest.mark.parametrize(
    ("started_by", "failure", "out", "waits"),
    [
        (pbs.PBSDSH, None, (1,), True),
        (pbs.PBSDSH, LOST, (), True),
        (pbs.PBSDSH, STOP, (), False),
        (pbs.PBSDSH, None, (), False),
        (openmpi.MPIRUN, None, (1,), True),  # with --enable-recovery
        (openmpi.MPIRUN, LOST, (1,), False),  # it has ended the job
        (openmpi.MPIRUN, SILENT, (), True),
        (hydra.MPIEXEC, None, (1,), True),
        (hydra.MPIEXEC, SILENT, (), True),
        (hydra.MPIEXEC, LOST, (), False),
        (None, LOST, (), False),
        (None, SILENT, (), False),
    ],
)
def test_a_launcher_that_may_wait(started_by, failure, out, waits, capsys):
    plan = replace(PLAN, meeting=replace(TWO_NODES, started_by=started_by))
    ended: Any = SimpleNamespace(
        failure=failure,
        meeting=plan.meeting,
        reports=True,
        restarts=0,
        takeovers=0,
        out_at_end=out,
        is_certain=True,
    )
    end._report(plan, ended, is_command=False)
    name = started_by.name if started_by else ""
    written = capsys.readouterr().err
    text = f"warning[HPC235]: {name} may wait forever for a lost node. End the job"
    assert (text in written) is waits
    assert ("HPC213" in written) is bool(out)


class Struck(DeathSignals):
    """Gets a signal when its launch ends, just before it ignores signals."""

    is_struck = False

    def end(self):
        if not self.is_struck:
            self.is_struck = True
            signal.raise_signal(signal.SIGTERM)
        super().end()


@pytest.mark.parametrize("problem", [JobFailedError(LOST), None])
def test_a_signal_when_the_job_fails_or_is_done(problem):
    """The other nodes learn of it in the usual way."""
    left = []
    world: Any = SimpleNamespace(
        leave=lambda _: left.append(True), took_part=False, failure=None
    )
    plan = replace(PLAN, meeting=replace(TWO_NODES, backend="scheduler"))

    def run():
        with end.together(plan, world, Struck(), is_command=False):
            if problem is not None:
                raise problem

    with pytest.raises(SystemExit) as ended:
        run()
    assert (ended.value.code, left) == (128 + signal.SIGTERM, [True])
