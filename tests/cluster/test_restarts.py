"""Workers of a new attempt never meet the keys of a dead one; with stock they do."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from launching import ENVIRON, HPC, ONE_TASK, SCRIPTS, STOCK

if TYPE_CHECKING:
    from testbed import Cluster

SCRIPT = str(SCRIPTS / "restarts.py")
RESTARTS = 20


def test_twenty_restarts_with_a_late_rank_0(unpadded: Cluster) -> None:
    done = unpadded.srun(
        "-N3", ONE_TASK, *HPC, f"--max-restarts={RESTARTS}", SCRIPT, str(RESTARTS),
        env=ENVIRON, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "missed" not in done.stdout
    assert sorted(done.stdout.splitlines()) == sorted(
        f"met: rank {rank}, attempt {attempt}"
        for attempt in range(RESTARTS + 1)
        for rank in range(3)
    )


@pytest.mark.release("restarts")
@pytest.mark.parametrize("rendezvous", ["scheduler", "c10d"])
def test_five_restarts_with_a_late_rank_0(unpadded: Cluster, rendezvous: str) -> None:
    """The same in short, for every release of torch; some look each 5 s only."""
    options = (f"--hpc-rendezvous={rendezvous}", "--monitor-interval=0.1")
    done = unpadded.srun(
        "-N3", ONE_TASK, *HPC, *options, "--max-restarts=5", SCRIPT, "5",
        env=ENVIRON, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        f"met: rank {rank}, attempt {attempt}"
        for attempt in range(6)
        for rank in range(3)
    )


def test_stock_torchrun_fails_to_restart(unpadded: Cluster) -> None:
    flags = ("--nnodes=3", "--rdzv_backend=c10d", "--rdzv_id=1", "--max-restarts=2")
    try:
        done = unpadded.srun(
            "-N3", ONE_TASK, "--kill-on-bad-exit=1", *STOCK, *flags,
            "--rdzv_endpoint=n9:23456", SCRIPT, "2", env=ENVIRON, timeout=100,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        output = str(expired.stdout)
    else:
        output = done.stdout
    assert "met: rank 0, attempt 0" in output
    assert "missed" in output
