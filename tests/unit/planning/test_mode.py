"""Which mode is chosen, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.juelich import (
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
from tests.support.plans import planned, refusal, refused
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import TORCHRUN, names_of
from torchrun_hpc.planning.mode import Mode, direct_mode_problem
from torchrun_hpc.schedulers import flux, hydra, openmpi, pals, slurm
from torchrun_hpc.schedulers.job import LaunchContext, Task

# --- the table of modes -------------------------------------------------------------

SRUN = f"srun --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}"

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
        "this is the batch script of a job of 3 nodes",
    ),
    "shell of salloc": (SHELL, "HPC060", "this shell is not on the job's 3 nodes"),
}
# The options that choose one node, and those that do not.
FREED_BY = [{"standalone": True}, {"nnodes": "1"}, {"nnodes": "1:1"}, {"nnodes": "01"}]
NOT_FREED_BY = [{}, {"nnodes": "3"}, {"nnodes": "1:3"}, {"standalone": False}]


@pytest.mark.parametrize("mode", REFUSED)
def test_refused_mode(mode):
    job, code, message = REFUSED[mode]
    for options in NOT_FREED_BY:
        error = refused(code, message, job=job, options=options)
        assert SRUN in str(error), options
        assert error.everywhere, options
    # And before the options are known.
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
        (SHELL, "(jwb[0001-0003] by SLURM_JOB_NODELIST)"),
    ],
)
def test_refusal_names_the_variable(job, variable):
    assert variable in str(refusal(job))


def test_refusal_folds_many_nodes():
    many = tuple(f"n{number}" for number in range(500))
    job = outside_a_step(LaunchContext.ALLOCATION_SHELL, many, None)
    message = str(refusal(job))
    assert "500 nodes (n[0-499] by SLURM_JOB_NODELIST)" in message
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
    assert "Remove --nproc_per_node" in str(error)


# Four tasks, which mpirun and the like put on the first of three nodes if nothing else
# is typed; what starts one on each.
FILLED = {
    "srun": (slurm.SRUN, "", "srun --nodes=1 --ntasks=1 --ntasks-per-node=1"),
    "mpirun": (
        openmpi.MPIRUN,
        "",
        "mpirun -x PATH -np 3 --map-by ppr:1:node --bind-to none",
    ),
    "mpirun that has to be told": (
        openmpi.MPIRUN,
        "HOSTS",
        "mpirun -x PATH -np 3 --map-by ppr:1:node --hostfile HOSTS --bind-to none",
    ),
    "Hydra": (hydra.MPIEXEC, "HOSTS", "mpiexec -n 3 -ppn 1 -f HOSTS -bind-to none"),
    "PALS": (pals.MPIEXEC, "", "mpiexec -n 3 --ppn 1 --cpu-bind none"),
    "flux": (
        flux.RUN,
        "",
        "flux run --nodes=3 --tasks-per-node=1 --exclusive -o cpu-affinity=off",
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
    assert str(error).endswith(f"one task per node:\n    {line} {COMMAND}")


@pytest.mark.parametrize("mode", REFUSED)
def test_one_node_may_be_typed_in_a_refused_mode(mode):
    for options in FREED_BY:
        plan = planned(job=REFUSED[mode][0], options=options)
        world = (plan.meeting.nodes, plan.meeting.node_rank, plan.workers.number)
        assert world == (1, 0, 2), options
        assert plan.meeting.in_process, options
        assert not plan.ranks_follow_scheduler, options


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
    assert planned(job=job).meeting.nodes == len(job.nodes)


# --- what is typed wrong ------------------------------------------------------------

WRONG_VALUES = {
    "nnodes": "two",
    "hpc_stall_report": "ten",
    "hpc_preload": "torch,",
    "hpc_rendezvous": "static",
}
EVERY_MODE = {
    **ACCEPTED,
    "without a job": None,
    "tasks that are workers": step(task=Task(0, 12, 0, 4)),
}


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", list(WRONG_VALUES)[1:])
def test_a_wrong_value_is_refused_in_every_mode(name, mode):
    value = WRONG_VALUES[name]
    inputs = make_inputs(job=EVERY_MODE[mode], options={name: value})
    assert refused("HPC014", f"--{name}={value}", inputs, by=mode_of).everywhere


@pytest.mark.parametrize("mode", [*ACCEPTED, "without a job"])
def test_a_wrong_number_of_nodes_is_refused(mode):
    value = WRONG_VALUES["nnodes"]
    inputs = make_inputs(job=EVERY_MODE[mode], options={"nnodes": value})
    assert refused("HPC014", f"--nnodes={value}", inputs, by=mode_of).everywhere


@pytest.mark.parametrize("job", [BATCH, SHELL])
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_start_is_refused_before_a_wrong_value(name, job):
    inputs = make_inputs(job=job, options={name: WRONG_VALUES[name]})
    code = "HPC061" if job is BATCH else "HPC060"
    refused(code, SRUN, inputs, by=mode_of)


# --- how many workers ---------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"nproc_per_node": "1"}])
def test_one_worker_in_each_task(options):
    job = step(task=Task(0, 12, 0, 4))
    inputs = make_inputs(job=job, options=options)
    assert mode_of(inputs) is Mode.DIRECT


def test_several_workers_in_each_of_several_tasks():
    job = step(nodes=THREE[:2], task=Task(0, 8, 0, 4))
    inputs = make_inputs(job=job, options={"nproc_per_node": "4"})
    error = refused("HPC062", "srun started 8 tasks on 2 nodes", inputs, by=mode_of)
    assert f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {COMMAND}" in str(error)


# --- the command line of direct mode ------------------------------------------------


def direct(line, environ=None):
    """Parse a command line of direct mode, as it has to be."""
    found = command_line.parse(line.split(), environ or {})
    problem = direct_mode_problem(found, "srun launcher")
    if problem is not None:
        raise problem
    return found


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("train.py --max-restarts=3 -r 3", {}),  # the script's
        ("-- train.py --lr 0.1", {}),
        ("-m package.train", {}),
        ("--no_python -- program -t", {}),
        ("--nproc-per-node=1 train.py", {"PET_STANDALONE": "0"}),
        ("--virtual-local-rank --hpc-dry-run train.py", {"PET_HPC_SITE": "jsc"}),
        ("--hpc-site=jsc --hpc_dry_run=json x", {"PET_VIRTUAL_LOCAL_RANK": "1"}),
        ("--hpc-rendezvous c10d --hpc_debug x", {"PET_NPROC_PER_NODE": "4"}),
    ],
)
def test_a_line_that_direct_mode_accepts(line, environ):
    assert direct(line, environ).options.script


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("--standalone train.py", {}),
        ("--nnodes=1 train.py", {}),
        ("--nnodes=1:1 train.py", {}),
        ("--nnodes=01 train.py", {}),
        ("--max-restarts 3 --nnodes 1 train.py", {}),
        ("", {"PET_STANDALONE": "1"}),
        ("", {"PET_NNODES": "1"}),
        ("", {"PET_NNODES": "1:1"}),
    ],
)
def test_one_node_is_seen(line, environ):
    found = command_line.parse(line.split(), environ)
    assert found.options.asks_for_one_node


# torchrun's options that are not for its agent alone.
ALLOWED = (
    "nnodes standalone module no_python virtual_local_rank nproc_per_node "
    "print_completion"
)


@pytest.mark.parametrize("dest", sorted(TORCHRUN.keys() - {*ALLOWED.split()}))
def test_an_option_of_the_agent_is_refused_by_name(dest):
    values = [""] if TORCHRUN[dest] is bool else ["=3", " 3"]
    before = "", "--nproc-per-node=1 ", "-m "
    for first, name, value in product(before, names_of(dest), values):
        line = f"{first}{name}{value} train.py"
        error = refused("HPC134", " does not work with ", line, by=direct)
        assert error.everywhere, line
        assert str(error).startswith(f"--{dest}"), line
        assert str(error).endswith("\n    srun launcher"), line


@pytest.mark.parametrize("value", ["2", "3", "1:3", "2:2"])
def test_a_number_of_nodes_is_refused(value):
    for source, line, environ in (
        ("--nnodes", f"--nnodes={value} train.py", {}),
        ("PET_NNODES", "train.py", {"HOME": "/root", "PET_NNODES": value}),
    ):
        error = refused("HPC134", "does not work with", line, environ, by=direct)
        assert str(error).startswith(f"{source}={value} does not work")


@pytest.mark.parametrize("name", ["PET_MAX_RESTARTS", "PET_RDZV_ENDPOINT", "PET_TEE"])
def test_a_variable_of_the_agent_is_refused_by_name(name):
    environ = {"HOME": "/root", name: "3"}
    error = refused("HPC134", "does not work with", "train.py", environ, by=direct)
    assert str(error).startswith(f"{name}=3 does not work")


BAD_LINES = {
    "": "no script given",
    "--": "no script given",
    "--hpc-debug": "no script given",
    "--no-python": "no script given",
    "-m": "no script given",
    "--hpc-site": "expected one argument",
    "--nproc-per-node": "expected one argument",
    "--standalone=1 train.py": "ignored explicit argument '1'",
    "--hpc train.py": "ambiguous option: --hpc could match",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_wrong(line):
    error = refused("HPC010", BAD_LINES[line], line, by=direct)
    assert error.everywhere


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_HPC_DEBUG", "PET_MODULE"])
def test_a_variable_of_a_flag_that_is_no_number(variable):
    refused("HPC011", f"{variable}=yes", "train.py", {variable: "yes"}, by=direct)
