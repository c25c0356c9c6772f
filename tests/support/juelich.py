"""Three nodes at Jülich, and the ways to be in a job there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.networks import make_network
from torchrun_hpc import sites
from torchrun_hpc.errors import Setting
from torchrun_hpc.schedulers.job import Job, LaunchContext, Launcher, Task
from torchrun_hpc.schedulers.slurm import SRUN

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torchrun_hpc.host.network import Network
    from torchrun_hpc.sites import Site


def _site(name: str) -> Site:
    site = sites.find({}, "", Setting(name, "--hpc-site"))
    assert site is not None
    return site


JSC = _site("jsc")

COMMAND = "python -m torchrun_hpc --nproc_per_node=2 train.py --lr 0.1"

PROVENANCE = {
    "nodes": "SLURM_STEP_NODELIST",
    "node_rank": "SLURMD_NODENAME",
    "tasks": "SLURM_STEP_TASKS_PER_NODE",
    "task": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "launch_id": "SLURM_JOB_ID, SLURM_STEP_ID",
}
THREE = ("jwb0001", "jwb0002", "jwb0003")


def step(
    node_rank: int = 0,
    nodes: tuple[str, ...] = THREE,
    *,
    task: Task | None = None,
    launcher: Launcher = SRUN,
    allocated_nodes: int | None = None,
) -> Job:
    """Describe a step of srun as seen from one of its nodes.

    Args:
        node_rank: The rank of this node.
        nodes: The nodes of the step.
        task: This task; by default, there is one on each node.
        launcher: What started the tasks.
        allocated_nodes: The number of the job's nodes; by default, of the step's.
    """
    return Job(
        scheduler="Slurm",
        launch_id="19.0",
        context=LaunchContext.STEP,
        nodes=nodes,
        node_rank=node_rank,
        launcher=launcher,
        task=task or Task(node_rank, len(nodes)),
        allocated_nodes=allocated_nodes or len(nodes),
        provenance=PROVENANCE,
    )


STEP = step()


def tasks_at(places: Sequence[int]) -> list[Task]:
    """Return the tasks of a launch; ``places`` has for each rank its node."""
    return [
        Task(rank, len(places), places[:rank].count(node), places.count(node))
        for rank, node in enumerate(places)
    ]


def job_at(places: Sequence[int], rank: int) -> Job:
    """Describe a task of a step; ``places`` has for each rank its node."""
    nodes = THREE[: max(places) + 1]
    return step(places[rank], nodes, task=tasks_at(places)[rank])


def outside_a_step(
    context: LaunchContext,
    nodes: tuple[str, ...] = THREE,
    node_rank: int | None = 0,
) -> Job:
    """Describe a job as seen from its batch script, or from a shell."""
    return Job(
        scheduler="Slurm",
        launch_id=f"19.{context.name.lower()}",
        context=context,
        nodes=nodes,
        node_rank=node_rank,
        launcher=SRUN,
        task=Task(),
        allocated_nodes=3,
        provenance={
            "nodes": "SLURM_JOB_NODELIST",
            "node_rank": "SLURM_NODEID",
            "launch_id": "SLURM_JOB_ID",
        },
    )


BATCH = outside_a_step(LaunchContext.BATCH_SCRIPT)
SHELL = outside_a_step(LaunchContext.ALLOCATION_SHELL, node_rank=None)
INTERACTIVE = replace(
    outside_a_step(LaunchContext.INTERACTIVE_STEP, THREE[:1]),
    provenance={"nodes": "SLURM_STEP_NODELIST", "launch_id": "SLURM_JOB_ID"},
)
ONE_NODE_STEP = step(nodes=THREE[:1], allocated_nodes=3)
ONE_NODE_SCRIPT = outside_a_step(LaunchContext.BATCH_SCRIPT, THREE[:1])
ONE_NODE_JOBS = {
    "step": ONE_NODE_STEP,
    "batch script": ONE_NODE_SCRIPT,
    "interactive step": INTERACTIVE,
}

HOSTS = {
    "jwb0001": "10.10.0.1",
    "jwb0002": "10.10.0.2",
    "jwb0003": "10.10.0.3",
    "jwb0001i": "10.20.0.1",
    "jwb0002i": "10.20.0.2",
    "jwb0003i": "10.20.0.3",
}
# More names, of which some are of nobody.
ALIASES = {
    "head": "10.20.0.1",
    "second": "10.20.0.2",
    "second-slow": "10.10.0.2",
    "vip": "10.20.0.99",
    "vip6": "fd00::99",
    "jwb0001.juwels": "10.10.0.1",
    "jwb0001i.juwels": "10.20.0.1",
}


def juelich(
    rank: int = 0,
    *,
    hosts: Mapping[str, str] | None = None,
    interfaces: Mapping[str, str] | None = None,
    routes: Mapping[str, str] | None = None,
    down: Collection[str] = (),
) -> Network:
    """Describe the network of a node at Jülich: slow eth0, fast ib0.

    Args:
        rank: The rank of the node.
        hosts: More names, or other addresses of these.
        interfaces: Other interfaces.
        routes: As for `make_network`.
        down: As for `make_network`.
    """
    usual = {
        "lo": "127.0.0.1/8 ::1/128",
        "eth0": f"10.10.0.{rank + 1}/24",
        "ib0": f"10.20.0.{rank + 1}/24",
    }
    return make_network(
        usual if interfaces is None else interfaces,
        HOSTS | {**(hosts or {})},
        routes,
        down,
    )
