"""Endpoints that are typed as the centres' recipes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import ENVIRON, HPC, JUELICH, ONE_TASK, WORLD, column, read_workers

if TYPE_CHECKING:
    from testbed import Cluster


def test_the_centres_recipe_works_with_the_modules_name_swapped(
    juelich: Cluster,
) -> None:
    """All of Jülich's flags typed by hand, as in its recipe, without the i."""
    done = juelich.sbatch(
        f"""#!/bin/bash
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
        MASTER_PORT=54123
        export GLOO_SOCKET_IFNAME=ib0
        srun env -u CUDA_VISIBLE_DEVICES python -u -m torchrun_hpc \
            --nproc_per_node=2 \
            --nnodes="$SLURM_JOB_NUM_NODES" \
            --rdzv_id="$SLURM_JOB_ID" \
            --rdzv_endpoint="$MASTER_ADDR":"$MASTER_PORT" \
            --rdzv_backend=c10d \
            {WORLD}
        """,
        "-N3",
        ONE_TASK,
        env=JUELICH,
    )
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    assert column(seen, "RANK", "host", "MASTER_ADDR") == [
        (str(rank), f"jwb000{1 + rank // 2}", "10.20.0.1") for rank in range(6)
    ], done.output
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in seen} == {str(done.job_id)}
    assert "rewritten to jwb0001i (site jsc)" in done.output, done.output


def test_an_unknown_site_follows_the_typed_endpoint(juelich: Cluster) -> None:
    """Without SYSTEMNAME no rule applies, and the typed name says which network."""
    done = juelich.srun(
        *("-N2", "--nodelist=jwb0001,jwb0002", ONE_TASK),
        *(*HPC, "--rdzv_endpoint=jwb0001i", WORLD),
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME") == [
        ("jwb0001", "10.20.0.1", "ib0"),
        ("jwb0002", "10.20.0.1", "ib0"),
    ], done.stderr + done.stdout
