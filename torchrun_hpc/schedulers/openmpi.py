"""Open MPI's mpirun, versions 4 and 5.

Sources: Open MPI's ``orte/mca/schizo/ompi/schizo_ompi.c`` (4) and PRRTE's
``src/mca/schizo/ompi`` (5), and the environments of both.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrun_hpc.schedulers.detector import Detector, Variables, read_layout
from torchrun_hpc.schedulers.job import Launcher
from torchrun_hpc.variables import MASTER_ADDR

if TYPE_CHECKING:
    from torchrun_hpc.schedulers.detector import TaskLayout
    from torchrun_hpc.schedulers.process import Process

# Rank of the task.
RANK = "OMPI_COMM_WORLD_RANK"
# Number of mpirun's tasks.
SIZE = "OMPI_COMM_WORLD_SIZE"
# Rank of the task on its node.
LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
# Number of tasks on the node.
LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
# Unique name of this mpirun: a number (4), or prterun-HOST-PID@1 (5). jsrun's tasks
# also have it.
INSTANCE = "PMIX_NAMESPACE"
# Open MPI 4: the addresses of the machine where mpirun runs, for example
# 803405824.0;tcp://192.0.2.2,10.10.0.254:54513;tcp6://[fd00::2]:59375
MACHINE = "OMPI_MCA_orte_hnp_uri"
# Open MPI 4: the number of nodes that have a daemon of mpirun.
NODES = "OMPI_MCA_orte_num_nodes"
# Ends in the number of this node's daemon: 0 is mpirun's, others count from 1 in the
# hosts' order. Examples: 959053824.1;... (4) and prterun-jwb0001-8511@0.1;... (5).
DAEMON = "PMIX_SERVER_URI2"

_TASK = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)

# Without -x PATH, a command in a virtual environment is not found over ssh.
MPIRUN = Launcher(
    name="mpirun",
    template="mpirun -x PATH -np {nodes} --map-by ppr:1:node {command}",
    cpu_option="--bind-to none",
    block_option="--map-by ppr:{tasks}:node",
    host_file_option="--hostfile",
    forward_option="-x",
    bind_option="--map-by slot:PE=N --bind-to core",
    network_hint=f"mpirun -x {MASTER_ADDR}=HOST, or --mca oob_tcp_if_include "
    "{interface}; in a PBS job -x PBS_JOBID",
    may_wait=True,
)


def task_layout(process: Process) -> TaskLayout:
    """Return Open MPI's layout of the tasks."""
    ompi = Variables(process.environ, "Open MPI", "OMPI_* and PMIX_*")
    machine, source = _machine(ompi)
    daemon = re.match(r"[^;]*\.([0-9]{1,6});", ompi.first(DAEMON))
    before = int(daemon[1]) if daemon else None
    nodes = ompi.integer_or_zero(NODES)
    layout = read_layout(
        ompi,
        _TASK,
        {"launch_id": INSTANCE, "head": source},
        nodes_before=before,
        most_nodes=nodes or None,
        instance=ompi.first(INSTANCE),
        head_candidates=machine,
        nodelist_is_shared=False,  # ssh does not forward the scheduler's variables
    )
    task = layout.task
    # NODES also counts nodes that have a daemon of mpirun, but no task.
    one_each = task.local_size == 1 and (before is None or task.rank <= before)
    is_exact = nodes < task.size or (nodes == task.size and one_each)
    return replace(layout, nodes=nodes) if nodes and is_exact else layout


def _machine(ompi: Variables) -> tuple[tuple[str, ...], str]:
    """Return the addresses or the name of mpirun's machine, and their variable."""
    uris = re.findall(r"tcp6?://([^;]+):[0-9]+", ompi.first(MACHINE))
    if uris:
        parts = (part.strip("[]") for uri in uris for part in uri.split(","))
        is_address = re.compile("[0-9A-Fa-f:.]+").fullmatch
        return tuple(filter(is_address, parts)), MACHINE
    named = re.fullmatch(r"\w+-(.+)-[0-9]+@[0-9]+", ompi.first(INSTANCE))
    return named.groups() if named else (), INSTANCE


DETECTOR = Detector(
    name="Open MPI",
    markers=(RANK,),
    rank=(RANK,),
    prefixes=("OMPI_",),
    daemons=("mpirun", "mpiexec", "orterun", "orted", "prterun", "prte", "prted"),
    launcher=MPIRUN,
    task_layout=task_layout,
)
