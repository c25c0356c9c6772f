"""Which mode is chosen, and what is refused."""

from __future__ import annotations

import re

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

from torchrun_hpc.commandline import command_line
from torchrun_hpc.commandline.options import TORCHRUN
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.planning.mode import Mode, asks_for_one_node, direct_mode_problem
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
def test_one_node_may_be_typed_in_a_refused_mode(mode):
    for options in FREED_BY:
        plan = planned(job=REFUSED[mode][0], options=options)
        world = (plan.world.nodes, plan.world.node_rank, plan.world.workers)
        assert world == (1, 0, 2), options
        assert plan.rendezvous.listen == ("127.0.0.1", 0), options
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


# --- the command line of direct mode ------------------------------------------------


def direct(line, environ=None):
    """Parse a command line of direct mode, as it has to be."""
    environ = environ or {}
    found = command_line.parse(line.split(), environ)
    problem = direct_mode_problem(found, environ, "srun launcher")
    if problem is not None:
        raise problem
    return found


# What is typed: the options, what is run, its arguments.
LINES = {
    "train.py": ({}, "train.py", ()),
    "train.py --lr 0.1": ({}, "train.py", ("--lr", "0.1")),
    "-- train.py --lr 0.1": ({}, "train.py", ("--lr", "0.1")),
    "train.py -- --lr": ({}, "train.py", ("--lr",)),  # as torchrun does
    "train.py -h": ({}, "train.py", ("-h",)),
    "train.py --standalone --nnodes=2": (
        {},
        "train.py",
        ("--standalone", "--nnodes=2"),
    ),
    "train.py --max-restarts=3 -r 3": ({}, "train.py", ("--max-restarts=3", "-r", "3")),
    "-m package.train --lr 0.1": (
        {"module": (True, "--module")},
        "package.train",
        ("--lr", "0.1"),
    ),
    "--module package.train": ({"module": (True, "--module")}, "package.train", ()),
    "--no-python ./program -m": (
        {"no_python": (True, "--no_python")},
        "./program",
        ("-m",),
    ),
    "--no_python -- program": ({"no_python": (True, "--no_python")}, "program", ()),
    "--nproc-per-node=1 train.py": (
        {"nproc_per_node": ("1", "--nproc_per_node")},
        "train.py",
        (),
    ),
    "--nproc_per_node gpu train.py": (
        {"nproc_per_node": ("gpu", "--nproc_per_node")},
        "train.py",
        (),
    ),
    "--virtual-local-rank train.py": (
        {"virtual_local_rank": (True, "--virtual_local_rank")},
        "train.py",
        (),
    ),
    "--hpc-site=jsc --hpc_debug train.py": (
        {"hpc_site": ("jsc", "--hpc_site"), "hpc_debug": (True, "--hpc_debug")},
        "train.py",
        (),
    ),
    "--hpc-omp-threads auto train.py": (
        {"hpc_omp_threads": ("auto", "--hpc_omp_threads")},
        "train.py",
        (),
    ),
    "--hpc-rendezvous c10d train.py": (
        {"hpc_rendezvous": ("c10d", "--hpc_rendezvous")},
        "train.py",
        (),
    ),
}


def texts(options):
    return {name: (option.value, option.source) for name, option in options.items()}


@pytest.mark.parametrize("line", LINES)
def test_line(line):
    found = direct(line)
    assert (texts(found.options), found.script, found.arguments) == LINES[line]


@pytest.mark.parametrize(
    ("line", "form"), [("--hpc-dry-run", "table"), ("--hpc_dry_run=json", "json")]
)
def test_dry_run(line, form):
    found = direct(f"{line} train.py")
    assert found.options["hpc_dry_run"].value == form
    assert found.script == "train.py"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PET_HPC_SITE", "jsc", {"hpc_site": ("jsc", "PET_HPC_SITE")}),
        ("PET_NPROC_PER_NODE", "4", {"nproc_per_node": ("4", "PET_NPROC_PER_NODE")}),
        ("PET_HPC_DEBUG", "1", {"hpc_debug": (True, "PET_HPC_DEBUG")}),
        ("PET_HPC_DEBUG", "0", {}),
        ("PET_STANDALONE", "0", {}),
        (
            "PET_VIRTUAL_LOCAL_RANK",
            "1",
            {"virtual_local_rank": (True, "PET_VIRTUAL_LOCAL_RANK")},
        ),
        ("PET_HPC_DRY_RUN", "1", {"hpc_dry_run": ("table", "PET_HPC_DRY_RUN")}),
    ],
)
def test_variables_of_options(variable, value, expected):
    found = direct("train.py", {variable: value})
    assert texts(found.options) == expected


def test_what_is_typed_beats_its_variable():
    found = direct("--hpc-site none train.py", {"PET_HPC_SITE": "jsc"})
    assert texts(found.options) == {"hpc_site": ("none", "--hpc_site")}


