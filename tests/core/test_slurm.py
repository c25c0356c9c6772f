"""In Slurm: one command trains where the management network is closed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from commands import DDP, FORMS, HPC, JUELICH, ONE_TASK, lines
from waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

SCRIPT = f"""
import runpy, sys
sys.stderr.write("to stderr\\n")
runpy.run_path({DDP!r}, run_name="__main__")
"""


def loss_of(output: str) -> float:
    (loss,) = re.findall(r"loss after \d+ steps: ([0-9.]+)", output)
    return float(loss)


def without_a_launcher() -> float:
    """Train in one process; return the loss."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, DDP],
        env=os.environ | alone | {"MASTER_PORT": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return loss_of(done.stdout)


def test_one_command_trains(juelich: Cluster, tmp_path: Path) -> None:
    """The launcher says one line, torch nothing, and the script's output is its own."""
    tmp_path.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    foreign = juelich.foreign_bytes("eth0")
    before = juelich.counters()
    done = juelich.srun(
        "-N2", "--nodelist=jwb0001,jwb0002", ONE_TASK, *HPC, "--nproc_per_node=2",
        script, env=JUELICH | FORMS["fork"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *told, last = sorted(done.stdout.splitlines(), key=lambda line: "loss" in line)
    assert sorted(told) == [
        f"rank {rank} of 4 on jwb000{1 + rank // 2}, cpu" for rank in range(4)
    ], done.stdout
    assert loss_of(last) == pytest.approx(without_a_launcher(), rel=1e-4)
    stderr = lines(done.stderr)
    assert stderr.count("to stderr") == 4, done.stderr
    (line,) = [line for line in stderr if line != "to stderr"]
    assert re.fullmatch(
        r"torchrun_hpc: HPC001 2 nodes, 2 workers on this one, Slurm \d+\.0, "
        r"scheduler rendezvous at jwb0001i:2\d{4} \(10\.20\.0\.1\), "
        r"interface ib0, site jsc",
        line,
    ), line

    # Nothing but Slurm over the management network, all the rest over the fast one.
    # The training alone moves the gradients of 1,153 parameters 50 times.
    assert juelich.foreign_bytes("eth0") == foreign
    after = juelich.counters()
    for host in "jwb0001", "jwb0002":
        for moved, was in zip(after[host]["ib0"], before[host]["ib0"], strict=True):
            assert moved - was > 50 * 1153 * 4, host
