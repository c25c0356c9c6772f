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
MPIRUN = "mpirun -x PATH --hostfile HOSTFILE"
HET = "#SBATCH -N1 -n2\n#SBATCH hetjob\n#SBATCH -N2 -n4\n"


def check(output: str, hosts: tuple[str, ...] = NODES, each: int = 1) -> None:
    """One world, with as many workers on each of the hosts."""
    seen = read_workers(output)
    assert column(seen, "host", "WORLD_SIZE") == [
        (host, str(len(hosts) * each)) for host in hosts for _ in range(each)
    ], output
    assert len({worker["TORCHELASTIC_RUN_ID"] for worker in seen}) == 1


@pytest.mark.parametrize(
    ("job", "wrong", "hosts", "each"),
    [
        # The job has more tasks than nodes, which srun would take over.
        ("#SBATCH -N3 -n6\n", f"HPC061 {AGENT}", NODES, 1),
        ("#SBATCH -N3 -n6\n", f"HPC062 srun -N2 -n3 {TWO_EACH}", NODES[:2], 2),
        ("#SBATCH -N3\n", f"HPC070 srun {' '.join(HPC)} --nnodes=2 {WORLD}",
         NODES[:2], 1),
        (HET, f"HPC061 {AGENT}", NODES, 1),
        (HET, f"HPC134 srun --het-group=0,1 {RESTARTS}", NODES, 1),
    ],
    ids=["script", "step", "nodes", "het-script", "het-step"],
)  # fmt: skip
def test_in_a_batch_script(
    unpadded: Cluster, job: str, wrong: str, hosts: tuple[str, ...], each: int
) -> None:
    done = unpadded.sbatch(f"#!/bin/sh\n{job}{AS_SUGGESTED} {wrong}\n", env=ENVIRON)
    assert done.returncode == 0, done.output
    assert "srun: Warning" not in done.output
    check(done.output, hosts, each)


@pytest.mark.parametrize(
    "job", [["-N3", "-n6"], ["-n2", ":", "-N2", "-n4"]], ids=["salloc", "het-salloc"]
)
def test_on_the_login_node(unpadded: Cluster, job: list[str]) -> None:
    done = unpadded.run(
        ["salloc", *job, *shlex.split(f"{AS_SUGGESTED} HPC060 {AGENT}")], env=ENVIRON
    )
    assert done.returncode == 0, done.stderr
    assert "srun: Warning" not in done.stderr
    check(done.stdout)


@pytest.mark.parametrize("shell", ["salloc -N1 : -N2", "srun -N3 --pty sh"])
def test_in_a_shell_on_the_first_node(unpadded: Cluster, shell: str) -> None:
    """`script` gives it the terminal it wants."""
    done = unpadded.run(
        ["script", "--quiet", "--return", "--command", shell, "/dev/null"],
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
        (OPENMPI_4, {}, f"HPC134 {MPIRUN} -np 6 {RESTARTS}"),
        (OPENMPI_5, {}, f"HPC134 {MPIRUN} -np 6 {RESTARTS}"),
        (OPENMPI_5, {}, f"HPC034 {MPIRUN} -np 5 {AGENT}"),
        (MPICH_4, {}, f"HPC134 mpiexec -n 6 -f HOSTFILE {RESTARTS}"),
        (INTELMPI, {}, f"HPC134 mpiexec -n 6 -f HOSTFILE {RESTARTS}"),
        # A script of PBS. Open MPI here does not ask PBS, Hydra does.
        (OPENMPI_4, PBS, f"HPC061 {AGENT}"),
        (MPICH_4, PBS, f"HPC061 {AGENT}"),
        (INTELMPI, PBS, f"HPC061 {AGENT}"),
    ],
    ids=[
        *("openmpi-4", "openmpi-5", "openmpi-5-uneven", "mpich-4", "intelmpi"),
        *("pbs-openmpi-4", "pbs-mpich-4", "pbs-intelmpi"),
    ],
    indirect=["mpi"],
)
def test_over_ssh(
    bare: Cluster,
    mpi: Launcher,
    environ: dict[str, str],
    wrong: str,
    tmp_path: Path,
) -> None:
    path = mpi.install(bare, tmp_path)
    (tmp_path / "HOSTFILE").write_text("".join(f"{host}\n" * 2 for host in NODES))
    command = shlex.split(f"{AS_SUGGESTED} {wrong}")
    done = bare.run(command, host="n9", env={"PATH": path} | environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.parametrize(
    ("mpi", "wrong"),
    [
        (OPENMPI_5, f"mpirun -np 4 {RESTARTS}"),
        (MPICH_4, f"mpiexec -n 4 {RESTARTS}"),
    ],
    ids=["openmpi-5", "mpich-4"],
    indirect=["mpi"],
)
def test_of_mpirun_in_a_job_of_slurm(
    unpadded: Cluster, mpi: Launcher, wrong: str, tmp_path: Path
) -> None:
    """Four tasks fill the first two nodes."""
    path = mpi.install(unpadded, tmp_path, job=True)
    script = f"#!/bin/sh\n{AS_SUGGESTED} HPC134 {wrong}\n"
    done = unpadded.sbatch(script, "-N3", "-n6", env={"PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.output
    check(done.output)
