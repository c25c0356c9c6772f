from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import (
    BATCH,
    COMMAND,
    INTERACTIVE,
    JSC,
    RECORDED,
    SHELL,
    THREE,
    juelich,
    make_inputs,
    make_network,
    mode_of,
    outside_a_step,
    recorded,
    step,
)

from torchrun_hpc import schedulers
from torchrun_hpc.commandline import rdzv_conf
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import endpoints
from torchrun_hpc.planning.plan import make_plan
from torchrun_hpc.reporting import report
from torchrun_hpc.reporting.reporter import is_reporter, reports_wait_for
from torchrun_hpc.schedulers import flux, hydra, openmpi, pals, slurm
from torchrun_hpc.schedulers.job import LaunchContext, Task
from torchrun_hpc.schedulers.process import Process
from torchrun_hpc.setting import Setting

# sha256("19.0") begins with 0xdccc79b9ce9e3780; mod 9000, and 20000 on top.
PORT = 25592


def planned(rank=0, *, options=None, network=None, **changes):
    """Plan a launch; by default, Jülich's three nodes as seen from one of them."""
    inputs = make_inputs(rank, options=options, network=network, **changes)
    mode = mode_of(inputs, has_agent=True)  # these are about agents
    return make_plan(replace(inputs, mode=mode))


def refusal(job, **how):
    """Return why a job cannot be launched from here with nothing typed, if so."""
    try:
        mode_of(make_inputs(job=job), **how)
    except LaunchError as error:
        return error
    return None


def values(settings):
    return {name: setting.value for name, setting in settings.items()}


def conf_of(plan):
    pairs = plan.options["rdzv_conf"].value.split(",")
    return dict(pair.split("=") for pair in pairs)


def refused(code, message, *args, **kwargs):
    """Expect a message of a code that contains a text; return the error."""
    with pytest.raises(LaunchError, match=re.escape(message)) as caught:
        planned(*args, **kwargs)
    assert caught.value.code == code
    assert str(caught.value).isprintable()
    return caught.value


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


# --- one node -----------------------------------------------------------------------

ONE_NODE_JOBS = {
    "step": step(nodes=THREE[:1], allocated_nodes=3),
    "batch script": outside_a_step(LaunchContext.BATCH_SCRIPT, THREE[:1]),
    "interactive step": INTERACTIVE,
}


@pytest.mark.parametrize("job", ONE_NODE_JOBS.values(), ids=ONE_NODE_JOBS)
def test_one_node_of_a_job(job):
    plan = planned(job=job)
    assert values(plan.options) == {
        "nnodes": "1",
        "local_addr": "127.0.0.1",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_id": job.launch_id,
    }
    assert values(plan.environment) == {"OMP_NUM_THREADS": "1"}
    assert (plan.rendezvous.endpoint, plan.rendezvous.local_address) == (
        "localhost",
        "127.0.0.1",
    )
    assert (plan.world.nodes, plan.ranks_follow_scheduler) == (1, False)
    assert plan.rendezvous.listen == ("127.0.0.1", 0)
    assert plan.messages.warnings == ()
    assert is_reporter(plan.world.report_rank)


@pytest.mark.parametrize("job", [None, *ONE_NODE_JOBS.values()])
def test_one_node_needs_no_name_and_no_network(job):
    plan = planned(job=job, network=make_network({"lo": "127.0.0.1/8"}))
    assert plan.options["local_addr"].value == "127.0.0.1"
    assert plan.messages.warnings == ()


@pytest.mark.parametrize("options", [{}, {"nnodes": "1"}, {"nnodes": "1:1"}])
def test_laptop(options):
    plan = planned(job=None, options=options)
    expected = {"standalone": True, "local_addr": "127.0.0.1", "nnodes": "1"}
    assert values(plan.options) == {
        name: value for name, value in expected.items() if name not in options
    }
    assert plan.messages.title == "no scheduler"
    assert is_reporter(plan.world.report_rank)
    assert plan.environment.keys() == {"OMP_NUM_THREADS"}


