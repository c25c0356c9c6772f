"""In Slurm: one command trains where the management network is closed."""

from __future__ import annotations

import re

import pytest

from tests.support.cluster.commands import DDP, FORMS, JUELICH, lines
from tests.support.cluster.real_job import launch
from tests.support.stock.trainings import alone, loss_of

SCRIPT = f"""
import runpy, sys
sys.stderr.write("to stderr\\n")
runpy.run_path({DDP!r}, run_name="__main__")
"""


def test_one_command_trains(juelich, tmp_path):
    """The launcher says one line, torch nothing, and the script's output is its own."""
    tmp_path.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    foreign = juelich.foreign_bytes("eth0")
    before = juelich.counters()
    environ = JUELICH | FORMS["fork"]
    done = launch(juelich, "--nproc_per_node=2", script=[script], environ=environ)
    assert done.returncode == 0
    *told, last = sorted(done.stdout.splitlines(), key=lambda line: "loss" in line)
    assert sorted(told) == [
        f"rank {rank} of 4 on jwb000{1 + rank // 2}, cpu" for rank in range(4)
    ]
    assert loss_of(last) == pytest.approx(loss_of(alone("ddp.py")), rel=1e-4)
    stderr = lines(done.stderr)
    assert stderr.count("to stderr") == 4
    (line,) = [line for line in stderr if line != "to stderr"]
    assert re.fullmatch(
        r"torchrun_hpc \S+: 2 nodes, 2 workers here; Slurm \d+\.0; "
        r"meeting at jwb0001i:2\d{4} over ib0; site jsc",
        line,
    ), line

    # Nothing but Slurm over the management network, all the rest over the fast one.
    # The training alone moves the gradients of 1,153 parameters 50 times.
    assert juelich.foreign_bytes("eth0") == foreign
    after = juelich.counters()
    for host in "jwb0001", "jwb0002":
        for moved, was in zip(after[host]["ib0"], before[host]["ib0"], strict=True):
            assert moved - was > 50 * 1153 * 4, host
