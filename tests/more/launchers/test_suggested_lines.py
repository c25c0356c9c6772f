"""The line to copy of a message works as it stands, where the message appeared.

Each line is run by the launcher that it names: it starts one agent on each node that
was meant, and these make one world. A batch script that starts agents itself, HPC061,
is in the core.
"""

from __future__ import annotations

import shlex

import pytest

from tests.support.cluster.commands import (
    AS_SUGGESTED,
    ENVIRON,
    HPC,
    LINE,
    NODES,
    PBS,
    WORLD,
    in_terminal,
    see_one_world,
)
from tests.support.cluster.mpi import (
    INTELMPI,
    MPICH_4,
    OPENMPI_4,
    OPENMPI_5,
    suggested_over_ssh,
)

TWO_EACH = " ".join([*HPC, "--nproc_per_node=2", WORLD])
RESTARTS = " ".join([*HPC, "--max_restarts=1", WORLD])
HET = "#SBATCH -N1 -n2\n#SBATCH hetjob\n#SBATCH -N1 -n2\n"


@pytest.mark.parametrize(
    ("job", "wrong", "each"),
    [
        ("#SBATCH -N2 -n6\n", f"HPC062 srun -N2 -n3 {TWO_EACH}", 2),
        ("#SBATCH -N3\n", f"HPC070 srun {' '.join(HPC)} --nnodes=2 {WORLD}", 1),
        (HET, f"HPC134 srun --het-group=0,1 {RESTARTS}", 1),
    ],
    ids=["step", "nodes", "het-step"],
)
def test_in_a_batch_script(unpadded, job, wrong, each):
    done = unpadded.sbatch(f"#!/bin/sh\n{job}{AS_SUGGESTED} {wrong}\n", env=ENVIRON)
    see_one_world(done, each=each)
    assert "srun: Warning" not in done.output


def test_on_the_login_node(unpadded):
    job = ["-n2", ":", "-N1", "-n4"]
    done = unpadded.run(
        ["salloc", *job, *shlex.split(f"{AS_SUGGESTED} HPC060 {LINE}")], env=ENVIRON
    )
    see_one_world(done)
    assert "srun: Warning" not in done.stderr


def test_in_a_shell_on_the_first_node(unpadded):
    keys = f"{AS_SUGGESTED} HPC073 {LINE}; exit $?\n"
    see_one_world(in_terminal(unpadded, "srun -N2 --pty sh", keys))


# --- mpirun and mpiexec ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mpi", "environ", "wrong"),
    [
        (OPENMPI_4, {},
         f"HPC134 mpirun -x PATH --hostfile HOSTFILE -np 4 {RESTARTS}"),
        (OPENMPI_5, {}, f"HPC034 mpirun -x PATH --hostfile HOSTFILE -np 3 {LINE}"),
        (MPICH_4, {}, f"HPC134 mpiexec -n 4 -f HOSTFILE {RESTARTS}"),
        # A script of PBS. Open MPI here does not ask PBS, Hydra does.
        (INTELMPI, PBS, f"HPC061 {LINE}"),
    ],
    ids=["openmpi-4", "openmpi-5-uneven", "mpich-4", "pbs-intelmpi"],
    indirect=["mpi"],
)  # fmt: skip
def test_over_ssh(bare, mpi, environ, wrong, tmp_path):
    suggested_over_ssh(bare, mpi, environ, wrong, tmp_path)


@pytest.mark.parametrize("mpi", [OPENMPI_5], ids=str, indirect=True)
def test_of_mpirun_in_a_job_of_slurm(unpadded, mpi, tmp_path):
    """Four tasks fill the first two of three nodes."""
    path = mpi.install(unpadded, tmp_path, job=True)
    script = f"#!/bin/sh\n{AS_SUGGESTED} HPC134 mpirun -np 4 {RESTARTS}\n"
    done = unpadded.sbatch(script, "-N3", "-n6", env={"PATH": path}, cwd=tmp_path)
    see_one_world(done, NODES)