@pytest.mark.parametrize("task", [0, 1, 5])
@pytest.mark.parametrize("options", [{"standalone": True}, {"nnodes": "1"}])
def test_one_world_per_task(task, options):
    job = step(task // 2, task=Task(task, 6, task % 2, 2))
    plan = planned(task // 2, job=job, options=options)
    assert plan.world.nodes == 1
    assert is_reporter(plan.world.report_rank) is (task == 0)
    assert "GLOO_SOCKET_IFNAME" not in plan.environment
    assert set(options).isdisjoint(plan.options)


@pytest.mark.parametrize(
    ("options", "derived"),
    [
        ({"rdzv_id": "mine"}, "nnodes local_addr rdzv_backend rdzv_endpoint"),
        (
            {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:29400"},
            "nnodes local_addr rdzv_id rdzv_conf",
        ),
        ({"local_addr": "10.20.0.1"}, "nnodes rdzv_id rdzv_backend rdzv_endpoint"),
        ({"standalone": True}, "nnodes local_addr"),
        ({"rdzv_backend": "static"}, "nnodes local_addr"),
        ({"master_port": 29500}, "nnodes local_addr"),
        (
            {"rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"},
            "nnodes local_addr rdzv_id",
        ),
    ],
)
def test_what_is_typed_for_one_node_stays(options, derived):
    plan = planned(job=ONE_NODE_JOBS["step"], options=options)
    assert plan.options.keys() == set(derived.split())


@pytest.mark.parametrize(
    ("conf", "expected"),
    [(None, "is_host=1"), ("join_timeout=5", "join_timeout=5,is_host=1")],
)
def test_typed_endpoint_for_one_node_is_hosted_here(conf, expected):
    options = {"rdzv_endpoint": "jwb0001:29400"} | ({"rdzv_conf": conf} if conf else {})
    plan = planned(job=ONE_NODE_JOBS["step"], options=options)
    assert plan.options["rdzv_conf"].value == expected
    assert plan.rendezvous.endpoint == "jwb0001:29400"
    assert plan.rendezvous.listen == ("10.10.0.1", 29400)


@pytest.mark.parametrize(
    "options",
    [
        {"rdzv_backend": "etcd-v2"},
        {"rdzv_backend": "c10d", "rdzv_conf": "store_type=file"},
    ],
)
def test_one_node_and_a_rendezvous_without_endpoint(options):
    plan = planned(job=ONE_NODE_JOBS["step"], options=options)
    assert "rdzv_endpoint" not in plan.options


@pytest.mark.parametrize(
    "options",
    [
        {"rdzv_endpoint": "jwb0001:29400", "rdzv_conf": "is_host=0"},
        {"rdzv_endpoint": "jwb0002:29400"},
    ],
)
def test_one_node_may_be_the_guest_of_a_store_elsewhere(options):
    plan = planned(job=ONE_NODE_JOBS["step"], options=options)
    assert plan.rendezvous.listen is None
    assert "rdzv_conf" not in plan.options


def test_interactive_step_shows_how_to_start_on_all_nodes():
    (note,) = planned(job=INTERACTIVE).messages.notes
    line = f"srun --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}"
    text = f"this is 1 of 3 nodes of the job; for all of them: {line}"
    assert note == Message("HPC073", text)


def test_interactive_step_of_a_job_of_one_node_says_nothing():
    assert planned(job=replace(INTERACTIVE, allocated_nodes=1)).messages.notes == ()


@pytest.mark.parametrize("job", ONE_NODE_JOBS.values(), ids=ONE_NODE_JOBS)
def test_a_range_is_the_users_so_that_others_may_join_one_node(job):
    plan = planned(job=job, options={"nnodes": "1:2"})
    assert "nnodes" not in plan.options
    assert (plan.world.nodes, plan.world.may_grow, plan.rendezvous.backend) == (
        1,
        True,
        "c10d",
    )
    port = endpoints.port_of(job.launch_id)
    assert plan.rendezvous.endpoint == f"jwb0001i:{port}"
    assert (plan.rendezvous.listen, plan.rendezvous.may_join) == (
        ("10.20.0.1", port),
        False,
    )
    assert (plan.rendezvous.local_address, conf_of(plan)["is_host"]) == (
        "10.20.0.1",
        "1",
    )
    assert plan.options["local_addr"].value == "10.20.0.1"
    assert plan.options["rdzv_id"].value == job.launch_id
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    codes = [note.code for note in plan.messages.notes]
    assert codes == (["HPC073"] if job.start is LaunchContext.INTERACTIVE_STEP else [])


# What a second agent types, on which node, and whether it may be the host.
JOINING = {
    "on another node": ({"rdzv_endpoint": "jwb0001i:7"}, 1, False),
    "on another node, a number": ({"rdzv_endpoint": "10.20.0.1:7"}, 1, False),
    "on the same node": ({"rdzv_endpoint": "jwb0001i:7"}, 0, True),
    "on the same node, a number": ({"rdzv_endpoint": "10.20.0.1:7"}, 0, True),
}


@pytest.mark.parametrize("case", JOINING)
@pytest.mark.parametrize("with_job", [True, False])
def test_an_agent_that_joins_by_hand(case, with_job):
    options, rank, is_here = JOINING[case]
    job = step(nodes=(THREE[rank],)) if with_job else None
    options = options | {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_id": "19.1"}
    plan = planned(rank, job=job, options=options, hostname=THREE[rank])
    assert plan.world.may_grow
    assert plan.rendezvous.may_join
    assert plan.rendezvous.listen == (("10.20.0.1", 7) if is_here else None)
    assert plan.options.keys().isdisjoint({"nnodes", "rdzv_id"})
    assert plan.rendezvous.local_address == f"10.20.0.{rank + 1}"
    if with_job:
        assert conf_of(plan)["is_host"] == str(int(is_here))


@pytest.mark.parametrize("job", [None, step(nodes=("jwb0001",))])
def test_who_says_that_it_is_the_host_does_not_join(job):
    options = {"nnodes": "1:2", "rdzv_backend": "c10d"}
    options |= {"rdzv_endpoint": "jwb0001i:7", "rdzv_conf": "is_host=1"}
    assert not planned(job=job, options=options).rendezvous.may_join


def test_nobody_joins_a_number_of_nodes():
    assert not planned(options={"rdzv_endpoint": "jwb0001:7"}).rendezvous.may_join
    assert not planned().world.may_grow
    assert not planned(options={"nnodes": "1:3"}).world.may_grow
    assert planned(options={"nnodes": "1:4"}).world.may_grow


@pytest.mark.parametrize("job", [None, step(), ONE_NODE_JOBS["step"]])
def test_a_range_and_standalone(job):
    plan = planned(job=job, options={"nnodes": "1:2", "standalone": True})
    assert plan.options["nnodes"].value == "1"
    text = "--nnodes=1:2 is 1: nobody can join with --standalone"
    assert plan.messages.notes == (Message("HPC155", text),)


@pytest.mark.parametrize("options", [{"rdzv_backend": "static"}, {"master_port": 7}])
@pytest.mark.parametrize(("nodes", "nnodes"), [(1, "1:2"), (3, "2:4"), (3, "3:9")])
def test_static_waits_for_the_highest_number(options, nodes, nnodes):
    job = step(nodes=THREE[:nodes])
    high = nnodes.partition(":")[2]
    text = f"--nnodes={nnodes}, but the static rendezvous waits for {high} nodes"
    error = refused("HPC157", text, job=job, options=options | {"nnodes": nnodes})
    assert error.everywhere


def test_one_node_whose_name_no_launcher_tells():
    job = step(nodes=("",), hostname="jwb0001")
    plan = planned(job=job, options={"nnodes": "1:2"}, hostname="jwb0001")
    assert (plan.rendezvous.endpoint, plan.rendezvous.local_address) == (
        f"jwb0001i:{PORT}",
        "10.20.0.1",
    )


@pytest.mark.parametrize("options", [{"rdzv_backend": "static"}, {"master_port": 1}])
def test_static_rank_beyond_one_node_is_refused(options):
    """It would wait for a rank 0 that nobody starts."""
    job = ONE_NODE_JOBS["step"]
    options = {**options, "node_rank": 1}
    refused(
        "HPC064", "--node_rank=1, but a world of one node", job=job, options=options
    )


@pytest.mark.parametrize("job", [None, *ONE_NODE_JOBS.values()])
@pytest.mark.parametrize(
    "options", [{}, {"nnodes": "1"}, {"standalone": True}, {"master_addr": "127.0.0.1"}]
)
def test_rank_beyond_one_node_is_ignored_where_torch_ignores_it(job, options):
    plan = planned(job=job, options={**options, "node_rank": 1})
    assert plan.options["node_rank"].value == 0
    (advice,) = plan.messages.advice
    assert advice.code == "HPC151"
    assert advice.text.startswith("--node_rank=1 is ignored, a world of one node")
    assert planned(job=job, options={**options, "node_rank": 0}).messages.advice == ()


@pytest.mark.parametrize(
    ("run_id", "taken"),
    [("a/b", False), ("x" * 246, True), ("x" * 247, False), ("é" * 124, False)],
)
def test_id_that_names_no_folder_is_left_to_torch_on_one_node(run_id, taken):
    options = planned(job=None, options={"rdzv_id": run_id}).options
    assert values(options).get("rdzv_id") == (None if taken else "none")


@pytest.mark.parametrize("nnodes", [" 1", "+1", "1 ", "1 : +1", "01"])
def test_numbers_of_nodes_as_torch_reads_them(nnodes):
    plan = planned(job=None, options={"nnodes": nnodes})
    assert (plan.world.nodes, "nnodes" in plan.options) == (1, False)


def test_backend_of_standalone_is_torchs_own():
    plan = planned(job=None, options={"standalone": True, "rdzv_backend": "etcd"})
    assert plan.rendezvous.backend == "c10d"
    assert values(plan.options)["rdzv_backend"] == "c10d"


# --- several nodes without a scheduler ----------------------------------------------


def test_typed_by_hand_on_each_machine():
    options = {"nnodes": "2", "node_rank": 1, "master_addr": "10.10.10.11"}
    plan = planned(job=None, options=options)
    assert (plan.world.nodes, plan.world.node_rank, plan.options) == (2, 1, {})
    assert (plan.rendezvous.endpoint, plan.messages.title) == (
        "10.10.10.11:29500",
        "no scheduler",
    )
    assert plan.environment.keys() == {"OMP_NUM_THREADS"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("host", "own", "interface"), [("jwb0001i", 20, "ib0"), ("jwb0001", 10, "eth0")]
)
def test_typed_c10d_on_each_machine(rank, host, own, interface):
    options = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:1"}
    plan = planned(rank, job=None, options=options, hostname=f"jwb000{rank + 1}")
    # Torch knows node 0 by its name; in the other network it has another one.
    is_told = rank == 0 and host == "jwb0001i"
    conf = plan.options.get("rdzv_conf")
    assert (conf and conf.value) == ("is_host=1" if is_told else None)
    assert plan.options["local_addr"].value == f"10.{own}.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == interface
    assert plan.rendezvous.listen == ((f"10.{own}.0.1", 1) if is_told else None)
    assert is_reporter(plan.world.report_rank) is (rank == 0)


def test_typed_static_on_each_machine_gets_the_interface():
    options = {"nnodes": "2", "node_rank": 1, "master_addr": "10.20.0.1"}
    plan = planned(1, job=None, options=options)
    assert plan.options == {}
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert (plan.interface, is_reporter(plan.world.report_rank)) == ("ib0", False)


def test_static_node_0_is_on_another_machine():
    options = {"nnodes": "2", "master_addr": "jwb0001i"}
    (said,) = planned(1, job=None, options=options).messages.warnings
    assert said.code == "HPC137"
    assert "--master_addr=jwb0001i is no address of this machine" in said.text
    assert planned(0, job=None, options=options).messages.warnings == ()


@pytest.mark.parametrize("explicit", [{}, {"node_rank": 1}, {"rdzv_backend": "c10d"}])
def test_several_nodes_and_nothing_that_says_which(explicit):
    options = {"nnodes": "2"} | explicit
    refused("HPC066", "--nnodes=2, but no scheduler's", job=None, options=options)


def test_several_nodes_without_scheduler_and_a_name_that_does_not_resolve():
    options = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "nowhere:1"}
    message = "--rdzv_endpoint=nowhere:1 does not resolve here"
    refused("HPC067", message, job=None, options=options)


def test_standalone_and_several_nodes():
    options = {"standalone": True, "nnodes": "2"}
    refused("HPC065", "--nnodes=2 and --standalone", options=options)


@pytest.mark.parametrize("address", ["nonsense", "10.20.0.2"])
@pytest.mark.parametrize("job", [None, "three nodes"])
def test_typed_local_address_of_another_node(address, job):
    error = refused(
        "HPC052",
        f"--local_addr={address} is not an address of this node",
        options={"local_addr": address},
        **({} if job else {"job": None}),
    )
    assert "10.20.0.1" in str(error)
    assert not error.everywhere


def test_suspicion_of_a_node_rank_that_is_0_everywhere():
    plan = planned(0, options={"node_rank": 0})
    assert plan.messages.suspicion == "is it --node_rank=0 on every node?"
    assert planned(0).messages.suspicion == ""


def test_head_whose_fast_name_resolves_elsewhere_only_takes_what_comes():
    network = juelich(0, hosts={"jwb0001i": ""})
    assert planned(0, network=network).rendezvous.listen is None


# --- three nodes at Jülich ----------------------------------------------------------

JUELICH = [
    # node, its address, is_host, where it listens
    (0, "10.20.0.1", "1", ("10.20.0.1", PORT)),
    (1, "10.20.0.2", "0", None),
    (2, "10.20.0.3", "0", None),
]


@pytest.mark.parametrize(("rank", "address", "is_host", "listen"), JUELICH)
def test_three_nodes_at_juelich(rank, address, is_host, listen):
    plan = planned(rank)
    assert values(plan.options) == {
        "nnodes": "3",
        "rdzv_id": "19.0",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"10.20.0.1:{PORT}",
        "rdzv_conf": f"is_host={is_host},read_timeout=600,join_timeout=900",
        "local_addr": address,
        "node_rank": 0,
    }
    assert values(plan.environment) == {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert (plan.world.nodes, plan.world.node_rank, plan.world.workers) == (3, rank, 2)
    assert plan.rendezvous.endpoint == f"jwb0001i:{PORT}"
    assert (plan.rendezvous.local_address, plan.rendezvous.listen) == (address, listen)
    assert is_reporter(plan.world.report_rank) is (rank == 0)
    assert plan.ranks_follow_scheduler
    assert plan.messages.title == "Slurm 19.0"
    assert plan.messages.notes == ()
    assert plan.messages.warnings == ()


def test_values_carry_their_sources():
    provenance = {name: option.source for name, option in planned().options.items()}
    assert provenance == {
        "nnodes": "SLURM_STEP_NODELIST",
        "rdzv_id": "SLURM_JOB_ID, SLURM_STEP_ID",
        "rdzv_backend": "default",
        "rdzv_endpoint": (
            "first of SLURM_STEP_NODELIST, jwb0001i by site jsc, its address, "
            "port by hash of 19.0"
        ),
        "rdzv_conf": "defaults",
        "local_addr": "this node's address",
        "node_rank": "SLURMD_NODENAME",
    }
    gloo = planned().environment["GLOO_SOCKET_IFNAME"]
    assert gloo.source == "ib0 has 10.20.0.1"


@pytest.mark.parametrize("rank", range(3))
def test_without_a_site_the_plain_names_are_used(rank):
    plan = planned(rank, site=None)
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert plan.rendezvous.endpoint == f"jwb0001:{PORT}"
    assert plan.messages.notes == ()


def test_subset_of_the_jobs_nodes():
    nodes = ("jwb0002", "jwb0003")
    plan = planned(
        0,
        job=step(nodes=nodes, launch_id="22.0", allocated_nodes=3),
        network=juelich(1),
    )
    assert plan.messages.title == "Slurm 22.0 (2 of 3 nodes)"
    assert plan.options["nnodes"].value == "2"
    assert plan.rendezvous.listen == ("10.20.0.2", 20706)


@pytest.mark.parametrize("rank", range(3))
def test_ranks_follow_the_scheduler_where_names_sort_otherwise(rank):
    nodes = ("n9", "n10", "n11")
    hosts = {"n9": "10.20.0.1", "n10": "10.20.0.2", "n11": "10.20.0.3"}
    plan = planned(
        rank, site=None, job=step(rank, nodes=nodes), network=juelich(rank, hosts=hosts)
    )
    assert (plan.world.node_rank, plan.ranks_follow_scheduler) == (rank, True)
    assert plan.rendezvous.endpoint == f"n9:{PORT}"
    assert (plan.rendezvous.listen is not None) is (rank == 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nnodes", "3"),
        ("nnodes", "2:3"),
        ("rdzv_id", "mine"),
        ("rdzv_backend", "c10d"),
        ("local_addr", "10.20.0.1"),
        ("local_addr", "jwb0001i"),
    ],
)
def test_what_is_typed_stays_as_typed(name, value):
    plan = planned(options={name: value})
    derived = planned().options.keys()
    assert plan.options.keys() == derived - {name}
    assert plan.messages.notes == ()


@pytest.mark.parametrize("rank", range(3))
def test_typed_local_address_chooses_the_interface(rank):
    plan = planned(rank, options={"local_addr": f"10.10.0.{rank + 1}"})
    assert plan.rendezvous.local_address == f"10.10.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"


def test_typed_local_address_does_not_move_the_endpoint():
    """The other nodes cannot know what was typed on this one."""
    plan = planned(0, options={"local_addr": "10.10.0.1"})
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"
    assert plan.rendezvous.listen == ("10.20.0.1", PORT)


# --- typed endpoints ----------------------------------------------------------------


class Typed(NamedTuple):
    """What becomes of a typed endpoint."""

    endpoint: str  # for a person
    number: str  # for torch
    host: int | None  # the node that hosts it
    note: bool = False  # whether it was rewritten


ALIASES = {
    "head": "10.20.0.1",
    "second": "10.20.0.2",
    "second-slow": "10.10.0.2",
    "vip": "10.20.0.99",
    "vip6": "fd00::99",
    "jwb0001.juwels": "10.10.0.1",
    "jwb0001i.juwels": "10.20.0.1",
}

ENDPOINTS = {
    # names of node 0
    "jwb0001:29400": Typed("jwb0001i:29400", "10.20.0.1:29400", 0, note=True),
    "jwb0001i:29400": Typed("jwb0001i:29400", "10.20.0.1:29400", 0),
    "jwb0001.juwels:29400": Typed(
        "jwb0001i.juwels:29400", "10.20.0.1:29400", 0, note=True
    ),
    "jwb0001i.juwels:29400": Typed("jwb0001i.juwels:29400", "10.20.0.1:29400", 0),
    # without a port
    "jwb0001": Typed(f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0, note=True),
    "jwb0001i": Typed(f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0),
    "10.20.0.1": Typed(f"10.20.0.1:{PORT}", f"10.20.0.1:{PORT}", 0),
    # an address stays what it is, also on the slow network
    "10.20.0.1:29400": Typed("10.20.0.1:29400", "10.20.0.1:29400", 0),
    "10.10.0.1:29400": Typed("10.10.0.1:29400", "10.10.0.1:29400", 0),
    "10.10.0.3:29400": Typed("10.10.0.3:29400", "10.10.0.3:29400", 2),
    # another node hosts, when it is named
    "jwb0003:29400": Typed("jwb0003i:29400", "10.20.0.3:29400", 2, note=True),
    "jwb0003i:29400": Typed("jwb0003i:29400", "10.20.0.3:29400", 2),
    # names that are nobody's: the owner of the address
    "head:29400": Typed("head:29400", "10.20.0.1:29400", 0),
    "second:29400": Typed("second:29400", "10.20.0.2:29400", 1),
    "second-slow:29400": Typed("second-slow:29400", "10.10.0.2:29400", 1),
    # nobody's address either
    "vip:29400": Typed("vip:29400", "10.20.0.99:29400", 0),
    "10.20.0.99:1": Typed("10.20.0.99:1", "10.20.0.99:1", 0),
    "10.20.0.99:65535": Typed("10.20.0.99:65535", "10.20.0.99:65535", 0),
    " jwb0001i:29400 ": Typed("jwb0001i:29400", "10.20.0.1:29400", 0),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_typed_endpoint(endpoint):
    expected = ENDPOINTS[endpoint]
    plan = [
        planned(
            rank,
            options={"rdzv_backend": "c10d", "rdzv_endpoint": endpoint},
            network=juelich(rank, hosts=ALIASES),
        )
        for rank in range(3)
    ]
    assert {m.rendezvous.endpoint for m in plan} == {expected.endpoint}
    assert {m.options["rdzv_endpoint"].value for m in plan} == {expected.number}
    hosts = [rank for rank in range(3) if conf_of(plan[rank])["is_host"] == "1"]
    assert hosts == [expected.host]
    listening = {
        rank: plan[rank].rendezvous.listen
        for rank in range(3)
        if plan[rank].rendezvous.listen
    }
    host, port = expected.number.rsplit(":", 1)
    owned = "99" not in host
    assert listening == ({expected.host: (host, int(port))} if owned else {})
    notes = {m.messages.notes for m in plan}
    assert len(notes) == 1
    assert bool(notes.pop()) is expected.note


def test_rewriting_a_typed_name_is_announced():
    plan = planned(options={"rdzv_endpoint": "jwb0001:29400"})
    text = "jwb0001 rewritten to jwb0001i (site jsc)"
    assert plan.messages.notes == (Message("HPC074", text),)


@pytest.mark.parametrize("rank", range(3))
def test_without_a_site_a_typed_name_stays(rank):
    plan = planned(rank, site=None, options={"rdzv_endpoint": "jwb0001:29400"})
    assert plan.options["rdzv_endpoint"].value == "10.10.0.1:29400"
    assert plan.messages.notes == ()


@pytest.mark.parametrize("rank", range(3))
def test_address_of_the_endpoint_chooses_the_interface(rank):
    plan = planned(rank, options={"rdzv_endpoint": "10.10.0.1:29400"})
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize(
    "endpoint", ["[fd00::1]:29400", "[fd00::1]", "fd00::1", "n1:29400"]
)
def test_ipv6(rank, endpoint):
    network = make_network(
        {"lo": "::1/128", "ib0": f"fd00::{rank + 1}/64 fe80::{rank + 1}/64"},
        {"n1": "fd00::1", "n2": "fd00::2"},
    )
    plan = planned(
        rank,
        job=step(rank, nodes=("n1", "n2")),
        site=None,
        options={"rdzv_endpoint": endpoint},
        network=network,
    )
    port = 29400 if endpoint.endswith(":29400") else PORT
    assert plan.options["rdzv_endpoint"].value == f"[fd00::1]:{port}"
    assert plan.options["local_addr"].value == f"fd00::{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert plan.rendezvous.listen == (("fd00::1", port) if rank == 0 else None)
    assert conf_of(plan)["is_host"] == "10"[rank]


NO_ENDPOINT = {
    "jwb0001:0": ("HPC051", "port 0 is another port at every start"),
    "10.20.0.1:0": ("HPC051", "port 0 is another port at every start"),
    "jwb0001:port": ("HPC053", "is not an endpoint"),
    "jwb0001:65536": ("HPC053", "is not an endpoint"),
    "jwb0001:29400x": ("HPC053", "is not an endpoint"),
    "jwb0001:": ("HPC053", "is not an endpoint"),
    ":29400": ("HPC053", "is not an endpoint"),
    "a b:29400": ("HPC053", "is not an endpoint"),
    "http://jwb0001:29400": ("HPC053", "is not an endpoint"),
    "[jwb0001]:29400": ("HPC053", "is not an endpoint"),
    "[10.20.0.1": ("HPC053", "is not an endpoint"),
    "fd00::1]:29400": ("HPC053", "is not an endpoint"),
    "jwb0001:٢٩٤٠٠": ("HPC053", "is not an endpoint"),
    "nonsense:29400": (
        "HPC059",
        "nonsense (--rdzv_endpoint=nonsense:29400) does not resolve here",
    ),
    "loop:29400": (
        "HPC059",
        "loop (--rdzv_endpoint=loop:29400) means only 127.0.1.1 here",
    ),
    "127.0.0.1:29400": ("HPC059", "means only 127.0.0.1 here"),
    "[::1]:29400": ("HPC059", "means only ::1 here"),
    "0.0.0.0:29400": ("HPC059", "means only 0.0.0.0 here"),
}


@pytest.mark.parametrize("endpoint", NO_ENDPOINT)
@pytest.mark.parametrize("rank", [0, 1])
def test_endpoint_that_cannot_work(endpoint, rank):
    error = refused(
        *NO_ENDPOINT[endpoint],
        rank,
        options={"rdzv_endpoint": endpoint},
        network=juelich(rank, hosts={"loop": "127.0.1.1"}),
    )
    assert f"--rdzv_endpoint={endpoint}" in str(error)
    assert error.everywhere


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_master_port_that_cannot_work(port, backend):
    options = {"rdzv_backend": backend, "master_port": port}
    code = "HPC051" if port == 0 else "HPC050"
    error = refused(code, f"--master_port={port}", options=options)
    assert error.everywhere


@pytest.mark.parametrize(
    ("options", "named", "proposed"),
    [
        ({"rdzv_endpoint": "[fd00::1]:0"}, "rdzv_endpoint=[fd00::1]:0", "[fd00::1]"),
        ({"rdzv_endpoint": "jwb0002:0"}, "rdzv_endpoint=jwb0002:0", "jwb0002"),
        # the endpoint has no port: the other option is at fault
        ({"master_addr": "jwb0001", "master_port": 0}, "master_port=0", "jwb0001"),
        ({"rdzv_endpoint": "jwb0001", "master_port": 0}, "master_port=0", "jwb0001"),
    ],
)
def test_port_0_is_named_where_it_was_typed(options, named, proposed):
    error = refused("HPC051", f"--{named}: port 0 is another", options=options)
    assert str(error).endswith(f"type one: --rdzv_endpoint={proposed}:29400")


@pytest.mark.parametrize("rank", range(2))
def test_file_store_has_a_path_for_an_endpoint(rank):
    options = {
        "rdzv_backend": "c10d",
        "rdzv_conf": "store_type=file",
        "rdzv_endpoint": "/scratch/rendezvous",
    }
    plan = planned(rank, options=options)
    assert plan.options.keys() == {"nnodes", "rdzv_id", "local_addr", "node_rank"}
    assert (plan.rendezvous.listen, plan.rendezvous.endpoint) == (
        None,
        "/scratch/rendezvous",
    )
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"


# --- variables of torch's release -----------------------------------------------------

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": Setting("1", "torch 2.5.1")}


@pytest.mark.parametrize(
    ("changes", "is_c10d"),
    [
        ({}, False),  # ours
        ({"options": {"hpc_rendezvous": "c10d"}}, True),
        ({"options": {"nnodes": "2:3"}}, True),
        ({"options": {"rdzv_backend": "static"}}, False),
        ({"options": {"standalone": True}}, True),
        ({"options": {"standalone": True, "rdzv_backend": "static"}}, True),
        ({"job": None}, True),
        ({"job": None, "options": {"master_port": 1}}, False),
        ({"job": None, "options": {"nnodes": "2", "rdzv_endpoint": "::1"}}, False),
        ({"options": {"rdzv_backend": "etcd", "rdzv_endpoint": "e:1"}}, False),
    ],
)
def test_what_torchs_release_needs_with_c10d_is_planned(changes, is_c10d):
    plan = planned(of_release=UNSHARED, **changes)
    found = {k: v for k, v in plan.environment.items() if k in UNSHARED}
    assert found == (UNSHARED if is_c10d else {})


@pytest.mark.parametrize(("value", "is_planned"), [("0", False), ("", True)])
def test_what_torchs_release_needs_may_be_set_otherwise(value, is_planned):
    environ = dict.fromkeys(UNSHARED, value)
    plan = planned(job=None, of_release=UNSHARED, environ=environ)
    assert (UNSHARED.items() <= plan.environment.items()) is is_planned


# --- addresses ----------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(3))
def test_own_entry_in_hosts_is_loopback(rank):
    """Debian's 127.0.1.1 for the own name: the route to another node decides."""
    hosts = {THREE[rank]: "127.0.1.1"}
    plan = planned(rank, site=None, network=juelich(rank, hosts=hosts))
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.rendezvous.listen == (("10.10.0.1", PORT) if rank == 0 else None)
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert plan.messages.warnings == ()


def test_name_with_several_addresses():
    hosts = {"jwb0001i": "127.0.1.1 10.20.0.1 fd00::1 10.20.0.200"}
    plan = planned(0, network=juelich(0, hosts=hosts))
    assert plan.options["local_addr"].value == "10.20.0.1"
    assert plan.rendezvous.listen == ("10.20.0.1", PORT)
    other = planned(1, network=juelich(1, hosts=hosts))
    assert other.options["rdzv_endpoint"].value == f"jwb0001i:{PORT}"


def test_name_with_an_address_of_each_family():
    hosts = {"jwb0001i": "fd00::1 10.20.0.1"}
    for rank in range(2):
        plan = planned(rank, network=juelich(rank, hosts=hosts))
        assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"


def test_name_with_an_address_that_its_node_does_not_have():
    """All must meet where the head node listens, or be left to try each address."""
    hosts = {"jwb0001i": "10.19.0.7 10.20.0.1"}
    plan = [planned(rank, network=juelich(rank, hosts=hosts)) for rank in range(2)]
    assert plan[0].rendezvous.listen == ("10.20.0.1", PORT)
    endpoint = plan[1].options["rdzv_endpoint"].value
    assert endpoint in {f"10.20.0.1:{PORT}", f"jwb0001i:{PORT}"}


@pytest.mark.parametrize("rank", range(3))
def test_fast_name_that_does_not_resolve(rank):
    hosts = {"jwb0001i": "", "jwb0002i": "", "jwb0003i": ""}
    plan = planned(rank, network=juelich(rank, hosts=hosts))
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.rendezvous.endpoint == f"jwb0001:{PORT}"
    names = dict.fromkeys(["jwb0001", THREE[rank]])
    assert plan.messages.warnings == tuple(
        Message(
            "HPC056",
            f"{name}i does not resolve here, although site 'jsc' says so: using "
            f"{name} (--hpc-site=none switches the rule off)",
        )
        for name in names
    )


def test_typed_name_whose_fast_name_does_not_resolve():
    plan = planned(
        network=juelich(hosts={"jwb0001i": ""}),
        options={"rdzv_endpoint": "jwb0001:29400"},
    )
    assert plan.options["rdzv_endpoint"].value == "10.10.0.1:29400"
    (warning,) = plan.messages.warnings
    assert str(warning).startswith("HPC056 jwb0001i does not resolve here")


@pytest.mark.parametrize("rank", range(3))
def test_no_address_that_other_nodes_could_reach(rank):
    """In a container behind NAT, the interfaces have none of the names' addresses."""
    nat = {"lo": "127.0.0.1/8", "eth0": "172.17.0.2/16"}
    plan = planned(rank, network=juelich(rank, interfaces=nat))
    assert plan.environment.keys() == {"OMP_NUM_THREADS"}
    assert plan.options["local_addr"].value == f"{THREE[rank]}i"
    assert (plan.rendezvous.local_address, plan.rendezvous.listen) == (None, None)
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"
    assert conf_of(plan)["is_host"] == ("1" if rank == 0 else "0")
    (warning,) = plan.messages.warnings
    assert str(warning).startswith(f"HPC057 no address of {THREE[rank]} is known")
    assert "listens on all interfaces" in warning.text


@pytest.mark.parametrize("known", ["127.0.1.1", "127.0.0.1 ::1"])
def test_head_node_reaches_itself_under_a_name_that_is_loopback(known):
    """Without a route to another node, too: its own store is there all the same."""
    nat = {"lo": "127.0.0.1/8", "eth0": "172.17.0.2/16"}
    hosts = {"jwb0001i": known}
    plan = planned(network=juelich(hosts=hosts, interfaces=nat))
    assert plan.options["rdzv_endpoint"].value == f"{known.split()[0]}:{PORT}"
    assert (
        plan.rendezvous.local_address,
        plan.rendezvous.listen,
        conf_of(plan)["is_host"],
    ) == (None, None, "1")
    assert [warning.code for warning in plan.messages.warnings] == ["HPC057"]


def test_route_of_a_container_decides_where_names_do_not():
    own = {"lo": "127.0.0.1/8", "eth0": "172.17.0.2/16"}
    network = juelich(1, interfaces=own, routes={"10.20.0.0/24": "172.17.0.2"})
    plan = planned(1, network=network)
    assert plan.rendezvous.local_address == "172.17.0.2"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    (warning,) = plan.messages.warnings
    assert warning.code == "HPC136"
    assert warning.text.startswith("jwb0002i is 10.20.0.2, which no interface of this")
    assert "Others are told 172.17.0.2" in warning.text


@pytest.mark.parametrize("down", ["ib0", "eth0"])
def test_an_interface_that_is_down(down):
    warnings = planned(1, network=juelich(1, down=(down,))).messages.warnings
    assert [w.code for w in warnings] == (["HPC165"] if down == "ib0" else [])
    if warnings:
        assert "interface ib0, which has 10.20.0.2, is down" in warnings[0].text


@pytest.mark.parametrize(
    ("known", "fault"),
    [("127.0.1.1", "means only 127.0.1.1 here"), ("", "does not resolve here")],
)
def test_head_node_that_cannot_be_reached_by_name(known, fault):
    error = refused(
        "HPC059",
        f"the head node's name jwb0001 (SLURM_STEP_NODELIST) {fault}",
        1,
        site=None,
        network=juelich(1, hosts={"jwb0001": known}),
    )
    assert f"--rdzv_endpoint=HOST:{PORT}" in str(error)
    assert not error.everywhere


# --- static and etcd ----------------------------------------------------------------

STATIC = [
    {"rdzv_backend": "static"},
    {"node_rank": "own"},
    {"master_addr": "jwb0001i"},
    {"master_addr": "jwb0001"},
    {"master_addr": "10.20.0.1", "node_rank": "own"},
    {"rdzv_backend": "static", "rdzv_endpoint": "jwb0001i"},
]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("options", STATIC)
def test_static_stays_static_with_host_and_interface_corrected(options, rank):
    options = {k: rank if v == "own" else v for k, v in options.items()}
    plan = planned(rank, options=options)
    assert plan.options["node_rank"].value == rank
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"
    if "rdzv_backend" not in options:
        assert plan.options["rdzv_backend"].value == "static"
    assert "rdzv_conf" not in plan.options
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert plan.rendezvous.listen == (("10.20.0.1", PORT) if rank == 0 else None)
    assert not plan.ranks_follow_scheduler
    assert bool(plan.messages.notes) is (options.get("master_addr") == "jwb0001")


@pytest.mark.parametrize("backend", [{}, {"rdzv_backend": "static"}])
def test_typed_master_port(backend):
    plan = planned(1, options=backend | {"master_port": 29501})
    assert plan.options["rdzv_endpoint"].value == "10.20.0.1:29501"
    assert plan.options.keys().isdisjoint({"master_port", "rdzv_conf"})
    assert not plan.ranks_follow_scheduler


@pytest.mark.parametrize("options", [{}, {"rdzv_backend": "static"}])
@pytest.mark.parametrize(("rank", "node_rank"), [(1, 0), (0, 1), (2, 7)])
def test_static_rank_of_another_node_is_refused(rank, node_rank, options):
    error = refused(
        "HPC071",
        f"--node_rank={node_rank}, but this is node {rank} of the step "
        "(SLURMD_NODENAME)",
        rank,
        options=options | {"node_rank": node_rank},
    )
    assert "$SLURM_NODEID" in str(error)
    assert not error.everywhere


@pytest.mark.parametrize("rank", [0, 1])
def test_static_hosted_by_the_address_of_another_node_is_refused(rank):
    message = "--master_addr=10.20.0.2 is not an address of node 0, jwb0001"
    error = refused("HPC069", message, rank, options={"master_addr": "10.20.0.2"})
    assert not error.everywhere


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"master_addr": "jwb0002"},
        {"master_addr": "jwb0002i"},
        {"rdzv_backend": "static", "rdzv_endpoint": "jwb0002i:29400"},
    ],
)
def test_static_hosted_by_another_node_is_refused(options, rank):
    error = refused("HPC072", "is node 1 of the step", rank, options=options)
    assert "hosted by node 0, jwb0001" in str(error)
    assert error.everywhere


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_is_left_alone(rank, backend):
    options = {"rdzv_backend": backend, "rdzv_endpoint": "keeper:2379"}
    plan = planned(rank, options=options)
    assert values(plan.options) == {
        "nnodes": "3",
        "rdzv_id": "19.0",
        "local_addr": f"10.20.0.{rank + 1}",
        "node_rank": 0,
    }
    assert (plan.rendezvous.endpoint, plan.rendezvous.listen) == ("keeper:2379", None)
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"


# --- numbers of nodes and ranks -----------------------------------------------------


@pytest.mark.parametrize(
    ("nnodes", "said"),
    [
        ("3", "3 nodes"),
        ("3:3", "3 nodes"),
        ("1:3", "1 to 3 nodes"),
        ("2:3", "2 to 3 nodes"),
        ("2:4", "2 to 3 nodes"),
        ("3:8", "3 nodes"),
    ],
)
def test_numbers_of_nodes_that_fit(nnodes, said):
    plan = planned(options={"nnodes": nnodes})
    assert "nnodes" not in plan.options
    line = report.start_line(plan).text
    assert line.startswith(f"{said}, 2 workers on this one, Slurm")
    assert plan.world.nodes == 3


WORKER = {"TORCHELASTIC_RUN_ID": "19.0", "RANK": "5"}


@pytest.mark.parametrize("rank", range(3))
def test_a_launch_inside_a_worker_of_the_same(rank):
    said = "inside worker 5 of the same launch (TORCHELASTIC_RUN_ID=19.0), and would be"
    for options in ({}, {"rdzv_id": "other"}, {"hpc_rendezvous": "c10d"}):
        error = refused("HPC164", said, rank, environ=WORKER, options=options)
        assert "type --standalone" in str(error)
        assert not error.everywhere  # perhaps one worker does it


@pytest.mark.parametrize(
    "changes",
    [
        {"environ": WORKER | {"TORCHELASTIC_RUN_ID": "18.0"}},  # by sbatch
        {"environ": {"TORCHELASTIC_RUN_ID": "19.0"}},
        {"options": {"standalone": True}},
        {"options": {"nnodes": "1"}},
        {"options": {"rdzv_endpoint": "jwb0001:29400"}},
        {"job": step(nodes=THREE[:1])},
        {"job": None},
    ],
)
def test_a_launch_inside_a_worker_that_does_not_meet_the_same(changes):
    planned(**{"environ": WORKER} | changes)


@pytest.mark.parametrize(
    ("late", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
def test_one_node_says_that_another_is_late(late, reporters):
    plans = [planned(rank) for rank in range(3)]
    found = [
        plan.world.node_rank
        for plan in plans
        if reports_wait_for(plan.world.node_rank, late)
    ]
    assert found == reporters


@pytest.mark.parametrize(
    ("nnodes", "allocated", "fix"),
    [
        ("2", 3, 2), ("1:2", 3, 2), ("4", 4, 4), ("4:4", 5, 4), ("4:6", 5, 5),
        ("4", 3, "4"), ("4:6", 3, "4 to 6"), ("999", 4, "999"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_nodes_that_do_not_fit(nnodes, allocated, fix, rank):
    """srun refuses more nodes than the job has."""
    error = refused(
        "HPC070",
        f"--nnodes={nnodes}, but this was started on 3 nodes (SLURM_STEP_NODELIST)",
        rank,
        job=step(rank, allocated_nodes=allocated),
        options={"nnodes": nnodes},
    )
    line = f"type: srun --nodes={fix} --ntasks={fix} --ntasks-per-node=1 {COMMAND}"
    words = line if isinstance(fix, int) else f"start it on {fix} nodes"
    assert str(error).endswith(f". Leave the option out, or {words}")
    assert error.everywhere


def test_process_on_none_of_the_nodes():
    """No source says so today; one that does is not taken for node 0."""
    message = "this process is not on one of the job's nodes"
    refused("HPC068", message, job=step(node_rank=None))


def test_several_nodes_typed_in_a_step_of_one():
    job = ONE_NODE_JOBS["step"]
    error = refused("HPC070", "--nnodes=2", job=job, options={"nnodes": "2"})
    assert "on 1 node (SLURM_STEP_NODELIST)" in str(error)


NO_NUMBERS = [
    "",
    "0",
    "0:3",
    "3:2",
    "-1",
    "1:",
    ":3",
    "1:2:3",
    "two",
    "1.0",
    "٣",
    "3 4",
]


@pytest.mark.parametrize("nnodes", NO_NUMBERS)
@pytest.mark.parametrize("job", [None, step(), BATCH])
def test_what_is_no_number_of_nodes(nnodes, job):
    refused(
        "HPC063",
        f"--nnodes={nnodes} is not a number of nodes",
        job=job,
        options={"nnodes": nnodes},
    )


@pytest.mark.parametrize(
    "options", [{"nnodes": "three"}, {"rdzv_conf": "is_host"}, {"rdzv_conf": "a=b,=c"}]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_typed_wrong_everywhere_is_reported_once(options, rank):
    with pytest.raises(LaunchError) as caught:
        planned(rank, options=options)
    assert caught.value.everywhere


@pytest.mark.parametrize("rank", [0, 2])
def test_typed_rank_is_ignored_by_c10d_and_says_so(rank):
    plan = planned(rank, options={"rdzv_backend": "c10d", "node_rank": 5})
    text = "--node_rank=5 is ignored, nodes are ranked as the scheduler numbers them"
    assert plan.messages.notes == (Message("HPC075", text),)
    assert (plan.world.node_rank, plan.options["node_rank"].value) == (rank, 0)
    assert plan.ranks_follow_scheduler


# --- rdzv_conf ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("is_host=0", "is_host=0,read_timeout=600,join_timeout=900"),
        ("is_host=True", "is_host=True,read_timeout=600,join_timeout=900"),
        ("join_timeout=5", "join_timeout=5,is_host=1,read_timeout=600"),
        (
            "read_timeout=7, last_call_timeout = 1,",
            "read_timeout=7,last_call_timeout=1,is_host=1,join_timeout=900",
        ),
        (
            "store_type=tcp",
            "store_type=tcp,is_host=1,read_timeout=600,join_timeout=900",
        ),
        ("foo=a=b", "foo=a=b,is_host=1,read_timeout=600,join_timeout=900"),
        ("", "is_host=1,read_timeout=600,join_timeout=900"),
    ],
)
def test_typed_conf_is_kept(conf, expected):
    plan = planned(options={"rdzv_conf": conf})
    assert plan.options["rdzv_conf"].value == expected


@pytest.mark.parametrize(
    ("rank", "is_host", "listens"),
    [(0, "1", True), (0, "false", False), (1, "yes", False), (1, "0", False)],
)
def test_typed_host_wins(rank, is_host, listens):
    plan = planned(rank, options={"rdzv_conf": f"is_host={is_host}"})
    assert conf_of(plan)["is_host"] == is_host
    assert (plan.rendezvous.listen is not None) is listens


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("is_host", "--rdzv_conf=is_host: 'is_host' is not of the form key=value"),
        ("a=1,b", "'b' is not of the form key=value"),
        ("=1", "'=1' is not of the form key=value"),
        ("a=", "'a=' is not of the form key=value"),
        ("is_host=maybe", "is_host=maybe is neither true nor false"),
        ("is_host=2", "is_host=2 is neither true nor false"),
        ("join_timeout=ten", "join_timeout=ten is not a number of seconds"),
        ("read_timeout=-1", "read_timeout=-1 is not a number of seconds"),
        ("read_timeout=0", "read_timeout=0 is not a number of seconds"),
        ("read_timeout=1.5", "read_timeout=1.5 is not a number of seconds"),
        ("close_timeout='5'", "close_timeout='5' is not a number of seconds"),
        ("join_timeout=99999999999999999", " is not a number of seconds"),
        ("last_call_timeout=999999999999", " is not a number of seconds"),
        (f"join_timeout={'9' * 5000}", " is not a number of seconds"),
        ("store_type=hash", "store_type=hash: type one of tcp, file"),
        ("keep_alive_interval=0", "keep_alive_interval=0 is not a whole number"),
        ("keep_alive_max_attempt=1.5", "keep_alive_max_attempt=1.5 is not a whole"),
        ("keep_alive_max_attempt=-1", "keep_alive_max_attempt=-1 is not a whole"),
        ("endpoint=n1:1", "endpoint is set by --rdzv-endpoint. Leave it out here"),
        ("self=1", "self is set by torch"),
    ],
)
@pytest.mark.parametrize("rendezvous", ["scheduler", "c10d"])
def test_conf_that_torch_could_not_read(conf, message, rendezvous):
    options = {"rdzv_conf": conf, "hpc_rendezvous": rendezvous}
    assert refused("HPC019", message, options=options).everywhere


# What is typed, and which backends read it, so that they could not.
READ_BY = {
    "timeout='5'": {"static", "etcd"},
    "timeout=1.5": {"static", "etcd"},
    "timeout=0": {"static"},
    "timeout=-5": {"static"},
    "foo_timeout=1.5": set(),
    "connect_timeout=1.5": set(),
    "rank=first": set(),
    "is_host=maybe": {"scheduler", "c10d"},
    "store_type=redis": {"scheduler", "c10d"},
    "store_type=file,is_host=maybe": set(),
    "store_type=file,read_timeout=0": {"etcd-v2"},
    "read_timeout=0": {"scheduler", "c10d", "etcd-v2"},
    "join_timeout=1.5": {"scheduler", "c10d", "etcd-v2"},
    "heartbeat_timeout=x": {"scheduler", "c10d", "etcd-v2"},
    "keep_alive_interval=0": {"scheduler", "c10d", "etcd-v2"},
    "last_call_timeout=0": {"scheduler", "c10d", "etcd-v2"},
    "last_call_timeout=x": {"scheduler", "c10d", "etcd-v2", "etcd"},
    "protocol=ftp": {"etcd", "etcd-v2"},
    "protocol=HTTP": {"etcd"},
    # As Python reads a number.
    "join_timeout=+1_0,read_timeout=٣": set(),
    "timeout= 5 ": set(),
}
# What is typed for a backend, and from where.
BACKENDS = {
    "scheduler": {},
    "c10d": {"hpc_rendezvous": "c10d"},
    "static": {"rdzv_backend": "static"},
    "etcd": {"rdzv_backend": "etcd", "rdzv_endpoint": "keeper:2379"},
    "etcd-v2": {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "keeper:2379"},
    "somebody's": {"rdzv_backend": "theirs", "rdzv_endpoint": "keeper:1"},
}


@pytest.mark.parametrize("conf", READ_BY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_does_not_read_may_be_anything(backend, conf):
    options = BACKENDS[backend] | {"rdzv_conf": conf}
    if backend in READ_BY[conf]:
        refused("HPC019", f"--rdzv_conf={conf}: ", options=options)
        return
    plan = planned(options=options)
    written = plan.options.get("rdzv_conf")
    assert written is None or "".join(conf.split()) in written.value


@pytest.mark.parametrize(
    ("job", "options", "read"),
    [
        (None, {}, "is_host=maybe"),
        (None, {"standalone": True, "rdzv_backend": "static"}, "is_host=maybe"),
        (None, {"standalone": True, "node_rank": 1}, "is_host=maybe"),
        (None, {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}, "timeout=0"),
        (None, {"nnodes": "1", "master_port": 1}, "timeout=0"),
        ("step", {"standalone": True, "rdzv_backend": "static"}, "is_host=maybe"),
        ("step", {}, "is_host=maybe"),
        ("step", {"master_port": 1}, "timeout=0"),
    ],
)
def test_the_backend_in_force_reads_them(job, options, read):
    """Torchrun's default differs, and --standalone is stronger than what is typed."""
    job = ONE_NODE_JOBS["step"] if job else None
    unread = {"is_host=maybe": "timeout=0", "timeout=0": "is_host=maybe"}[read]
    refused("HPC019", read, job=job, options=options | {"rdzv_conf": read})
    planned(job=job, options=options | {"rdzv_conf": unread})


@pytest.mark.parametrize("rank", range(2))
def test_static_does_not_read_who_hosts(rank):
    options = {"rdzv_backend": "static", "rdzv_conf": f"is_host={rank}"}
    plan = planned(rank, options=options)
    assert plan.rendezvous.is_coordinator is (rank == 0)
    assert (plan.rendezvous.listen is not None) is (rank == 0)


@pytest.mark.parametrize(
    ("backend", "expected"), [("c10d", 12), ("scheduler", 12), ("static", 60)]
)
def test_a_number_of_seconds_that_a_backend_reads(backend, expected):
    conf = Setting("join_timeout=12", "--rdzv_conf")
    assert rdzv_conf.seconds(conf, backend, "join_timeout", 60) == expected
    assert rdzv_conf.seconds(None, backend, "join_timeout", 60) == 60


# --- variables ----------------------------------------------------------------------

ETHERNET = {"lo": "127.0.0.1/8", "eth0": "10.20.0.1/24"}
RAILS = {
    "lo": "127.0.0.1/8",
    "hsn0": "10.20.0.1/16",
    "hsn1": "10.20.1.1/16",
    "hsn2": "10.20.2.1/16",
    "hsn3": "10.20.3.1/16",
}


@pytest.mark.parametrize(
    ("interfaces", "down", "gloo", "nccl"),
    [
        (ETHERNET, [], "eth0", "=eth0"),
        (RAILS, [], "hsn0", "=hsn0,hsn1,hsn2,hsn3"),
        (RAILS, ["hsn1"], "hsn0", "=hsn0,hsn2,hsn3"),
        (ETHERNET | {"ib0": "10.30.0.1/24"}, [], "eth0", None),
        (ETHERNET | {"ib0": ""}, [], "eth0", None),
        (ETHERNET | {"ib0": "10.30.0.1/24"}, ["ib0"], "eth0", "=eth0"),
        ({"ib0": "10.20.0.1/24"}, [], "ib0", None),
        ({"bond0.2093": "10.20.0.1/24", "bond0": ""}, [], "bond0.2093", "=bond0.2093"),
        ({"eth0": "10.1.0.1/24", "eth0:1": "10.20.0.1/24"}, [], "eth0:1", "=eth0:1"),
        # exact for gloo, and never all of a prefix for NCCL
        (ETHERNET | {"eth1": "10.7.0.1/24"}, [], "eth0", "=eth0"),
    ],
)
def test_interfaces(interfaces, down, gloo, nccl):
    network = juelich(interfaces=interfaces, down=down)
    found = values(planned(network=network).environment)
    assert found["GLOO_SOCKET_IFNAME"] == gloo
    assert found.get("NCCL_SOCKET_IFNAME") == nccl


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}, {}),
        (
            {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
            {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        ),
        # gloo ignores what has one character, and it is the user's all the same
        ({"GLOO_SOCKET_IFNAME": "x"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
    ],
)
def test_the_users_interfaces_stay(environ, expected):
    plan = planned(network=juelich(interfaces=ETHERNET), environ=environ, workers=1)
    assert values(plan.environment) == expected
    assert plan.messages.warnings == ()


# Not lo, on which no other node is.
THERE_ARE = "There are: eth0, ib0"
BAD_GLOO = {
    "^lo": ("'^lo'", THERE_ARE),
    "=ib0": ("'=ib0'", f"Did you mean ib0? {THERE_ARE}"),
    "ib": ("'ib'", f"Did you mean ib0? {THERE_ARE}"),
    "eth": ("'eth'", f"Did you mean eth0? {THERE_ARE}"),
    "mlx5_0": ("'mlx5_0'", THERE_ARE),
    "ib0, eth0": ("' eth0'", f"Did you mean eth0? {THERE_ARE}"),
    " ib0": ("' ib0'", f"Did you mean ib0? {THERE_ARE}"),
    "ib0,ib1": ("'ib1'", f"Did you mean ib0? {THERE_ARE}"),
    "IB0": ("'IB0'", f"Did you mean ib0? {THERE_ARE}"),
    "10.20.0.1": ("'10.20.0.1'", THERE_ARE),
    # gloo refuses an empty name, unless it is the last
    ",ib0": ("''", THERE_ARE),
    "eth0,,ib0": ("''", THERE_ARE),
}


@pytest.mark.parametrize("value", BAD_GLOO)
@pytest.mark.parametrize("job", [step(), None, ONE_NODE_JOBS["step"]])
def test_gloo_interface_that_gloo_would_crash_on(value, job):
    part, hint = BAD_GLOO[value]
    error = refused(
        "HPC054",
        f"GLOO_SOCKET_IFNAME={value}: this node has no interface {part}",
        job=job,
        environ={"GLOO_SOCKET_IFNAME": value},
    )
    assert str(error).endswith(f"what is here. {hint}")


@pytest.mark.parametrize("value", ["ib0", "eth0,ib0", "ib0,", "x", "^", "=", ""])
def test_gloo_interface_that_gloo_takes(value):
    plan = planned(environ={"GLOO_SOCKET_IFNAME": value})
    assert ("GLOO_SOCKET_IFNAME" in plan.environment) is (value == "")


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        ("ib0", False),
        ("ib", False),
        ("mlx,ib", False),
        ("=ib0", False),
        ("=ib0,mlx5_0", False),
        ("^docker,lo", False),
        ("", False),
        ("x", False),  # NCCL ignores one character
        ("=ib", True),
        ("mlx", True),
        ("hsn0,hsn1", True),
        ("dn", True),  # dn0 is down
        ("=", False),
        ("=,", True),
    ],
)
def test_nccl_interface_that_matches_nothing(value, warns):
    interfaces = {"lo": "127.0.0.1/8", "ib0": "10.20.0.1/24", "dn0": "10.9.0.1/24"}
    plan = planned(
        network=juelich(interfaces=interfaces, down=["dn0"]),
        environ={"NCCL_SOCKET_IFNAME": value},
    )
    assert bool(plan.messages.warnings) is warns
    for warning in plan.messages.warnings:
        start = f"HPC058 NCCL_SOCKET_IFNAME={value} matches no interface that is up"
        assert str(warning).startswith(start)
        guess = "Did you mean ib0? " if value == "=ib" else ""
        assert f". {guess}There are: lo, ib0. Names are prefixes" in warning.text


@pytest.mark.parametrize("job", [step(), None, INTERACTIVE, ONE_NODE_JOBS["step"]])
@pytest.mark.parametrize(
    ("environ", "workers", "expected"),
    [
        ({}, 1, None),
        ({}, 2, "1"),
        ({"OMP_NUM_THREADS": ""}, 4, "1"),
        ({"OMP_NUM_THREADS": "8"}, 4, None),
        ({"OMP_NUM_THREADS": "1"}, 4, None),
    ],
)
def test_threads(job, environ, workers, expected):
    plan = planned(job=job, environ=environ, workers=workers)
    assert values(plan.environment).get("OMP_NUM_THREADS") == expected


# --- ports --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch_id", "port"),
    [
        # 20000 + the first 64 bits that sha256sum prints, modulo 9000
        ("19.0", 25592),
        ("123456.0", 26058),
        ("123456_7.0-r1", 27106),
        ("26_0.0", 22331),
        ("26_1.0", 23060),
    ],
)
def test_port_is_stable(launch_id, port):
    assert endpoints.port_of(launch_id) == port


@given(st.text("0123456789._-r", min_size=1))
def test_port_is_in_range(launch_id):
    assert 20000 <= endpoints.port_of(launch_id) <= 28999


def test_ports_spread():
    ports = {endpoints.port_of(f"{job}.0") for job in range(1000)}
    # 1000 of 9000 drawn at random: 946 different ones are expected.
    assert len(ports) > 900
    assert min(ports) < 20100
    assert max(ports) > 28900


def test_two_steps_of_a_job_do_not_meet():
    plan = [planned(job=step(launch_id=f"19.{number}")) for number in range(2)]
    assert len({m.options["rdzv_id"].value for m in plan}) == 2
    assert len({m.rendezvous.listen for m in plan}) == 2


def test_port_is_a_hash_of_the_launch_id():
    number = int(hashlib.sha256(b"19.0").hexdigest()[:16], 16)
    assert 20000 + number % 9000 == PORT == planned().rendezvous.listen[1]


# --- properties ---------------------------------------------------------------------

names = st.sampled_from(
    [
        ("n1", "n2", "n3"),
        ("n9", "n10", "n11"),
        ("jwb0003", "jwb0001"),
        ("jwb0001.juwels", "jwb0002.juwels"),
    ]
)
optional = {
    "nnodes": st.sampled_from(["2:3", "1:9"]),
    "rdzv_id": st.just("mine"),
    "rdzv_backend": st.just("c10d"),
    "rdzv_conf": st.sampled_from(["join_timeout=5", "read_timeout=1,close_timeout=1"]),
}


@settings(deadline=None)
@given(names, st.sampled_from([None, JSC]), st.data())
def test_nodes_agree(nodes, site, data):
    rename = site.rewrite if site else str
    hosts = {name: f"10.10.0.{n}" for n, name in enumerate(nodes, 1)}
    hosts |= {rename(name): f"10.20.0.{n}" for n, name in enumerate(nodes, 1)}
    hosts["vip"] = "10.20.0.99"
    options = data.draw(st.fixed_dictionaries({}, optional=optional))
    endpoint = data.draw(
        st.none() | st.sampled_from([*hosts, *hosts.values(), "10.10.0.1:1"])
    )
    if endpoint is not None:
        options["rdzv_endpoint"] = endpoint
        options["rdzv_backend"] = "c10d"
    launch_id = data.draw(
        st.from_regex("[0-9]{1,9}(_[0-9])?[.][0-9](-r1)?", fullmatch=True)
    )

    plan = [
        planned(
            rank,
            job=step(rank, nodes=nodes, launch_id=launch_id),
            site=site,
            options=options,
            network=juelich(rank, hosts=hosts),
        )
        for rank in range(len(nodes))
    ]
    for name in ("nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "node_rank"):
        found = [m.options.get(name) for m in plan]
        assert len({option and option.value for option in found}) == 1, name
    assert len({m.rendezvous.endpoint for m in plan}) == 1
    assert len({m.messages.notes for m in plan}) == 1
    assert len({m.world.nodes for m in plan}) == 1
    assert [m.world.node_rank for m in plan] == list(range(len(nodes)))
    assert sum(conf_of(m)["is_host"] == "1" for m in plan) == 1
    assert len({m.rendezvous.local_address for m in plan}) == len(nodes)
    for m in plan:
        host, _, port = m.options["rdzv_endpoint"].value.rpartition(":")
        assert m.rendezvous.listen in (None, (host, int(port)))
        assert m.rendezvous.listen is None or conf_of(m)["is_host"] == "1"


text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=10)


def mostly(*usual):
    """Draw what is usually typed, and anything now and then."""
    return st.integers(0, 4).flatmap(lambda n: st.sampled_from(usual) if n else text)


anything = {
    "nnodes": mostly("1", "2", "3", "1:2", "2:3", "1:9"),
    "standalone": st.booleans(),
    "node_rank": st.integers(-1, 3),
    "master_addr": mostly("jwb0001", "jwb0002i", "10.20.0.1", "fd::1"),
    "master_port": st.integers(1, 65535),
    "rdzv_id": mostly("mine"),
    "rdzv_backend": mostly("c10d", "static", "etcd"),
    "rdzv_endpoint": mostly("jwb0001:1", "[::1]:2", "10.10.0.2", "vip:0", "10.9.9.9:1"),
    "rdzv_conf": mostly("is_host=1", "store_type=file", "join_timeout=1,a=b", "a,b"),
    "local_addr": mostly("jwb0001i", "10.10.0.1", "127.0.0.1"),
}
variables = {
    "GLOO_SOCKET_IFNAME": mostly("ib0", "lo,", "lo"),
    "NCCL_SOCKET_IFNAME": mostly("ib", "=ib0", "^lo", "mlx"),
    "OMP_NUM_THREADS": text,
}
every_job = st.sampled_from(
    [
        None,
        BATCH,
        SHELL,
        *ONE_NODE_JOBS.values(),
        step(0),
        step(2),
        step(1, task=Task(1, 4, 0, 2)),
    ]
)


@settings(max_examples=500, deadline=None)
@given(
    every_job,
    st.fixed_dictionaries({}, optional=anything),
    st.fixed_dictionaries({}, optional=variables),
)
def test_anything_typed_is_planned_or_refused(job, options, environ):
    rank = (job and job.node_rank) or 0
    with suppress(LaunchError):
        plan = planned(
            rank, job=job, options=options, environ=environ, network=juelich(rank)
        )
        assert plan.world.nodes in ({1, 3} if job else range(1, 10))


REFUSED_LAUNCHES = {
    "slurm-salloc-shell": "HPC060",
    "slurm-sbatch-script": "HPC061",
    "slurm-srun-2-nodes-4-tasks-each": "HPC062",
    "slurm-srun-uneven-tasks": "HPC062",
}


@pytest.mark.parametrize(("name", "code"), REFUSED_LAUNCHES.items())
def test_recorded_launch_is_refused(name, code):
    for environ, hostname in recorded(name):
        job = schedulers.detect(Process(environ, hostname))
        with pytest.raises(LaunchError, match=": srun --nodes=") as caught:
            planned(job=job, network=juelich(job.node_rank or 0))
        assert (caught.value.code, caught.value.everywhere) == (code, True)


@pytest.mark.parametrize("name", sorted(set(RECORDED) - set(REFUSED_LAUNCHES)))
def test_recorded_launch_is_planned(name):
    for rank, (environ, hostname) in enumerate(recorded(name)):
        job = schedulers.detect(Process(environ, hostname))
        plan = planned(job=job, network=juelich(int(hostname[-1]) - 1))
        assert (plan.world.nodes, plan.world.node_rank) == (len(job.nodes), rank)
        assert (plan.rendezvous.listen is not None) is (rank == 0)
        assert plan.messages.warnings == ()


# --- a site that has no effect ------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"job": None, "options": {"hpc_site": "jsc"}}, "a world of one node"),
        ({"options": {"hpc_site": "jsc", "standalone": True}}, "a world of one node"),
        (
            {
                "job": None,
                "options": {
                    "hpc_site": "jsc",
                    "nnodes": "2",
                    "rdzv_endpoint": "10.10.0.1:1",
                },
            },
            "nodes that no scheduler has named",
        ),
        ({"job": None}, None),  # recognised, not typed
        ({"options": {"hpc_site": "jsc"}}, None),  # it has an effect
        ({"job": None, "site": None, "options": {"hpc_site": "none"}}, None),
    ],
)
def test_a_typed_site_that_has_no_effect(changes, noted):
    notes = [str(note) for note in planned(**changes).messages.notes]
    expected = f"HPC077 --hpc_site=jsc has no effect on {noted}"
    assert notes == ([] if noted is None else [expected])


