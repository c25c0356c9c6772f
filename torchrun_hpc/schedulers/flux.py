"""Flux: written from its documentation, not tried with a real one.

Flux sets ranks and sizes, but no node names. The tasks exchange the names by PMI. A
``flux batch`` script and a ``flux alloc`` shell have none of these variables. Source:
flux-environment(7).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchrun_hpc.schedulers.detector import (
    Detector,
    TaskLayout,
    Variables,
    with_exchanged,
)
from torchrun_hpc.schedulers.job import Launcher, Task

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.process import Process

# The job's number. Each flux run is a job.
JOB_ID = "FLUX_JOB_ID"
# Rank of the task.
RANK = "FLUX_TASK_RANK"
# Number of the job's tasks.
SIZE = "FLUX_JOB_SIZE"
# Number of the job's nodes.
NODES = "FLUX_JOB_NNODES"
# Rank of the task on its node.
LOCAL_RANK = "FLUX_TASK_LOCAL_ID"

RUN = Launcher(
    name="flux run",
    template="flux run --nodes={nodes} --tasks-per-node=1 --exclusive {command}",
    cpu_option="-o cpu-affinity=off",
    block_option="--taskmap=block",
    fail_together="flux run -o exit-on-error",
    bind_option="--cores-per-task=N -o cpu-affinity=per-task",
)


def task_layout(process: Process) -> TaskLayout:
    """Return Flux's layout of the tasks."""
    flux = Variables(process.environ, "Flux", "FLUX_*")
    size, nodes = flux.integer(SIZE), flux.integer(NODES)
    local_size = math.ceil(size / max(nodes, 1))  # only PMI knows the exact number
    layout = TaskLayout(
        task=Task(flux.integer(RANK), size, flux.integer(LOCAL_RANK), local_size),
        provenance={
            "tasks": SIZE,
            "task": RANK,
            "local_rank": LOCAL_RANK,
            "nodes": NODES,
            "launch_id": JOB_ID,
        },
        nodes=nodes,
        # Job ids begin with a non-ASCII letter: ƒD2e73NP.
        instance=flux.first(JOB_ID).replace("\u0192", "f"),
    )
    return with_exchanged(layout, process)


DETECTOR = Detector(
    name="Flux",
    markers=(RANK,),
    rank=(RANK,),
    prefixes=("FLUX_",),
    daemons=("flux-shell",),
    launcher=RUN,
    task_layout=task_layout,
)