ONE_NODE = [
    "--standalone train.py",
    "--nnodes=1 train.py",
    "--nnodes 1 train.py",
    "--nnodes=1:1 train.py",
    "--nnodes=01 train.py",
    "--standalone --nproc_per_node=4 --max-restarts=3 train.py",
    "--max-restarts 3 --nnodes 1 train.py",
    "-h",
    "--help",
    "--hpc-debug -h train.py",
]


@pytest.mark.parametrize("line", ONE_NODE)
def test_one_node_and_help_are_seen(line):
    found = command_line.parse(line.split(), {})
    assert found.wants_help or asks_for_one_node(found.options)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PET_STANDALONE", "1"), ("PET_NNODES", "1"), ("PET_NNODES", "1:1")],
)
def test_one_node_by_a_variable(variable, value):
    environ = {variable: value, "PET_MAX_RESTARTS": "3"}
    found = command_line.parse(["train.py"], environ)
    assert asks_for_one_node(found.options)


# torchrun's options that are for its agent; with a value, if they take one.
AGENTS = [
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=jwb0001:29400",
    "--rdzv-id=1",
    "--rdzv-conf=is_host=1",
    "--max-restarts=3",
    "--monitor-interval=1",
    "--start-method=spawn",
    "--event-log-handler=null",
    "--role=trainer",
    "--run-path",
    "--log-dir=logs",
    "--log-line-prefix-template=x",
    "-r",
    "--redirects=3",
    "-t",
    "--tee=3",
    "--local-ranks-filter=0",
    "--duplicate-stdout-filters=x",
    "--duplicate-stderr-filters=x",
    "--node-rank=0",
    "--master-addr=jwb0001",
    "--master-port=29500",
    "--local-addr=jwb0001",
    "--logs-specs=x",
    "--numa-binding=node",
    "--signals-to-handle=SIGTERM",
    "--shutdown-timeout=30",
]
AND_VALUES = [option.replace("=", " ", 1) for option in AGENTS if "=" in option]


@pytest.mark.parametrize("before", ["", "--nproc-per-node=1 ", "-m "])
def test_an_option_of_the_agent_is_refused_by_name(before):
    for option in (*AGENTS, "-r 3", "-t 3", *AND_VALUES):
        name, separator, value = re.fullmatch("([^= ]+)([= ]?)(.*)", option).groups()
        for spelled in name, name[:2] + name[2:].replace("-", "_"):
            line = f"{before}{spelled}{separator}{value} train.py"
            with pytest.raises(LaunchError) as caught:
                direct(line)
            assert caught.value.code == "HPC134", line
            assert caught.value.everywhere, line
            assert str(caught.value).startswith(spelled), line
            assert str(caught.value).endswith("once on each node: srun launcher"), line


def test_every_option_of_torchrun_is_allowed_or_refused():
    allowed = "nnodes standalone module no_python virtual_local_rank nproc_per_node"
    here = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in AGENTS}
    here -= {"r", "t"}
    assert set(TORCHRUN) == here | {*allowed.split(), "print_completion"}


@pytest.mark.parametrize("value", ["2", "3", "1:3", "2:2"])
def test_a_number_of_nodes_is_refused(value):
    with pytest.raises(LaunchError, match=f"^--nnodes={value} is no option") as caught:
        direct(f"--nnodes={value} train.py")
    assert caught.value.code == "HPC134"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PET_MAX_RESTARTS", "3"), ("PET_RDZV_ENDPOINT", "a:1"), ("PET_TEE", "3")],
)
def test_a_variable_of_the_agent_is_refused_by_name(variable, value):
    environ = {"HOME": "/root", variable: value}
    with pytest.raises(
        LaunchError, match=f"^{variable}={value} is no option"
    ) as caught:
        direct("train.py", environ)
    assert caught.value.code == "HPC134"


def test_a_number_of_nodes_by_a_variable_is_refused():
    with pytest.raises(LaunchError, match=r"^PET_NNODES=2 is no option") as caught:
        direct("train.py", {"PET_NNODES": "2"})
    assert caught.value.code == "HPC134"


BAD_LINES = {
    "": "the script is missing",
    "--": "the script is missing",
    "--hpc-debug": "the script is missing",
    "--no-python": "the script is missing",
    "-m": "the script is missing",
    "--hpc-site": "expected one argument",
    "--nproc-per-node": "expected one argument",
    "--standalone=1 train.py": "ignored explicit argument '1'",
    "--hpc train.py": "ambiguous option: --hpc could match",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_is_wrong(line):
    with pytest.raises(LaunchError, match=re.escape(BAD_LINES[line])) as caught:
        direct(line)
    assert (caught.value.code, caught.value.everywhere) == ("HPC010", True)
    assert str(caught.value).endswith("--help lists all options")


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_HPC_DEBUG", "PET_MODULE"])
def test_a_variable_of_a_flag_that_is_no_number(variable):
    with pytest.raises(LaunchError, match=f"{variable}=yes") as caught:
        direct("train.py", {variable: "yes"})
    assert caught.value.code == "HPC011"
