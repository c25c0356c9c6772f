"""What depends on the release of torch, with ours and its own rendezvous; short."""

from __future__ import annotations

import sys

import pytest

from tests.support.cluster.commands import (
    DDP,
    ENVIRON,
    NODES,
    SCRIPTS,
    column,
    late,
    read_workers,
)
from tests.support.cluster.real_job import RealJob, launch

FAST = {"PET_HPC_SITE": "jsc"}  # n9 is n9i: 10.20.0.1 on ib0


@pytest.mark.release
@pytest.mark.parametrize("rendezvous", ["scheduler", "c10d"])
def test_ranks_addresses_and_interfaces(unpadded, rendezvous):
    """With ours, and with torch's own rendezvous; NCCL prefers ib0 by itself."""
    options = (f"--hpc-rendezvous={rendezvous}", "--nproc_per_node=2")
    seen = read_workers(launch(unpadded, *options, nodes=3, environ=FAST))
    places = ("RANK", "host", "GROUP_RANK", "SLURM_NODEID", "LOCAL_RANK", "WORLD_SIZE")
    assert column(seen, *places) == [
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
    with RealJob(unpadded, *options, nodes=3, first=late(2)) as job:
        job.wait(lambda: job.is_accepted(1))
        words = [*spoil, "10.10.0.1", str(job.port()), marker]
        unpadded.run(words, env=ENVIRON, check=True)
        job.agent_ends(0, 1)
        job.says("HPC085")
    assert not marker.exists()
    assert any("HPC085" in line for line in job.lines()), job.output
    assert "Traceback" not in job.output


@pytest.mark.release
def test_a_signal_while_torchs_rendezvous_waits(unpadded):
    c10d = "--hpc-rendezvous=c10d"
    with RealJob(unpadded, c10d, nodes=3, first=late(2)) as job:
        job.says("HPC084")
        for node in 1, 0:
            job.signal(node, "SIGTERM")
            job.agent_ends(node)


@pytest.mark.release
def test_training(unpadded):
    done = launch(unpadded, script=[DDP], environ=FAST)
    assert done.returncode == 0
    assert "loss after 50 steps: " in done.stdout
