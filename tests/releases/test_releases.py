"""What depends on the release of torch, with ours and its own rendezvous; short."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.cluster.commands import (
    DDP,
    ENVIRON,
    HPC,
    NODES,
    SCRIPTS,
    WORLD,
    column,
    launch,
    own_lines,
    read_workers,
)
from tests.support.cluster.steps import LATE, Step

FAST = ENVIRON | {"PET_HPC_SITE": "jsc"}  # n9 is n9i: 10.20.0.1 on ib0


@pytest.mark.release
@pytest.mark.parametrize("rendezvous", ["scheduler", "c10d"])
def test_ranks_addresses_and_interfaces(unpadded, rendezvous):
    """With ours, and with torch's own rendezvous; NCCL prefers ib0 by itself."""
    options = (f"--hpc-rendezvous={rendezvous}", "--nproc_per_node=2")
    seen = read_workers(launch(unpadded, *options, nodes=3, environ=FAST))
    names = ("RANK", "host", "GROUP_RANK", "SLURM_NODEID", "LOCAL_RANK", "WORLD_SIZE")
    assert column(seen, *names) == [
        (str(2 * node + local), name, str(node), str(node), str(local), "6")
        for node, name in enumerate(NODES)
        for local in range(2)
    ]
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert column(seen, *names) == [("10.20.0.1", "ib0", "")] * 6
    assert len({worker["MASTER_PORT"] for worker in seen}) == 1


@pytest.mark.release
def test_a_program_in_the_store_of_torchs_rendezvous(unpadded, tmp_path):
    """While a node is missing; it is not run, and the others say what is wrong."""
    marker = tmp_path / "marker"
    options = ("--hpc-rendezvous=c10d", "--rdzv_id=7")
    spoil = (sys.executable, str(SCRIPTS / "spoil.py"), "torch.rendezvous.7")
    command = LATE.format(node=2) + " ".join([*HPC, *options, WORLD])
    with Step(unpadded, "sh", "-c", command) as job:
        seen = job.says(r"rendezvous at n9:\d+")
        (port,) = re.findall(r"rendezvous at n9:(\d+)", seen)
        job.joins("n10")
        unpadded.run([*spoil, "10.10.0.1", port, marker], env=ENVIRON, check=True)
        job.see_end("n9", "n10")
        job.says("HPC085")
    assert not marker.exists()
    assert any("HPC085" in line for line in own_lines(job.output)), job.output
    assert "Traceback" not in job.output


@pytest.mark.release
def test_a_signal_while_torchs_rendezvous_waits(unpadded):
    command = LATE.format(node=2) + " ".join([*HPC, "--hpc-rendezvous=c10d", WORLD])
    with Step(unpadded, "sh", "-c", command) as job:
        job.says("HPC084")
        for host in "n10", "n9":
            job.send(host, "SIGTERM")


@pytest.mark.release
def test_training(unpadded):
    done = launch(unpadded, script=[DDP], environ=FAST)
    assert done.returncode == 0
    assert "loss after 50 steps: " in done.stdout
