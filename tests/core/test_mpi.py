"""Open MPI and MPICH, over ssh on hosts without Slurm; and a script of PBS."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from commands import HPC, NODES, SCRIPTS, WORLD, column, own_lines, read_workers
from launchers import MPICH_4, OPENMPI_4, Launcher, once, run

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

HOSTS = NODES[:2]  # as text, n10 comes first


@pytest.mark.parametrize("mpi", [OPENMPI_4], indirect=True, ids=str)
def test_an_agent_on_each_node(bare: Cluster, mpi: Launcher) -> None:
    options = (*once(mpi, 2), *HPC, "--nproc-per-node=2")
    done = run(bare, mpi, *options, WORLD, hosts=HOSTS)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert [worker["host"] for worker in seen] == ["n9", "n9", "n10", "n10"], (
        done.stdout
    )
    assert {worker["MASTER_ADDR"] for worker in seen} == {"10.10.0.1"}
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "HPC001 2 nodes, 2 workers on this one" in line


@pytest.mark.parametrize("mpi", [MPICH_4], indirect=True, ids=str)
def test_each_task_a_worker(bare: Cluster, mpi: Launcher) -> None:
    done = run(bare, mpi, "-n", "4", "-ppn", "2", *HPC, WORLD, hosts=HOSTS)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "host", "MASTER_ADDR")
    assert column(seen, *names) == [
        (str(rank), str(rank % 2), str(rank // 2), "4", HOSTS[rank // 2], "10.10.0.1")
        for rank in range(4)
    ], done.stdout
    assert len({worker["MASTER_PORT"] for worker in seen}) == 1
    (line,) = own_lines(done.stderr)
    assert "HPC001 2 nodes x 2 tasks" in line


@pytest.mark.parametrize("mpi", [MPICH_4], indirect=True, ids=str)
def test_a_script_of_pbs(bare: Cluster, mpi: Launcher, tmp_path: Path) -> None:
    """It starts the launcher itself, which names the line with mpiexec; that works."""
    path = mpi.install(bare, tmp_path)
    (tmp_path / "HOSTFILE").write_text("".join(f"{host}\n" * 2 for host in HOSTS))
    environ = {"PBS_JOBID": "7.pbs", "PBS_ENVIRONMENT": "PBS_BATCH"}
    environ |= {"PBS_NODEFILE": "HOSTFILE", "PATH": path}
    command = f"python {SCRIPTS / 'as_suggested.py'} HPC061 {shlex.join([*HPC, WORLD])}"
    done = bare.run(command.split(), host="n9", env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "host", "WORLD_SIZE") == [(host, "2") for host in HOSTS], (
        done.stdout
    )
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1
