"""Recorded launches: what the tasks of real jobs saw, in tests/unit/environments."""

from __future__ import annotations

import json
from typing import Any

from tests.support import ROOT

ENVIRONMENTS = ROOT / "tests" / "unit" / "environments"
HOSTNAME = "(hostname)"


def recordings(*prefixes: str) -> list[str]:
    """Return the names of the recorded launches that begin with one of these."""
    names = sorted(path.stem for path in ENVIRONMENTS.glob("*.json"))
    return [name for name in names if name.startswith(prefixes)]


# What Slurm's own commands started. Other recorded launches ran mpirun inside of them.
BY_SLURM = recordings(
    "slurm-array", "slurm-het", "slurm-salloc", "slurm-sbatch", "slurm-srun"
)


def read_recording(name: str) -> dict[str, Any]:
    """Return all that a recording says of its launch."""
    recording: dict[str, Any] = json.loads(
        (ENVIRONMENTS / f"{name}.json").read_text("utf-8")
    )
    return recording


def recorded(name: str) -> list[tuple[dict[str, str], str]]:
    """Return the environment and the host name of every task of a recorded launch."""
    return [
        ({k: v for k, v in task.items() if k != HOSTNAME}, task[HOSTNAME])
        for task in read_recording(name)["tasks"]
    ]


def node_file(name: str) -> str:
    """Return the text of the node file of a launch that was recorded in a PBS job."""
    return "".join(f"{line}\n" for line in read_recording(name)["node file"])
