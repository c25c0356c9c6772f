"""Workers of a new attempt never meet the keys of a dead one; with stock they do."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, HPC, ONE_TASK, SCRIPTS, STOCK

if TYPE_CHECKING:
    from testbed import Cluster

SCRIPT = str(SCRIPTS / "restarts.py")
# With each, all nodes import torch; forks do not.
RESTARTS = {"exec": 1, "fork": 2}


@pytest.mark.release("restarts")
@pytest.mark.parametrize("rendezvous", ["scheduler", "c10d"])
def test_restarts_with_a_late_rank_0(
    unpadded: Cluster, rendezvous: str, form: str
) -> None:
    # Up to torch 2.3 an agent looks after its workers every 5 s.
    options = (f"--hpc-rendezvous={rendezvous}", "--monitor-interval=0.1")
    restarts = RESTARTS[form]
    done = unpadded.srun(
        "-N3", ONE_TASK, *HPC, *options, f"--max-restarts={restarts}", SCRIPT,
        str(restarts), env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "HPC169" not in done.stderr, form
    # Some releases of torch have gloo speak on stdout.
    told = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert sorted(told) == sorted(
        f"met: rank {rank}, attempt {attempt}"
        for attempt in range(restarts + 1)
        for rank in range(3)
    )


def test_stock_torchrun_fails_to_restart(unpadded: Cluster) -> None:
    flags = ("--nnodes=3", "--rdzv_backend=c10d", "--rdzv_id=1", "--max-restarts=1")
    try:
        done = unpadded.srun(
            "-N3", ONE_TASK, "--kill-on-bad-exit=1", *STOCK, *flags,
            "--rdzv_endpoint=n9:23456", SCRIPT, "1", env=ENVIRON, timeout=100,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        output = str(expired.stdout)
    else:
        output = done.stdout
    assert "met: rank 0, attempt 0" in output
    assert "missed" in output
