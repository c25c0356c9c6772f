"""On a slow file system, other processes read the files that the launcher imports."""

from __future__ import annotations

import collections
import shutil
from typing import TYPE_CHECKING

import pytest
from commands import BIN, ROOT, require, require_package
from programs import load
from testbed import Cluster, missing

if TYPE_CHECKING:
    from pathlib import Path

HOST = "n1"
LATENCY = 1  # milliseconds

SCRIPT = """
import os, sys
sys.stdout.write("torch" if "torch" in sys.modules else "no torch")
"""


@pytest.fixture(scope="module")
def slow():
    require(missing())
    require(None if shutil.which("fusermount3") else "fuse3 is not installed")
    require_package("mfusepy")
    return load(ROOT / "benchmarks" / "cold.py").slow


def opens(slow, script: Path, read_ahead: str) -> int:
    """Launch with an empty cache; return how many files were opened."""
    asked: collections.Counter[str] = collections.Counter()
    words = [
        *("python", "-m", "torchrun_hpc", "--hpc-preload=torch"),
        *(f"--hpc-read-ahead={read_ahead}", "--standalone", script),
    ]
    with Cluster((HOST,), slurm=False) as cluster, slow(cluster, 1, LATENCY, asked):
        environ = {"PATH": f"{BIN}:/usr/bin:/bin"}
        done = cluster.run(words, host=HOST, env=environ, cwd=ROOT)
        running = cluster.run(["pgrep", "-f", "read_ahead"], host=HOST)
    assert (done.returncode, done.stdout) == (0, "torch"), done.stderr
    assert done.stderr.count("\n") == 1  # the start line
    assert not running.stdout
    return asked["opens"]


def test_files_are_read_ahead(slow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ahead, alone = opens(slow, script, "auto"), opens(slow, script, "none")
    # Torch's import opens more files than this, and they are opened twice.
    assert ahead > alone + 500