# --- how the nodes meet -------------------------------------------------------------

# Eight, drawn as the first one: of "19.0", "19.0 1", "19.0 2", ...
PORTS = endpoints.ports_of("19.0")


@pytest.mark.parametrize("rank", range(3))
def test_nodes_that_the_scheduler_has_numbered_meet_by_their_numbers(rank):
    plan = planned(rank)
    assert plan.rendezvous.backend == "scheduler"
    assert (
        plan.launch_id,
        plan.rendezvous.connect_host,
        plan.rendezvous.coordinator,
    ) == ("19.0", "10.20.0.1", 0)
    assert plan.rendezvous.ports == PORTS
    assert plan.rendezvous.ports[0] == PORT
    assert plan.rendezvous.is_coordinator is (rank == 0)
    assert plan.rendezvous.endpoint == f"jwb0001i:{PORT}"


# What is typed, and what becomes of it.
KINDS = {
    "nothing": ({}, "scheduler"),
    "c10d, by name": ({"rdzv_backend": "c10d"}, "scheduler"),
    "an id": ({"rdzv_id": "mine"}, "scheduler"),
    "the number of nodes": ({"nnodes": "3"}, "scheduler"),
    "a range of one": ({"nnodes": "3:3"}, "scheduler"),
    "an endpoint": ({"rdzv_endpoint": "jwb0001:29400"}, "scheduler"),
    "times": ({"rdzv_conf": "join_timeout=5"}, "scheduler"),
    "auto": ({"hpc_rendezvous": "auto"}, "scheduler"),
    "scheduler": ({"hpc_rendezvous": "scheduler"}, "scheduler"),
    "scheduler and c10d": (
        {"hpc_rendezvous": "scheduler", "rdzv_backend": "c10d"},
        "scheduler",
    ),
    "torch's": ({"hpc_rendezvous": "c10d"}, "c10d"),
    "nodes that come and go": ({"nnodes": "2:3"}, "c10d"),
    "nodes that come and go, auto": (
        {"nnodes": "2:3", "hpc_rendezvous": "auto"},
        "c10d",
    ),
    "static": ({"rdzv_backend": "static"}, "static"),
    "static, auto": ({"rdzv_backend": "static", "hpc_rendezvous": "auto"}, "static"),
    "static, c10d": ({"rdzv_backend": "static", "hpc_rendezvous": "c10d"}, "static"),
    "a master": ({"master_addr": "jwb0001"}, "static"),
    "etcd": ({"rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"}, "etcd"),
    "a store in a file": (
        {
            "rdzv_backend": "c10d",
            "rdzv_conf": "store_type=file",
            "rdzv_endpoint": "/f",
        },
        "c10d",
    ),
}


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_kind_of_rendezvous(case, rank):
    options, expected = KINDS[case]
    plan = planned(rank, options=options)
    assert plan.rendezvous.backend == expected
    # Torch's has one port, and so has who types one.
    tries_all = expected == "scheduler" and "rdzv_endpoint" not in options
    assert len(plan.rendezvous.ports) == (8 if tries_all else 1)
    # torchrun itself is told c10d: that is what it would be without us.
    if expected == "scheduler" and "rdzv_backend" not in options:
        assert plan.options["rdzv_backend"].value == "c10d"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_head_of_a_typed_endpoint(endpoint):
    expected = ENDPOINTS[endpoint]
    host, port = expected.number.rsplit(":", 1)
    for rank in range(3):
        plan = planned(
            rank,
            options={"rdzv_backend": "c10d", "rdzv_endpoint": endpoint},
            network=juelich(rank, hosts=ALIASES),
        )
        assert plan.rendezvous.is_coordinator is (rank == expected.host)
        # Whose address is nobody's name is known to its owner only.
        assert plan.rendezvous.coordinator in (None, expected.host)
        assert plan.rendezvous.connect_host == host
        # Who types a port means that one.
        assert plan.rendezvous.ports == (PORTS if int(port) == PORT else (int(port),))


