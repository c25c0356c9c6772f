"""Commands on a machine with GPUs for CUDA."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

GPUS = torch.cuda.device_count()

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no GPU for CUDA"
)
forms = pytest.mark.parametrize(
    "form", [["--hpc-preload=none"], []], ids=["exec", "fork"]
)


def run(
    *words: str | Path, module: str = "torchrun_hpc", code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command of the package to its end, and see that this is its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Duplicate GPU" in done.stderr + done.stdout:
        pytest.skip("NCCL does not let two workers share a GPU")
    assert done.returncode == code, done.stdout + done.stderr
    return done
