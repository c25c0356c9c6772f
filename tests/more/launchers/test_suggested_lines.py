"""What a message tells to type is typed, as it stands, where the message has come.

Each line is run by the launcher that it names: it starts one agent on each node that
was meant, and these make one world.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from commands import (
    ENVIRON,
    HPC,
    NODES,
    SCRIPTS,
    WORLD,
    column,
    read_workers,
)
from launchers import INTELMPI, MPICH_4, OPENMPI_4, OPENMPI_5, Launcher

if TYPE_CHECKING:
    from pathlib import Path

    from testbed import Cluster

AS_SUGGESTED = f"python {SCRIPTS / 'as_suggested.py'}"
AGENT = " ".join([*HPC, WORLD])
TWO_EACH = " ".join([*HPC, "--nproc_per_node=2", WORLD])
RESTARTS = " ".join([*HPC, "--max_restarts=1", WORLD])
HET = "#SBATCH -N1 -n2\n#SBATCH hetjob\n#SBATCH -N1 -n2\n"
HOSTS = NODES[:2]


def check(output: str, hosts: tuple[str, ...] = HOSTS, each: int = 1) -> None:
    """One world, with as many workers on each of the hosts."""
    seen = read_workers(output)
    assert column(seen, "host", "WORLD_SIZE") == [
        (host, str(len(hosts) * each)) for host in hosts for _ in range(each)
    ], output
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1, output


@pytest.mark.parametrize(
    ("job", "wrong", "each"),
    [
        ("#SBATCH -N2 -n6\n", f"HPC062 srun -N2 -n3 {TWO_EACH}", 2),
        ("#SBATCH -N3\n", f"HPC070 srun {' '.join(HPC)} --nnodes=2 {WORLD}", 1),
        (HET, f"HPC134 srun --het-group=0,1 {RESTARTS}", 1),
    ],
    ids=["step", "nodes", "het-step"],
)
def test_in_a_batch_script(unpadded: Cluster, job: str, wrong: str, each: int) -> None:
    """HPC061, a script that starts agents itself, is in the core."""
    done = unpadded.sbatch(f"#!/bin/sh\n{job}{AS_SUGGESTED} {wrong}\n", env=ENVIRON)
    assert done.returncode == 0, done.output
    assert "srun: Warning" not in done.output
    check(done.output, each=each)


def test_on_the_login_node(unpadded: Cluster) -> None:
    job = ["-n2", ":", "-N1", "-n4"]
    done = unpadded.run(
        ["salloc", *job, *shlex.split(f"{AS_SUGGESTED} HPC060 {AGENT}")], env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    assert "srun: Warning" not in done.stderr
    check(done.stdout)


def test_in_a_shell_on_the_first_node(unpadded: Cluster) -> None:
    """`script` gives it the terminal it wants."""
    done = unpadded.run(
        ["script", "-qec", "srun -N2 --pty sh", "/dev/null"],
        input=f"{AS_SUGGESTED} HPC073 {AGENT}; exit $?\n",
        env=ENVIRON | {"SHELL": "/bin/sh"},
    )
    assert done.returncode == 0, done.stdout
    check(done.stdout.replace("\r\n", "\n"))


# --- mpirun and mpiexec ------------------------------------------------------------

PBS = {
    "PBS_JOBID": "7.pbs", "PBS_NODEFILE": "HOSTFILE", "PBS_ENVIRONMENT": "PBS_BATCH"
}  # fmt: skip


@pytest.mark.parametrize(
    ("mpi", "environ", "wrong"),
    [
        (OPENMPI_4, {},
         f"HPC134 mpirun -x PATH --hostfile HOSTFILE -np 4 {RESTARTS}"),
        (OPENMPI_5, {}, f"HPC034 mpirun -x PATH --hostfile HOSTFILE -np 3 {AGENT}"),
        (MPICH_4, {}, f"HPC134 mpiexec -n 4 -f HOSTFILE {RESTARTS}"),
        # A script of PBS. Open MPI here does not ask PBS, Hydra does.
        (INTELMPI, PBS, f"HPC061 {AGENT}"),
    ],
    ids=["openmpi-4", "openmpi-5-uneven", "mpich-4", "pbs-intelmpi"],
    indirect=["mpi"],
)  # fmt: skip
def test_over_ssh(
    bare: Cluster,
    mpi: Launcher,
    environ: dict[str, str],
    wrong: str,
    tmp_path: Path,
) -> None:
    path = mpi.install(bare, tmp_path)
    (tmp_path / "HOSTFILE").write_text("".join(f"{host}\n" * 2 for host in HOSTS))
    command = shlex.split(f"{AS_SUGGESTED} {wrong}")
    done = bare.run(command, host="n9", env={"PATH": path} | environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.parametrize("mpi", [OPENMPI_5], ids=str, indirect=True)
def test_of_mpirun_in_a_job_of_slurm(
    unpadded: Cluster, mpi: Launcher, tmp_path: Path
) -> None:
    """Four tasks fill the first two of three nodes."""
    path = mpi.install(unpadded, tmp_path, job=True)
    script = f"#!/bin/sh\n{AS_SUGGESTED} HPC134 mpirun -np 4 {RESTARTS}\n"
    done = unpadded.sbatch(script, "-N3", "-n6", env={"PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.output
    check(done.output, NODES)
