"""Explicit endpoints, as in the recipes of the centres."""

from __future__ import annotations

from tests.support.cluster.commands import JUELICH, ONE_TASK, WORLD, column

# All of Jülich's flags, as in its recipe, without the i.
SCRIPT = f"""#!/bin/bash
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
"""


def test_the_centres_recipe_works_with_the_modules_name_swapped(juelich):
    done = juelich.sbatch(SCRIPT, "-N2", ONE_TASK, env=JUELICH)
    assert column(done, "RANK", "host", "MASTER_ADDR", "TORCHELASTIC_RUN_ID") == [
        (str(rank), f"jwb000{1 + rank // 2}", "10.20.0.1", str(done.job_id))
        for rank in range(4)
    ], done.output
    assert "rewritten to jwb0001i (site jsc)" in done.output, done.output
