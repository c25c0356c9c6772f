"""Hydra: MPICH's and Intel MPI's mpiexec and mpirun.

Hydra passes the whole environment of the machine where it was started to all tasks. No
variable distinguishes two launches in one job, so the tasks exchange an id. Sources:
MPICH's ``src/pm/hydra``, and the environments of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.detector import (
    Detector,
    Variables,
    read_layout,
    with_exchanged,
)
from torchrun_hpc.schedulers.job import Launcher

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.detector import TaskLayout
    from torchrun_hpc.schedulers.process import Process

# Rank of the task on its node. srun --mpi=pmi2 sets only PMI's variables.
LOCAL_RANK = "MPI_LOCALRANKID"
# Number of tasks on the node.
LOCAL_SIZE = "MPI_LOCALNRANKS"
_TASK = (pmi.RANK, pmi.SIZE, LOCAL_RANK, LOCAL_SIZE)

# Intel MPI accepts cpu_option, but follows its I_MPI_PIN*. By default, these give all
# CPUs to a single task.
MPIEXEC = Launcher(
    name="mpiexec",
    template="mpiexec -n {nodes} -ppn 1 {command}",
    cpu_option="-bind-to none",
    block_option="-ppn {tasks}",
    host_file_option="-f",
    bind_option="-bind-to core:N",
    may_wait=True,
)


def task_layout(process: Process) -> TaskLayout:
    """Return Hydra's layout of the tasks."""
    hydra = Variables(process.environ, "Hydra", "PMI_* and MPI_*")
    return with_exchanged(read_layout(hydra, _TASK, {}), process)


DETECTOR = Detector(
    name="Hydra",
    markers=(LOCAL_RANK,),
    rank=(pmi.RANK, LOCAL_RANK),
    prefixes=("MPI_LOCAL",),
    daemons=("hydra_pmi_proxy", "hydra_bstrap_pr"),
    launcher=MPIEXEC,
    task_layout=task_layout,
)
