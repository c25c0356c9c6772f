"""Direct mode under srun: each task is a worker."""

from __future__ import annotations

import json

import pytest

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    SCRIPTS,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from tests.support.cluster.real_job import launch


@pytest.mark.release
def test_what_is_set(unpadded):
    stale = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "9"}
    done = unpadded.srun("-N2", "-n3", *HPC, "-m", "scripts.world", "--a=b",
                         env=ENVIRON | stale, cwd=SCRIPTS.parent)  # fmt: skip
    seen = read_workers(done)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    assert column(seen, *names) == [
        ("0", "0", "2", "0", "0"),
        ("1", "1", "2", "0", "1"),
        ("2", "0", "1", "1", "2"),
    ], done.stdout
    for worker in seen:
        assert worker["WORLD_SIZE"] == worker["ROLE_WORLD_SIZE"] == "3"
        assert worker["GROUP_WORLD_SIZE"] == "2"
        assert worker["MASTER_ADDR"] == "10.10.0.1"
        assert worker["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert worker["argv"] == ["--a=b"]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in worker


def test_in_a_script(unpadded, tmp_path):
    """One task on a node, or several: what srun started is the world."""
    tmp_path.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torchrun_hpc\n"
        "torchrun_hpc.setup_environment()\n"
        "assert 'torch' not in sys.modules\n"
        f"exec(open({WORLD!r}).read())\n"
    )
    for nodes, tasks in (3, 1), (2, 2):
        done = launch(
            unpadded, program=["python"], script=[script], nodes=nodes, tasks=tasks
        )
        ranks = nodes * tasks
        assert column(done, "RANK", "WORLD_SIZE", "MASTER_ADDR") == [
            (str(rank), str(ranks), "10.10.0.1") for rank in range(ranks)
        ], done.stdout
        assert len(own_lines(done.stderr)) == 1
    done = unpadded.run(["python", str(script)], host="n9", env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["WORLD_SIZE"] == "1"
    done = launch(unpadded, "--nproc-per-node=2", nodes=1, script=[script])
    assert column(done, "RANK", "WORLD_SIZE") == [("0", "2"), ("1", "2")]
