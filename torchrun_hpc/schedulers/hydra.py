"""Hydra: mpiexec and mpirun of MPICH and of Intel MPI.

It passes the whole environment of the machine where it runs to all tasks. Nothing there
tells two launches in one job apart, so the tasks talk to each other in any case.
Source: MPICH's ``src/pm/hydra``, and the environments of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.detector import Detector
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.schedulers.task_layout import read_layout, with_exchanged
from torchrun_hpc.schedulers.variables import Variables

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.process import Process
    from torchrun_hpc.schedulers.task_layout import TaskLayout

# srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but not these.
LOCAL_RANK = "MPI_LOCALRANKID"
LOCAL_SIZE = "MPI_LOCALNRANKS"
_TASK = (pmi.RANK, pmi.SIZE, LOCAL_RANK, LOCAL_SIZE)

# Intel MPI takes the option and goes by its I_MPI_PIN*, by which one task on a node has
# all CPUs if nothing else is set.
MPIEXEC = Launcher(
    name="mpiexec",
    template="mpiexec -n {nodes} -ppn 1 {command}",
    cpu_option="-bind-to none",
    block_option="-ppn {tasks}",
    host_file_option="-f",
    bind_option="-bind-to core:N",
)


def task_layout(process: Process) -> TaskLayout:
    """Return where Hydra has put this task."""
    hydra = Variables(process.environ, "Hydra", "PMI_* and MPI_*")
    return with_exchanged(read_layout(hydra, _TASK, {}), process)


DETECTOR = Detector(
    name="Hydra",
    signs=(LOCAL_RANK,),
    rank=(pmi.RANK, LOCAL_RANK),
    prefixes=("MPI_LOCAL",),
    daemons=("hydra_pmi_proxy", "hydra_bstrap_pr"),
    launcher=MPIEXEC,
    task_layout=task_layout,
)
