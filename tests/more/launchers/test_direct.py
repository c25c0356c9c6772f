"""Direct mode under srun: places, GPUs and refusals; see core/test_direct.py, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    HPC,
    JUELICH,
    WORLD,
    column,
    own_lines,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

TWO = ("-N2", "--ntasks-per-node=2")


def test_tasks_in_turn(unpadded: Cluster) -> None:
    done = unpadded.srun(*TWO, "--distribution=cyclic", *HPC, WORLD, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "host", "LOCAL_RANK") == [
        ("n9", "0"),
        ("n10", "0"),
        ("n9", "1"),
        ("n10", "1"),
    ]
    (seen,) = [line for line in own_lines(done.stderr) if "warning" in line]
    assert "HPC079 tasks are placed in turn" in seen
    assert "srun --distribution=block" in seen


def test_a_host_file_that_begins_with_another_node(unpadded: Cluster, tmp_path) -> None:
    """srun tells nobody which one; the way out that the message names is tried."""
    tmp_path.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("n10\nn10\nn9\n")
    environ = ENVIRON | {"SLURM_HOSTFILE": str(hosts)}
    options = ("-N2", "-n3", "--distribution=arbitrary")
    done = unpadded.srun(*options, *HPC, WORLD, env=environ)
    assert done.returncode == 2, done.stderr
    (seen,) = own_lines(done.stderr)
    assert "HPC141 tasks are in an order of your own" in seen
    assert seen.endswith("export MASTER_ADDR=n10")
    environ["MASTER_ADDR"] = "n10"
    done = unpadded.srun(*options, *HPC, WORLD, env=environ)
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "MASTER_ADDR") == [("10.10.0.2",)] * 3, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--nproc_per_node=2"], "HPC062 srun started 4 tasks on 2 nodes"),
        (["--max_restarts=3"], "HPC134 --max_restarts=3 is no option where each"),
    ],
)
def test_refused(unpadded: Cluster, words: list[str], code: str) -> None:
    done = unpadded.srun(*TWO, *HPC, *words, WORLD, env=ENVIRON)
    assert done.returncode == 2, done.stderr
    (line,) = own_lines(done.stderr)
    assert code in line
    assert done.stdout == ""


def test_one_gpu_for_each_task(juelich: Cluster) -> None:
    """The way out that the message names is tried."""
    options = (*TWO, "--gres=gpu:2", "--gpu-bind=single:1")
    shell = "CUDA_VISIBLE_DEVICES=0 exec "  # as where devices are constrained
    done = juelich.srun(*options, "sh", "-c", shell + " ".join([*HPC, WORLD]),
                        env=JUELICH)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (seen,) = [line for line in own_lines(done.stderr) if "warning" in line]
    assert "HPC098 CUDA_VISIBLE_DEVICES=0 shows one GPU to each task" in seen
    command = " ".join([*HPC, "--virtual-local-rank", WORLD])
    done = juelich.srun(*options, "sh", "-c", shell + command, env=JUELICH)
    assert column(read_workers(done), "RANK", "LOCAL_RANK") == [
        (str(rank), "0") for rank in range(4)
    ]
    assert "warning" not in done.stderr


def test_dry_run(juelich: Cluster) -> None:
    done = juelich.srun(*TWO, *HPC, "--hpc-dry-run", WORLD, env=JUELICH)
    assert done.returncode == 0, done.stderr
    assert "each task" not in done.stdout
    assert "direct at jwb0001i:" in done.stdout
    assert "export WORLD_SIZE=4" in done.stdout
    assert "{" not in done.stdout, "the script was started"
