"""How tests start a launcher on a cluster, and read its workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
WORLD = str(SCRIPTS / "world.py")
ALL_REDUCE = str(SCRIPTS / "all_reduce.py")
DDP = str(ROOT / "examples" / "ddp.py")

# On the hosts as a user has it: the virtual environment in front.
BIN = Path(sys.executable).parent
ENVIRON = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
JUELICH = ENVIRON | {"SYSTEMNAME": "juwelsbooster"}

HPC = ("python", "-m", "torchrun_hpc")
STOCK = ("python", "-m", "torch.distributed.run")
JSC = ("python", "-m", "torchrun_jsc")

# How an agent starts its workers: by exec, or as forks of one import.
FORMS = {"exec": {}, "fork": {"PET_HPC_PRELOAD": "torch"}}

ONE_TASK = "--ntasks-per-node=1"
KILL = "--kill-on-bad-exit=1"

# The nodes of the clusters `unpadded` and `bare`.
NODES = ("n9", "n10", "n11")
# Without their names srun takes the third one while one of them ends another step.
FIRST_TWO = ("-N2", "--nodelist=n9,n10")


def require(reason: str | None) -> None:
    """Skip if something is missing; in CI, fail."""
    if reason is None:
        return
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"CI must run this test: {reason}")
    pytest.skip(reason)


def require_package(name: str) -> None:
    """Skip if a package that only tests need is missing; in CI, fail."""
    is_there = importlib.util.find_spec(name) is not None
    require(None if is_there else f"{name} is not installed (make test-all)")


def together(folder: Path, workers: int) -> tuple[str, str]:
    """Return the words for a script as world.py, which ends when so many have begun.

    Args:
        folder: For this script, and for no other.
        workers: Of all jobs that run it.
    """
    folder.chmod(0o777)
    script, there = folder / "world_together.sh", folder / "there"
    there.mkdir()
    there.chmod(0o777)
    script.write_text(
        f"#!/bin/sh\npython {WORLD}\nmktemp -p {there} > /dev/null\n"
        f"until test $(ls {there} | wc -l) = {workers}; do sleep 0.1; done\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return "--no-python", str(script)


def read_workers(
    output: str | subprocess.CompletedProcess[str],
) -> list[dict[str, Any]]:
    """Return what the workers of scripts/world.py printed, by rank."""
    text = output if isinstance(output, str) else output.stdout
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda worker: int(worker["RANK"]))


def column(seen: list[dict[str, Any]], *names: str) -> list[tuple[str, ...]]:
    """Return some values of each worker, an empty text for one that is not set."""
    return [tuple(worker.get(name, "") for name in names) for worker in seen]


# That others are waited for: on a busy machine, any job may say so.
_WAITS = re.compile("torchrun_hpc: (warning: )?HPC(084|113|114|120) ")


def own_lines(stderr: str) -> list[str]:
    """Return the lines that the launcher itself wrote, also behind a prompt.

    Lines that say who is waited for are left out: they depend on the machine's load.
    """
    return [line for line in lines(stderr) if "torchrun_hpc: " in line]


def lines(stderr: str) -> list[str]:
    """Return all lines but those that depend on load: srun's queue, and who is late."""
    return [
        line
        for line in stderr.splitlines()
        if not line.startswith("srun: job ") and not _WAITS.search(line)
    ]
