"""NCCL's watchdog ends a worker, and the report says who did not come. Needs GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("hangs.py")
GPUS = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU for CUDA"
)


@pytest.mark.parametrize("form", [[], ["--hpc-preload=torch"]], ids=["exec", "fork"])
def test_a_collective_that_times_out(form: list[str]) -> None:
    """Without a fork, torch's own dump has the collectives."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torchrun_hpc",
            *form,
            f"--nproc-per-node={GPUS}",
            SCRIPT,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = done.stderr.partition("error[HPC125]")[2]
    assert "Watchdog caught collective operation timeout" in report, done.stderr
    assert re.search(r"rank.* at hangs.py:\d+", report), report
    if GPUS > 1:
        late = rf"1 rank \({GPUS - 1}\)"
        assert re.search(rf"{late} did not call it, its last was all_reduce", report)
        assert re.search(rf"{late}: late at hangs.py:\d+", report)
