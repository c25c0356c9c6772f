"""One command trains where the management network is closed; the others do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    lines,
    read_workers,
)
from waiting import PATIENCE

if TYPE_CHECKING:
    from testbed import Cluster

DDP = "examples/ddp.py"


def loss_of(output: str) -> float:
    (loss,) = re.findall(r"loss after \d+ steps: ([0-9.]+)", output)
    return float(loss)


@pytest.fixture(scope="module")
def reference() -> float:
    """Train in one process, without any launcher."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, DDP],
        cwd=ROOT,
        env=os.environ | alone | {"MASTER_PORT": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return loss_of(done.stdout)


def test_one_command_trains(juelich: Cluster, reference: float) -> None:
    foreign = juelich.foreign_bytes("eth0")
    before = juelich.counters()
    done = juelich.srun(
        "-N3", ONE_TASK, *HPC, "--nproc_per_node=2", DDP, env=JUELICH, cwd=ROOT
    )

    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"rank (\d) of 6 on (\w+)", done.stdout)
    assert sorted(pairs) == [
        ("0", "jwb0001"),
        ("1", "jwb0001"),
        ("2", "jwb0002"),
        ("3", "jwb0002"),
        ("4", "jwb0003"),
        ("5", "jwb0003"),
    ]
    assert loss_of(done.stdout) == pytest.approx(reference, rel=1e-4)
    assert len(done.stdout.splitlines()) == 7, done.stdout
    assert len(lines(done.stderr)) == 1, done.stderr

    # Nothing but Slurm over the management network, all the rest over the fast one.
    # The training alone moves the gradients of 1,153 parameters 50 times.
    assert juelich.foreign_bytes("eth0") == foreign
    after = juelich.counters()
    for host in juelich.names:
        for moved, was in zip(after[host]["ib0"], before[host]["ib0"], strict=True):
            assert moved - was > 50 * 1153 * 4


def test_a_clean_start_is_one_line(juelich: Cluster) -> None:
    """The script's output is the script's, byte for byte, and torch says nothing."""
    text = "print('to stdout')"
    script = f"import sys; {text}; print('to stderr', file=sys.stderr)"
    done = juelich.srun(
        "-N3", ONE_TASK, *HPC, "--nproc_per_node=2", "--no-python",
        "python", "-c", script, env=JUELICH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to stdout\n" * 6
    stderr = lines(done.stderr)
    assert stderr.count("to stderr") == 6
    (line,) = [line for line in stderr if line != "to stderr"]
    assert re.fullmatch(
        r"torchrun_hpc: HPC001 3 nodes, 2 workers on this one, Slurm \d+\.0, "
        r"scheduler rendezvous at jwb0001i:2\d{4} \(10\.20\.0\.1\), "
        r"interface ib0, site jsc",
        line,
    )


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
