"""On a slow file system, other processes read the files that the launcher imports."""

from __future__ import annotations

import collections
import shutil

import pytest
from commands import BIN, ROOT, require, require_package
from programs import load
from testbed import Cluster, missing
from waiting import without_waits

from torchrun_hpc.host import sockets
from torchrun_hpc.launching import read_ahead

HOST = "n1"
LATENCY = 1  # milliseconds

SCRIPT = """
import sys
sys.stdout.write("torch" if "torch" in sys.modules else "no torch")
"""


@pytest.fixture(scope="module")
def slow():
    require(missing())
    require(None if shutil.which("fusermount3") else "fuse3 is not installed")
    require_package("mfusepy")
    return load(ROOT / "benchmarks" / "cold.py").slow


def test_files_are_read_ahead(slow, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["python", "-m", "torchrun_hpc", "--hpc-preload=torch", "--standalone"]
    environ = {"PATH": f"{BIN}:/usr/bin:/bin"}
    asked: collections.Counter[str] = collections.Counter()
    with Cluster((HOST,), slurm=False) as cluster, slow(cluster, 1, LATENCY, asked):
        done = cluster.run([*words, script], host=HOST, env=environ, cwd=ROOT)
        running = cluster.run(["pgrep", "-f", "read_ahead"], host=HOST)
    assert (done.returncode, done.stdout) == (0, "torch"), done.stderr
    assert len(without_waits(done.stderr.splitlines())) == 1  # the start line
    assert not running.stdout
    # Two processes opened the files that torch's import reads.
    assert asked["opens"] - asked["files"] > 500


def test_the_program_holds_the_lock_until_its_end(monkeypatch, tmp_path):
    """Not its launcher, whose forks run on."""
    hold = sockets.hold
    monkeypatch.setattr(sockets, "hold", lambda what: hold(f"{what} {tmp_path}"))
    monkeypatch.setattr(read_ahead, "_is_slow", lambda: True)
    for _ in range(2):
        read_ahead.start("torch")
    (program,) = read_ahead._readers
    with pytest.raises(BlockingIOError):
        sockets.hold("read-ahead")
    assert program.poll() is None
    read_ahead.end()
    sockets.hold("read-ahead").close()