@pytest.mark.parametrize(
    ("rank", "is_host", "is_coordinator"),
    [(0, "1", True), (0, "false", False), (1, "yes", True), (1, "0", False)],
)
def test_a_typed_host_is_the_head(rank, is_host, is_coordinator):
    plan = planned(rank, options={"rdzv_conf": f"is_host={is_host}"})
    assert plan.rendezvous.is_coordinator is is_coordinator


def test_several_steps_that_share_a_node_have_other_ports():
    plan = [planned(job=step(launch_id=f"19.{number}")) for number in range(2)]
    assert set(plan[0].rendezvous.ports).isdisjoint(plan[1].rendezvous.ports)


@pytest.mark.parametrize(
    ("launch_id", "ports"),
    [
        # As `port_of`, of "19.0", "19.0 1" and so on.
        ("19.0", (25592, 25875, 27324, 24349, 27631, 26166, 21124, 26447)),
        ("123456_7.0-r1", (27106, 22904, 24784, 22369, 23448, 27470, 20122, 24018)),
    ],
)
def test_ports_are_stable(launch_id, ports):
    assert endpoints.ports_of(launch_id) == ports


@given(st.text("0123456789._-r", min_size=1))
def test_ports_are_some_and_differ(launch_id):
    ports = endpoints.ports_of(launch_id)
    assert ports[0] == endpoints.port_of(launch_id)
    assert 5 <= len(ports) == len(set(ports)) <= 8
    assert all(20000 <= port <= 28999 for port in ports)


