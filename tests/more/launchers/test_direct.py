"""Direct mode under srun: places, and GPUs; see also core/test_direct.py."""

from __future__ import annotations

from tests.support.cluster.commands import (
    ENVIRON,
    HPC,
    JUELICH,
    WORLD,
    column,
    refused,
    warnings,
)
from tests.support.cluster.real_job import How, launch


def test_tasks_in_turn(unpadded):
    done = launch(unpadded, tasks=2, srun=["--distribution=cyclic"])
    assert column(done, "host", "LOCAL_RANK") == [
        ("n9", "0"),
        ("n10", "0"),
        ("n9", "1"),
        ("n10", "1"),
    ]
    (seen,) = warnings(done.stderr)
    assert seen.startswith("HPC079]: tasks are placed in turn")
    assert "srun --distribution=block" in seen


def test_a_host_file_that_begins_with_another_node(unpadded, tmp_path):
    """srun tells nobody which one; the way out that the message names is tried."""
    tmp_path.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("n10\nn10\nn9\n")
    environ = ENVIRON | {"SLURM_HOSTFILE": str(hosts)}
    command = ("-N2", "-n3", "--distribution=arbitrary", *HPC, WORLD)
    (seen,) = refused(unpadded.srun(*command, env=environ))
    assert "HPC141]: tasks are in a custom order" in seen
    assert seen.endswith("export MASTER_ADDR=n10")
    environ["MASTER_ADDR"] = "n10"
    done = unpadded.srun(*command, env=environ)
    assert column(done, "MASTER_ADDR") == [("10.10.0.2",)] * 3, done.stderr


def test_one_gpu_for_each_task(juelich):
    """The way out that the message names is tried."""
    options: How = {
        "tasks": 2,
        "srun": ["--gres=gpu:2", "--gpu-bind=single:1"],
        "first": "export CUDA_VISIBLE_DEVICES=0",  # as where devices are constrained
        "environ": JUELICH,
    }
    done = launch(juelich, **options)
    assert done.returncode == 0
    (seen,) = warnings(done.stderr)
    assert seen.startswith("HPC098]: CUDA_VISIBLE_DEVICES=0 shows one GPU to each task")
    done = launch(juelich, "--virtual-local-rank", **options)
    assert column(done, "RANK", "LOCAL_RANK") == [(str(rank), "0") for rank in range(4)]
    assert "warning" not in done.stderr


def test_dry_run(juelich):
    done = launch(juelich, "--hpc-dry-run", tasks=2, environ=JUELICH)
    assert done.returncode == 0
    assert "each task" not in done.stdout
    assert "direct at jwb0001i:" in done.stdout
    assert "export WORLD_SIZE=4" in done.stdout
    assert "{" not in done.stdout, "the script was started"
