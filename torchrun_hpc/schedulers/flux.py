"""Flux. Not tried on a real one: from its documentation.

It tells ranks and sizes, and no names of nodes; the tasks tell each other, by PMI.
In the script of ``flux batch`` and the shell of ``flux alloc`` none of these variables
is set. Source: flux-environment(7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.schedulers.job import Launcher, Task
from torchrun_hpc.schedulers.process import Variables
from torchrun_hpc.schedulers.task_layout import TaskLayout, with_exchanged

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.process import Process

JOB_ID = "FLUX_JOB_ID"
RANK = "FLUX_TASK_RANK"
SIZE = "FLUX_JOB_SIZE"
NODES = "FLUX_JOB_NNODES"
LOCAL_RANK = "FLUX_TASK_LOCAL_ID"

RUN = Launcher(
    name="flux run",
    line="flux run --nodes={nodes} --tasks-per-node=1 --exclusive {command}",
    cpus="-o cpu-affinity=off",
    block="--taskmap=block",
    fail_together="flux run -o exit-on-error",
)


def task_layout(process: Process) -> TaskLayout | None:
    """Say where Flux has put this task; ``None`` if it did not start it.

    Raises:
        LaunchError: The variables are there but cannot be read.
    """
    flux = Variables(process.environ, "Flux", "FLUX_*")
    if not flux.first(RANK):
        return None
    rank, size, nodes = (flux.integer(name) for name in (RANK, SIZE, NODES))
    local_rank = flux.integer(LOCAL_RANK)  # how many there are, PMI tells
    # Job ids begin with a letter that is not ASCII: ƒD2e73NP.
    launch_id = flux.first(JOB_ID).replace("\u0192", "f")
    place = TaskLayout(
        name="Flux",
        launcher=RUN,
        task=Task(rank, size, local_rank, -(-size // max(nodes, 1))),
        provenance={"tasks": SIZE, "task": RANK, "nodes": NODES, "launch_id": JOB_ID},
        nodes=nodes,
    )
    place = with_exchanged(place, process)
    provenance = {**place.provenance, "launch_id": JOB_ID}
    return replace(place, instance=launch_id, provenance=provenance)
