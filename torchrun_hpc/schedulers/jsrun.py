"""IBM's jsrun in an LSF job: written from IBM's "jsrun" page, not tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrun_hpc.schedulers.detector import Detector, Variables, read_layout
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.schedulers.openmpi import INSTANCE

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.detector import TaskLayout
    from torchrun_hpc.schedulers.process import Process

# Rank of the task.
RANK = "JSM_NAMESPACE_RANK"
# Number of jsrun's tasks.
SIZE = "JSM_NAMESPACE_SIZE"
# Rank of the task on its node.
LOCAL_RANK = "JSM_NAMESPACE_LOCAL_RANK"
# Number of tasks on the node.
LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_SIZE"
# The allocation's number, on systems with jsrun. There, the script runs on the first
# host, and no task does.
ALLOCATION_ID = "CSM_ALLOCATION_ID"

_TASK = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)

JSRUN = Launcher(
    name="jsrun",
    template="jsrun --nrs={nodes} --rs_per_host=1 --tasks_per_rs=1 "
    "--cpu_per_rs=ALL_CPUS --gpu_per_rs=ALL_GPUS {command}",
    cpu_option="--bind=none",
    block_option="--launch_distribution=packed",
    bind_option="--cpu_per_rs=N --bind=packed:N",
)


def task_layout(process: Process) -> TaskLayout:
    """Return jsrun's layout of the tasks."""
    jsm = Variables(process.environ, "jsrun", "JSM_* and LSB_*")
    name = jsm.first(INSTANCE)
    return read_layout(jsm, _TASK, {"launch_id": INSTANCE}, instance=name)


DETECTOR = Detector(
    name="jsrun",
    markers=(RANK,),
    rank=(RANK,),
    # Without prefixes and daemons: its daemon counts as LSF's.
    launcher=JSRUN,
    task_layout=task_layout,
)
