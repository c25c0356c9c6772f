"""The examples' trainings, in one process: what they must come to with a launcher."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from tests.support import ROOT
from tests.support.processes import run

if TYPE_CHECKING:
    from pathlib import Path


def alone(example: str, *arguments: str, cwd: Path | None = None) -> str:
    """Train in one process, without any launcher, and return what it prints."""
    world = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"), "1")
    environ = os.environ | world | {"MASTER_ADDR": "127.0.0.1"}
    program = ROOT / "examples" / example
    done = run([sys.executable, program, *arguments], environ=environ, cwd=cwd)
    assert done.code == 0, done.err
    return done.out


def loss_of(output: str) -> float:
    """Return the loss that ddp.py or checkpoint_ddp.py has printed, once."""
    (loss,) = re.findall(r"^loss after \d+ steps: (\S+)$", output, re.MULTILINE)
    return float(loss)
