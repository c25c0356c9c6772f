"""Which mode is chosen, and what is refused."""

from __future__ import annotations

import pytest
from nodes import (
    BATCH,
    COMMAND,
    INTERACTIVE,
    SHELL,
    THREE,
    make_inputs,
    mode_of,
    outside_a_step,
    step,
)
from plans import planned, refusal, refused

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers import flux, hydra, openmpi, pals, slurm
from torchrun_hpc.schedulers.job import LaunchContext, Task

# --- the table of modes -------------------------------------------------------------

SRUN = f": srun --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}"

# Seen from task 0, unless a test says otherwise.
REFUSED = {
    "several tasks on every node": (
        step(task=Task(0, 12, 0, 4)),
        "HPC062",
        "srun started 12 tasks on 3 nodes (SLURM_STEP_TASKS_PER_NODE)",
    ),
    "several tasks on some node": (
        step(task=Task(0, 4, 0, 2)),
        "HPC062",
        "srun started 4 tasks on 3 nodes (SLURM_STEP_TASKS_PER_NODE)",
    ),
    "several tasks on another node": (
        step(1, task=Task(2, 4, 0, 1)),
        "HPC062",
        "srun started 4 tasks on 3 nodes (SLURM_STEP_TASKS_PER_NODE)",
    ),
    "batch script of several nodes": (
        BATCH,
        "HPC061",
        "in the batch script of a job of 3 nodes",
    ),
    "shell of salloc": (SHELL, "HPC060", "this shell is not on the job's 3 nodes"),
}
# The options that choose one node, and those that do not.
FREED_BY = [
    {"standalone": True},
    {"nnodes": "1"},
    {"nnodes": "1:1"},
    {"nnodes": "01"},
]
NOT_FREED_BY = [{}, {"nnodes": "3"}, {"nnodes": "1:3"}, {"standalone": False}]


@pytest.mark.parametrize("mode", REFUSED)
@pytest.mark.parametrize("options", NOT_FREED_BY)
def test_refused_mode(mode, options):
    job, code, message = REFUSED[mode]
    error = refused(code, message, job=job, options=options)
    assert SRUN in str(error)
    assert error.everywhere


@pytest.mark.parametrize("mode", REFUSED)
def test_refused_mode_before_the_options_are_known(mode):
    job, code, message = REFUSED[mode]
    error = refusal(job)
    if job.has_several_tasks:  # each may be a worker: the options decide
        assert error is None
        error = refusal(job, has_agent=True)
    assert error.code == code
    assert message in str(error)
    assert SRUN in str(error)


@pytest.mark.parametrize(
    ("job", "variable"),
    [
        (BATCH, "SLURM_JOB_NODELIST"),
        (SHELL, "(jwb0001,jwb0002,jwb0003 by SLURM_JOB_NODELIST)"),
    ],
)
def test_refusal_names_the_variable(job, variable):
    assert variable in str(refusal(job))


def test_refusal_quotes_a_few_of_many_nodes():
    many = tuple(f"n{number}" for number in range(500))
    job = outside_a_step(LaunchContext.ALLOCATION_SHELL, many, None)
    message = str(refusal(job))
    assert "500 nodes (n0,n1,n2,… by SLURM_JOB_NODELIST)" in message
    assert "srun --nodes=500 " in message


@pytest.mark.parametrize("task", [0, 1, 7])
def test_too_many_tasks_are_reported_once(task):
    job = step(task // 4, nodes=THREE[:2], task=Task(task, 8, task % 4, 4))
    message = "srun started 8 tasks on 2 nodes"
    assert refused("HPC062", message, task // 4, job=job).everywhere


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "and an agent on each would start more"),
        ({"nproc_per_node": "4"}, "and --nproc_per_node=4 on each would start more"),
    ],
)
def test_too_many_tasks_for_the_workers_that_were_typed(options, text):
    job = step(task=Task(0, 12, 0, 4))
    error = refused("HPC062", text, job=job, options=options)
    assert "leave --nproc_per_node out" in str(error)


