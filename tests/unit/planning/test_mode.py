"""Which mode is chosen, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.support.juelich import (
    BATCH,
    COMMAND,
    ONE_NODE_JOBS,
    SHELL,
    STEP,
    THREE,
    job_at,
    outside_a_step,
    step,
)
from tests.support.plans import BLOCK, make_inputs, mode_of, planned, refused
from torchrun_hpc.options import command_line
from torchrun_hpc.options.command_line import TORCHRUN, names_of
from torchrun_hpc.planning.mode import Mode, direct_mode_problem
from torchrun_hpc.schedulers import flux, hydra, openmpi, pals, slurm
from torchrun_hpc.schedulers.job import LaunchContext, Task

# --- the table of modes -------------------------------------------------------------

SRUN = f"srun --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}"

FOUR_EACH = step(task=Task(0, 12, 0, 4))
COUNTED = "tasks on 3 nodes (SLURM_STEP_TASKS_PER_NODE)"
IN_SCRIPT = "this is the batch script of a job of 3 nodes (SLURM_JOB_NODELIST)"
IN_SHELL = (
    "this shell is not on the job's 3 nodes (jwb[0001-0003] by SLURM_JOB_NODELIST)"
)
# The job as one of its tasks sees it, and how it is refused.
REFUSED = {
    "several tasks on every node": (FOUR_EACH, "HPC062", f"srun started 12 {COUNTED}"),
    "several tasks on some node": (
        step(task=Task(0, 4, 0, 2)), "HPC062", f"srun started 4 {COUNTED}"
    ),
    "several tasks on another node": (
        step(1, task=Task(2, 4, 0, 1)), "HPC062", f"srun started 4 {COUNTED}"
    ),
    "batch script of several nodes": (BATCH, "HPC061", IN_SCRIPT),
    "shell of salloc": (SHELL, "HPC060", IN_SHELL),
}  # fmt: skip
# The options that choose one node, and those that do not.
FREED_BY = [{"standalone": True}, {"nnodes": "1"}, {"nnodes": "1:1"}, {"nnodes": "01"}]
NOT_FREED_BY = [{}, {"nnodes": "3"}, {"nnodes": "1:3"}, {"standalone": False}]


@pytest.mark.parametrize(("job", "code", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("options", NOT_FREED_BY)
def test_refused_mode(job, code, message, options):
    error = refused(code, message, planned, job, options=options)
    assert SRUN in str(error)
    assert error.everywhere


@pytest.mark.parametrize(("job", "code", "message"), REFUSED.values(), ids=REFUSED)
def test_a_job_is_refused_before_the_options_are_known(job, code, message):
    if job.has_several_tasks:  # each may be a worker: the options decide
        assert mode_of(make_inputs(job)).is_direct
    inputs = make_inputs(job)
    is_agent = job.has_several_tasks
    error = refused(code, message, mode_of, inputs, has_agent=is_agent)
    assert SRUN in str(error)


def test_refusal_folds_many_nodes():
    many = tuple(f"n{number}" for number in range(500))
    job = outside_a_step(LaunchContext.ALLOCATION_SHELL, many, None)
    text = "500 nodes (n[0-499] by SLURM_JOB_NODELIST)"
    assert "srun --nodes=500 " in str(refused("HPC060", text, planned, job))


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_too_many_tasks_are_reported_once(rank):
    text = "srun started 8 tasks on 2 nodes"
    assert refused("HPC062", text, planned, job_at(BLOCK, rank)).everywhere


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "and an agent on each would start more"),
        ({"nproc_per_node": "4"}, "and --nproc_per_node=4 on each would start more"),
    ],
)
def test_too_many_tasks_for_an_explicit_number_of_workers(options, text):
    error = refused("HPC062", text, planned, FOUR_EACH, options=options)
    assert "Remove --nproc_per_node" in str(error)


# How mpirun and the like put four tasks on the first of three nodes by default, and the
# line that starts one task on each node.
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


@pytest.mark.parametrize(("launcher", "host_file", "line"), FILLED.values(), ids=FILLED)
def test_too_many_tasks_on_the_first_of_the_jobs_nodes(launcher, host_file, line):
    """srun uses all nodes unless an option says otherwise; the others do not."""
    job = replace(
        step(
            nodes=THREE[:1], task=Task(0, 4, 0, 4), allocated_nodes=3, launcher=launcher
        ),
        host_file=host_file,
    )
    message = f"{launcher.name} started 4 tasks on 1 node"
    error = refused("HPC062", message, planned, job, options={"nproc_per_node": "2"})
    assert str(error).endswith(f"one task per node:\n    {line} {COMMAND}")


@pytest.mark.parametrize("job", [job for job, *_ in REFUSED.values()], ids=REFUSED)
@pytest.mark.parametrize("options", FREED_BY)
def test_one_node_may_be_explicit_in_a_refused_mode(job, options):
    plan = planned(job, options=options)
    world = (plan.meeting.nodes, plan.meeting.node_rank, plan.workers.number)
    assert world == (1, 0, 2)
    assert plan.meeting.in_process
    assert not plan.ranks_follow_scheduler


ACCEPTED = {
    "one task on every node": STEP,
    "one task on every node of a subset": step(nodes=THREE[:2], allocated_nodes=3),
    **ONE_NODE_JOBS,
}


@pytest.mark.parametrize("job", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_mode(job):
    mode = Mode.ONE_NODE if len(job.nodes) == 1 else Mode.SEVERAL_NODES
    assert mode_of(make_inputs(job)) is mode
    assert planned(job).meeting.nodes == len(job.nodes)


# --- wrong values -------------------------------------------------------------------

WRONG_VALUES = {
    "nnodes": "two",
    "hpc_stall_report": "ten",
    "hpc_preload": "torch,",
    "hpc_rendezvous": "static",
}
EVERY_MODE = {
    **ACCEPTED,
    "without a job": None,
    "tasks that are workers": FOUR_EACH,
}


@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("name", list(WRONG_VALUES)[1:])
def test_a_wrong_value_is_refused_in_every_mode(name, mode):
    value = WRONG_VALUES[name]
    inputs = make_inputs(EVERY_MODE[mode], options={name: value})
    assert refused("HPC014", f"--{name}={value}", mode_of, inputs).everywhere


@pytest.mark.parametrize("mode", [*ACCEPTED, "without a job"])
def test_a_wrong_number_of_nodes_is_refused(mode):
    value = WRONG_VALUES["nnodes"]
    inputs = make_inputs(EVERY_MODE[mode], options={"nnodes": value})
    assert refused("HPC014", f"--nnodes={value}", mode_of, inputs).everywhere


@pytest.mark.parametrize("job", [BATCH, SHELL])
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_start_is_refused_before_a_wrong_value(name, job):
    inputs = make_inputs(job, options={name: WRONG_VALUES[name]})
    code = "HPC061" if job is BATCH else "HPC060"
    refused(code, SRUN, mode_of, inputs)


# --- how many workers ---------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"nproc_per_node": "1"}])
def test_one_worker_in_each_task(options):
    assert mode_of(make_inputs(FOUR_EACH, options=options)) is Mode.DIRECT


def test_several_workers_in_each_of_several_tasks():
    inputs = make_inputs(job_at(BLOCK, 0), options={"nproc_per_node": "4"})
    error = refused("HPC062", "srun started 8 tasks on 2 nodes", mode_of, inputs)
    assert f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {COMMAND}" in str(error)


# --- the command line of direct mode ------------------------------------------------


def direct(line, environ=None):
    """Parse a command line of direct mode, or refuse it."""
    parsed = command_line.parse(line.split(), environ or {})
    problem = direct_mode_problem(parsed, "srun launcher")
    if problem is not None:
        raise problem
    return parsed


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
        error = refused("HPC134", " does not work with ", direct, line)
        assert error.everywhere, line
        assert str(error).startswith(f"--{dest}"), line
        assert str(error).endswith("\n    srun launcher"), line


NUMBERS_OF_NODES = ["2", "3", "1:3", "2:2"]


@pytest.mark.parametrize("value", NUMBERS_OF_NODES)
def test_a_number_of_nodes_is_refused(value):
    error = refused("HPC134", "does not work with", direct, f"--nnodes={value} x.py")
    assert str(error).startswith(f"--nnodes={value} does not work")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PET_NNODES", value) for value in NUMBERS_OF_NODES),
        *((name, "3") for name in ("PET_MAX_RESTARTS", "PET_RDZV_ENDPOINT", "PET_TEE")),
    ],
)
def test_a_variable_of_the_agent_is_refused_by_name(name, value):
    environ = {"HOME": "/root", name: value}
    error = refused("HPC134", "does not work with", direct, "train.py", environ)
    assert str(error).startswith(f"{name}={value} does not work")


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


@pytest.mark.parametrize(("line", "problem"), BAD_LINES.items())
def test_a_line_that_is_wrong(line, problem):
    assert refused("HPC010", problem, direct, line).everywhere


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_HPC_DEBUG", "PET_MODULE"])
def test_a_variable_of_a_flag_that_is_no_number(variable):
    refused("HPC011", f"{variable}=yes", direct, "train.py", {variable: "yes"})
