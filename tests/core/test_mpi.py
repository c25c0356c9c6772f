"""Open MPI and MPICH, over ssh on hosts without Slurm; and a script of PBS."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import (
    HOSTS,
    HPC,
    LINE,
    PBS,
    WORLD,
    column,
    own_lines,
    read_workers,
)
from tests.support.cluster.mpi import MPICH_4, OPENMPI_4, once, run, suggested_over_ssh


@pytest.mark.parametrize("mpi", [OPENMPI_4], indirect=True, ids=str)
def test_an_agent_on_each_node(bare, mpi):
    options = (*once(mpi, 2), *HPC, "--nproc-per-node=2")
    done = run(bare, mpi, *options, WORLD, hosts=HOSTS)
    seen = read_workers(done)
    assert column(seen, "host", "MASTER_ADDR") == [
        (host, "10.10.0.1") for host in ("n9", "n9", "n10", "n10")
    ], done.stdout
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "2 nodes, 2 workers here" in line


@pytest.mark.parametrize("mpi", [MPICH_4], indirect=True, ids=str)
def test_each_task_a_worker(bare, mpi):
    done = run(bare, mpi, "-n", "4", "-ppn", "2", *HPC, WORLD, hosts=HOSTS)
    seen = read_workers(done)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "host", "MASTER_ADDR")
    assert column(seen, *names) == [
        (str(rank), str(rank % 2), str(rank // 2), "4", HOSTS[rank // 2], "10.10.0.1")
        for rank in range(4)
    ], done.stdout
    assert len({worker["MASTER_PORT"] for worker in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "2 nodes x 2 tasks" in line


@pytest.mark.parametrize("mpi", [MPICH_4], indirect=True, ids=str)
def test_a_script_of_pbs(bare, mpi, tmp_path):
    """It starts the launcher itself, which names the line with mpiexec; that works."""
    suggested_over_ssh(bare, mpi, PBS, f"HPC061 {LINE}", tmp_path)
