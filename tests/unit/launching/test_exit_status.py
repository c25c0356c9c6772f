"""What a launch says at its end of a launcher that may wait for a lost node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from plans import make_launch_plan

from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.launching import exit_status
from torchrun_hpc.schedulers import hydra, openmpi, pbs

LOST = Failure(Kind.LOST, (1,))
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
        (hydra.MPIEXEC, None, (1,), False),
        (None, LOST, (), False),
    ],
)
def test_a_launcher_that_may_wait(started_by, failure, out, waits, capsys):
    plan = make_launch_plan(
        nodes=2, hosts=("dec0001", "dec0002"), started_by=started_by, launch_id="7"
    )
    ended = SimpleNamespace(
        failure=failure, reports=True, restarts=0, out_at_end=out, is_certain=True
    )
    exit_status._report(plan, ended, is_command=False)
    name = started_by.name if started_by else ""
    written = capsys.readouterr().err
    text = f"warning[HPC235]: {name} may wait forever for a lost node. End the job"
    assert (text in written) is waits
    assert ("HPC213" in written) is bool(out)
