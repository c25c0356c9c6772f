"""The examples' trainings, in one process: what they must come to with a launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support import ROOT
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path


def alone(example: str, *arguments: str, cwd: Path | None = None) -> str:
    """Train in one process, without any launcher, and return what it prints."""
    world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / example, *arguments],
        env=os.environ | world | {"MASTER_ADDR": "127.0.0.1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loss_of(output: str) -> float:
    """Return the loss that ddp.py or checkpoint_ddp.py has printed, once."""
    (loss,) = re.findall(r"^loss after \d+ steps: (\S+)$", output, re.MULTILINE)
    return float(loss)