def test_jobs_that_share_their_first_port_do_not_share_the_others():
    by_first = {}
    for job in range(3000):
        ports = endpoints.ports_of(f"{job}.0")
        by_first.setdefault(ports[0], []).append(set(ports[1:]))
    shared = [others for others in by_first.values() if len(others) > 1]
    assert len(shared) > 300
    assert not [1 for first, second, *_ in shared if first == second]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("c10", "--hpc_rendezvous=c10: Did you mean c10d? There are: auto, scheduler,"),
        ("Scheduler", "Did you mean scheduler?"),
        ("static", "There are: auto, scheduler, c10d"),
        ("etcd", "There are: auto, scheduler, c10d"),
    ],
)
def test_an_unknown_kind_of_rendezvous(value, text, rank):
    error = refused("HPC110", text, rank, options={"hpc_rendezvous": value})
    assert error.everywhere


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"nnodes": "2:3"},
        {"rdzv_backend": "static"},
        {"rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"},
        {"node_rank": 0},
        {"master_addr": "jwb0001"},
        {"master_port": 29500},
        {"rdzv_conf": "store_type=file"},
    ],
)
def test_numbers_where_they_do_not_help(options, rank):
    explicit_options = {"hpc_rendezvous": "scheduler"} | options
    error = refused("HPC126", "--hpc_rendezvous=scheduler, but", rank,
                    options=explicit_options)  # fmt: skip
    assert error.everywhere
    for name, value in options.items():
        if name != "rdzv_endpoint":
            assert f"--{name}={value}" in str(error)


