"""What others make of a closed management network; for ours see core/test_slurm.py."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from commands import (
    BY_HAND,
    ENVIRON,
    HPC,
    JSC,
    JUELICH,
    KILL,
    ONE_TASK,
    ROOT,
    STOCK,
    WORLD,
    column,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

DDP = "examples/ddp.py"


@pytest.mark.parametrize("suffix", ["", "i"])
def test_the_centres_recipe_works_with_the_modules_name_swapped(
    juelich: Cluster, suffix: str
) -> None:
    """All of Jülich's flags typed by hand, as in its recipe, with and without the i."""
    done = juelich.sbatch(
        f"""#!/bin/bash
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
        MASTER_ADDR="${{MASTER_ADDR}}{suffix}"
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
        cwd=ROOT,
    )
    assert done.returncode == 0, done.output
    seen = read_workers(done.output)
    assert column(seen, "RANK", "host", "MASTER_ADDR") == [
        (str(rank), f"jwb000{1 + rank // 2}", "10.20.0.1") for rank in range(6)
    ]
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in seen} == {str(done.job_id)}
    assert ("rewritten to jwb0001i (site jsc)" in done.output) == (suffix == "")


def test_an_unknown_site_follows_the_typed_endpoint(juelich: Cluster) -> None:
    """Without SYSTEMNAME no rule applies, and the typed name says which network."""
    done = juelich.srun(
        "-N3", ONE_TASK, *HPC, "--rdzv_endpoint=jwb0001i", WORLD, env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    assert column(read_workers(done), "host", "MASTER_ADDR", "GLOO_SOCKET_IFNAME") == [
        (host, "10.20.0.1", "ib0") for host in juelich.names
    ]


# What the others make of it. `--kill-on-bad-exit` because with them the node that
# believes to be the host would wait on for the ones that have failed.


def try_out(cluster: Cluster, *argv: str) -> tuple[str, str]:
    """Return what the steps of another launcher print within 30 s, if they can."""
    try:
        done = cluster.srun(
            "-N3", ONE_TASK, KILL, *argv, env=JUELICH, cwd=ROOT, timeout=30
        )
    except subprocess.TimeoutExpired as expired:
        return str(expired.stdout), str(expired.stderr)
    return done.stdout, done.stderr


@pytest.mark.parametrize("launcher", [STOCK, JSC], ids=["torchrun", "torchrun_jsc"])
def test_others_fail_with_the_same_command(
    juelich: Cluster, launcher: tuple[str, ...]
) -> None:
    """They make a world of each node, or hang."""
    output, _ = try_out(juelich, *launcher, "--nproc_per_node=2", WORLD)
    assert ("6",) not in column(read_workers(output), "WORLD_SIZE")


def test_stock_torchrun_fails_with_all_flags(juelich: Cluster) -> None:
    """Also with the name of the fast network; see `test_patches`."""
    output, errors = try_out(
        juelich, *STOCK, *BY_HAND, "--rdzv_endpoint=jwb0001i:23456",
        "--rdzv_conf=read_timeout=5", DDP,
    )  # fmt: skip
    assert "RendezvousConnectionError" in errors
    assert "loss" not in output


def test_torchrun_jsc_fails_without_the_interface(juelich: Cluster) -> None:
    """It gets the nodes to meet, and then gloo takes the management network."""
    output, errors = try_out(
        juelich, *JSC, *BY_HAND, "--rdzv_endpoint=jwb0001i:23456", DDP
    )
    assert "RendezvousConnectionError" not in errors
    assert "loss" not in output