# Four tasks, which mpirun and the like put on the first of three nodes if nothing else
# is typed; what starts one on each.
FILLED = {
    "srun": (
        slurm.SRUN,
        "",
        f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 {COMMAND}",
    ),
    "mpirun": (
        openmpi.MPIRUN,
        "",
        f"mpirun -x PATH -np 3 --map-by ppr:1:node --bind-to none {COMMAND}",
    ),
    "mpirun that has to be told": (
        openmpi.MPIRUN,
        "$PBS_NODEFILE",
        (
            "mpirun -x PATH -np 3 --map-by ppr:1:node --hostfile $PBS_NODEFILE "
            f"--bind-to none {COMMAND}"
        ),
    ),
    "mpiexec of Hydra": (
        hydra.MPIEXEC,
        "HOSTFILE",
        f"mpiexec -n 3 -ppn 1 -f HOSTFILE -bind-to none {COMMAND}",
    ),
    "mpiexec of PALS": (
        pals.MPIEXEC,
        "",
        f"mpiexec -n 3 --ppn 1 --cpu-bind none {COMMAND}",
    ),
    "flux": (
        flux.RUN,
        "",
        (
            "flux run --nodes=3 --tasks-per-node=1 --exclusive -o cpu-affinity=off "
            f"{COMMAND}"
        ),
    ),
}


@pytest.mark.parametrize("case", FILLED)
def test_too_many_tasks_on_the_first_of_the_jobs_nodes(case):
    """srun takes all nodes, unless one is typed; the others have not been told."""
    launcher, host_file, line = FILLED[case]
    job = step(
        nodes=THREE[:1], task=Task(0, 4, 0, 4), allocated_nodes=3, launcher=launcher,
        host_file=host_file,
    )  # fmt: skip
    message = f"{launcher.name} started 4 tasks on 1 node"
    error = refused("HPC062", message, job=job, options={"nproc_per_node": "2"})
    assert f"Start it once on each node: {line}   (or let" in str(error)


@pytest.mark.parametrize("mode", REFUSED)
@pytest.mark.parametrize("options", FREED_BY)
def test_one_node_may_be_typed_in_a_refused_mode(mode, options):
    plan = planned(job=REFUSED[mode][0], options=options)
    assert (plan.world.nodes, plan.world.node_rank, plan.world.workers) == (1, 0, 2)
    assert plan.rendezvous.listen == ("127.0.0.1", 0)
    assert not plan.ranks_follow_scheduler


ACCEPTED = {
    "one task on every node": step(),
    "one task on every node of a subset": step(nodes=THREE[:2], allocated_nodes=3),
    "one node of a step": step(nodes=THREE[:1], allocated_nodes=3),
    "batch script of one node": outside_a_step(LaunchContext.BATCH_SCRIPT, THREE[:1]),
    "interactive step": INTERACTIVE,
}


@pytest.mark.parametrize("mode", ACCEPTED)
def test_accepted_mode(mode):
    job = ACCEPTED[mode]
    assert refusal(job) is None
    assert planned(job=job).world.nodes == len(job.nodes)


# --- how many workers ---------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"nproc_per_node": "1"}])
def test_one_worker_in_each_task(options):
    job = step(task=Task(0, 12, 0, 4))
    inputs = make_inputs(job=job, options=options)
    assert mode_of(inputs) is Mode.DIRECT


def test_several_workers_in_each_of_several_tasks():
    job = step(nodes=THREE[:2], task=Task(0, 8, 0, 4))
    inputs = make_inputs(job=job, options={"nproc_per_node": "4"})
    with pytest.raises(LaunchError) as caught:
        mode_of(inputs)
    assert caught.value.code == "HPC062"
    assert "srun started 8 tasks on 2 nodes" in str(caught.value)
    assert f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {COMMAND}" in str(
        caught.value
    )