@pytest.mark.parametrize("options", [{}, {"nnodes": "3"}, {"rdzv_backend": "c10d"}])
@pytest.mark.parametrize("value", ["auto", "scheduler", "c10d"])
def test_a_kind_of_rendezvous_is_no_note(options, value):
    plan = planned(options={"hpc_rendezvous": value} | options)
    assert plan.messages.notes == ()


ONE_NODE = "a world of one node"


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"job": None}, ONE_NODE),
        ({"job": ONE_NODE_JOBS["step"]}, ONE_NODE),
        ({"options": {"standalone": True}}, ONE_NODE),
        ({"options": {"nnodes": "1"}}, ONE_NODE),
        (
            {"job": None, "options": {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}},
            "nodes that no scheduler has named",
        ),
    ],
)
def test_a_typed_kind_of_rendezvous_that_has_no_effect(changes, noted):
    for value in ("scheduler", "auto", "c10d"):
        options = {"hpc_rendezvous": value} | changes.get("options", {})
        plan = planned(**changes | {"options": options})
        notes = [str(note) for note in plan.messages.notes]
        expected = f"HPC077 --hpc_rendezvous=scheduler has no effect on {noted}"
        assert notes == ([expected] if value == "scheduler" else [])
        assert plan.rendezvous.backend != "scheduler"
        assert not plan.rendezvous.is_coordinator
