"""Hydra: mpiexec and mpirun of MPICH and of Intel MPI.

It hands the whole environment of the machine where it runs to all tasks. Nothing there
tells two launches in one job apart, so that the tasks talk to each other in any case.
Source: MPICH's ``src/pm/hydra``, and the environments of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.schedulers.process import Variables
from torchrun_hpc.schedulers.task_layout import TaskLayout, with_exchanged

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.process import Process

# srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but not these.
LOCAL_RANK = "MPI_LOCALRANKID"
LOCAL_SIZE = "MPI_LOCALNRANKS"

# Intel MPI takes the option and goes by its I_MPI_PIN*, by which one task on a node has
# all CPUs if nothing else is set.
MPIEXEC = Launcher(
    name="mpiexec",
    line="mpiexec -n {nodes} -ppn 1 {command}",
    cpus="-bind-to none",
    block="-ppn {tasks}",
    hosts="-f",
)


def task_layout(process: Process) -> TaskLayout | None:
    """Say where Hydra has put this task; ``None`` if it did not start it.

    Raises:
        LaunchError: The variables are there but cannot be read.
    """
    hydra = Variables(process.environ, "Hydra", "PMI_* and MPI_*")
    if not (hydra.first(LOCAL_RANK) and hydra.first(pmi.RANK)):
        return None
    task = hydra.task(pmi.RANK, pmi.SIZE, LOCAL_RANK, LOCAL_SIZE)
    return with_exchanged(
        TaskLayout(
            name="Hydra",
            launcher=MPIEXEC,
            task=task,
            provenance={"tasks": pmi.SIZE, "task": pmi.RANK},
        ),
        process,
    )
