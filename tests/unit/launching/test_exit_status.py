"""What a launch says at its end of a launcher that may wait for a lost node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from plans import make_launch_plan

from torchrun_hpc.launching import exit_status
from torchrun_hpc.rendezvous.protocol import Failure, Kind

LOST = Failure(Kind.LOST, (1,))
STOP = Failure(Kind.SIGNAL, (1,), code=15)


@pytest.mark.parametrize(
    ("started_by", "failure", "out", "waits"),
    [
        ("pbsdsh", None, (1,), True),
        ("pbsdsh", LOST, (), True),
        ("pbsdsh", STOP, (), False),
        ("pbsdsh", None, (), False),
        ("mpirun", None, (1,), True),  # with --enable-recovery
        ("mpirun", LOST, (1,), False),  # it has ended the job
        ("mpiexec", None, (1,), False),
        ("", LOST, (), False),
    ],
)
def test_a_launcher_that_may_wait(started_by, failure, out, waits, capsys):
    plan = make_launch_plan(
        nodes=2, hosts=("dec0001", "dec0002"), started_by=started_by, launch_id="7"
    )
    ended = SimpleNamespace(
        failure=failure, restarts=0, out_at_end=out, is_certain=True
    )
    exit_status._conclude(plan, ended, is_command=False)
    written = capsys.readouterr().err
    text = f"warning: HPC235 {started_by} may wait for a lost node forever. Let the job"
    assert (text in written) is waits
    assert ("HPC213" in written) is bool(out)
