"""HPE Cray PALS: mpiexec on Cray systems with PBS.

Slurm (``--mpi=cray_shasta``) and Flux set the same variables. PALS_NRANKS, PALS_PPN and
PALS_DEPTH are settings for mpiexec, which does not set them for its tasks. Sources:
Slurm's ``src/plugins/mpi/cray_shasta``, ALCF's and NCAR's documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers import pmi
from torchrun_hpc.schedulers.detector import Detector, Variables, read_layout
from torchrun_hpc.schedulers.job import Launcher

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.detector import TaskLayout
    from torchrun_hpc.schedulers.process import Process

# Rank of the task.
RANK = "PALS_RANKID"
# Number of the node.
NODE_RANK = "PALS_NODEID"
# Rank of the task on its node.
LOCAL_RANK = "PALS_LOCAL_RANKID"
# Number of tasks on the node.
LOCAL_SIZE = ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
# Unique name of this mpiexec: a UUID.
APPLICATION = "PALS_APID"

_TASK = (RANK, pmi.SIZE, LOCAL_RANK, *LOCAL_SIZE)
_SHORT = 8  # characters of the UUID that distinguish the launches of a job

MPIEXEC = Launcher(
    name="mpiexec",
    template="mpiexec -n {nodes} --ppn 1 {command}",
    cpu_option="--cpu-bind none",
    block_option="--ppn {tasks}",
    bind_option="--depth=N --cpu-bind depth",
)


def task_layout(process: Process) -> TaskLayout:
    """Return PALS's layout of the tasks."""
    pals = Variables(process.environ, "PALS", "PALS_* and PMI_*")
    return read_layout(
        pals,
        _TASK,
        {"node_rank": NODE_RANK, "launch_id": APPLICATION},
        node_rank=pals.integer(NODE_RANK),
        instance=pals.first(APPLICATION)[:_SHORT],
    )


DETECTOR = Detector(
    name="PALS",
    markers=(RANK,),
    rank=(RANK,),
    # Without prefixes and daemons: these are unknown.
    launcher=MPIEXEC,
    task_layout=task_layout,
)
