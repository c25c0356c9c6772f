"""The plan of a world of one node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.juelich import (
    COMMAND,
    INTERACTIVE,
    ONE_NODE_JOBS,
    ONE_NODE_STEP,
    THREE,
    juelich,
    step,
)
from tests.support.networks import make_network
from tests.support.plans import NODE, PORT, conf_of, planned, refused, values
from torchrun_hpc.errors import Message
from torchrun_hpc.planning import head_node
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.variables import FAULT_HANDLER

# --- one node -----------------------------------------------------------------------


LOOPBACK = make_network({"lo": "127.0.0.1/8"})


@pytest.mark.parametrize("job", ONE_NODE_JOBS.values(), ids=ONE_NODE_JOBS)
@pytest.mark.parametrize("network", [None, LOOPBACK], ids=["network", "loopback"])
def test_one_node_of_a_job(job, network):
    plan = planned(job, network=network)
    assert values(plan.options) == {
        "nnodes": "1",
        "local_addr": "127.0.0.1",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_id": job.launch_id,
    }
    assert values(plan.environment) == {"OMP_NUM_THREADS": "1", FAULT_HANDLER: "1"}
    assert plan.meeting.endpoint == "localhost"
    assert plan.meeting.local_address == "127.0.0.1"
    assert (plan.meeting.nodes, plan.ranks_follow_scheduler) == (1, False)
    assert plan.meeting.listen is None  # it meets within the process
    assert plan.messages.warnings == ()
    assert is_reporter(plan.meeting.report_rank)


@pytest.mark.parametrize("options", [{}, {"nnodes": "1"}, {"nnodes": "1:1"}])
def test_laptop(options):
    plan = planned(None, options=options, network=LOOPBACK)
    expected = {"standalone": True, "local_addr": "127.0.0.1", "nnodes": "1"}
    assert values(plan.options) == {
        name: value for name, value in expected.items() if name not in options
    }
    assert (plan.messages.title, plan.messages.warnings) == ("no scheduler", ())
    assert is_reporter(plan.meeting.report_rank)
    assert plan.environment.keys() == {"OMP_NUM_THREADS", FAULT_HANDLER}


@pytest.mark.parametrize("task", [0, 1, 5])
@pytest.mark.parametrize("options", [{"standalone": True}, {"nnodes": "1"}])
def test_one_world_per_task(task, options):
    job = step(task // 2, task=Task(task, 6, task % 2, 2))
    plan = planned(job, options=options)
    assert plan.meeting.nodes == 1
    assert is_reporter(plan.meeting.report_rank) is (task == 0)
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
def test_explicit_options_of_one_node_stay(options, derived):
    plan = planned(ONE_NODE_STEP, options=options)
    assert plan.options.keys() == set(derived.split())


@pytest.mark.parametrize(
    ("options", "in_process"),
    [
        ({"rdzv_backend": "c10d"}, False),
        ({"rdzv_backend": "static"}, False),
        ({"rdzv_backend": "c10d", "standalone": True}, False),
        ({"rdzv_endpoint": "localhost:0"}, False),
        ({"rdzv_conf": "timeout=5"}, False),
        ({"master_port": 29500}, False),
        ({"hpc_rendezvous": "c10d"}, False),
        ({"hpc_without_patches": "agent"}, False),
        ({}, True),
        ({"standalone": True}, True),
        ({"nnodes": "1"}, True),
        ({"rdzv_id": "mine"}, True),
        ({"local_addr": "10.20.0.1"}, True),
    ],
)
@pytest.mark.parametrize("job", [None, ONE_NODE_STEP])
def test_our_coordinator_serves_one_node(job, options, in_process):
    meeting = planned(job, options=options).meeting
    assert (meeting.in_process, meeting.has_coordinator) == (in_process, in_process)
    assert not meeting.is_ours  # for a user it is torch's
    assert (meeting.listen is None) is in_process
    unfit = planned(
        job, options=options, node=replace(NODE, incompatible_patches=("agent",))
    ).meeting
    assert not unfit.in_process
    assert unfit.listen == (meeting.listen or ("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("conf", "expected"),
    [(None, "is_host=1"), ("join_timeout=5", "join_timeout=5,is_host=1")],
)
def test_an_explicit_endpoint_for_one_node_is_hosted_here(conf, expected):
    options = {"rdzv_endpoint": "jwb0001:29400"} | ({"rdzv_conf": conf} if conf else {})
    plan = planned(ONE_NODE_STEP, options=options)
    assert plan.options["rdzv_conf"].value == expected
    assert plan.meeting.endpoint == "jwb0001:29400"
    assert plan.meeting.listen == ("10.10.0.1", 29400)


@pytest.mark.parametrize(
    "options",
    [
        {"rdzv_backend": "etcd-v2"},
        {"rdzv_backend": "c10d", "rdzv_conf": "store_type=file"},
    ],
)
def test_one_node_and_a_rendezvous_without_endpoint(options):
    plan = planned(ONE_NODE_STEP, options=options)
    assert "rdzv_endpoint" not in plan.options


@pytest.mark.parametrize(
    "options",
    [
        {"rdzv_endpoint": "jwb0001:29400", "rdzv_conf": "is_host=0"},
        {"rdzv_endpoint": "jwb0002:29400"},
    ],
)
def test_one_node_may_be_the_guest_of_a_store_elsewhere(options):
    plan = planned(ONE_NODE_STEP, options=options)
    assert plan.meeting.listen is None
    assert "rdzv_conf" not in plan.options


def test_interactive_step_shows_how_to_start_on_all_nodes():
    (note,) = planned(INTERACTIVE).messages.notes
    line = f"srun --nodes=3 --ntasks=3 --ntasks-per-node=1 {COMMAND}"
    assert note.code == "HPC073"
    assert note.text.startswith("this is 1 of 3 nodes of the job. ")
    assert note.text.endswith(f":\n    {line}")


def test_interactive_step_of_a_job_of_one_node_says_nothing():
    assert planned(replace(INTERACTIVE, allocated_nodes=1)).messages.notes == ()


@pytest.mark.parametrize("job", ONE_NODE_JOBS.values(), ids=ONE_NODE_JOBS)
def test_a_range_is_the_users_so_that_others_may_join_one_node(job):
    plan = planned(job, options={"nnodes": "1:2"})
    assert "nnodes" not in plan.options
    assert (plan.meeting.nodes, plan.meeting.may_grow) == (1, True)
    port = head_node.port_of(job.launch_id)
    rendezvous = plan.meeting
    assert (rendezvous.backend, rendezvous.may_join) == ("c10d", False)
    assert not rendezvous.has_coordinator
    assert rendezvous.endpoint == f"jwb0001i:{port}"
    assert rendezvous.listen == ("10.20.0.1", port)
    assert rendezvous.local_address == "10.20.0.1"
    assert conf_of(plan)["is_host"] == "1"
    assert plan.options["local_addr"].value == "10.20.0.1"
    assert plan.options["rdzv_id"].value == job.launch_id
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    codes = [note.code for note in plan.messages.notes]
    assert codes == (["HPC073"] if job is INTERACTIVE else [])


@pytest.mark.parametrize("endpoint", ["jwb0001i:7", "10.20.0.1:7"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("with_job", [True, False])
def test_an_agent_that_joins_by_hand(endpoint, rank, with_job):
    """Only an agent on the node of the endpoint may be the host."""
    is_here = rank == 0
    job = step(nodes=(THREE[rank],)) if with_job else None
    options = {"nnodes": "1:2", "rdzv_backend": "c10d", "rdzv_id": "19.1"}
    options |= {"rdzv_endpoint": endpoint}
    plan = planned(job, options=options, network=juelich(rank), hostname=THREE[rank])
    assert plan.meeting.may_grow
    assert plan.meeting.may_join
    assert plan.meeting.listen == (("10.20.0.1", 7) if is_here else None)
    assert plan.options.keys().isdisjoint({"nnodes", "rdzv_id"})
    assert plan.meeting.local_address == f"10.20.0.{rank + 1}"
    if with_job:
        assert conf_of(plan)["is_host"] == str(int(is_here))


@pytest.mark.parametrize("job", [None, step(nodes=("jwb0001",))])
def test_who_says_that_it_is_the_host_does_not_join(job):
    options = {"nnodes": "1:2", "rdzv_backend": "c10d"}
    options |= {"rdzv_endpoint": "jwb0001i:7", "rdzv_conf": "is_host=1"}
    assert not planned(job, options=options).meeting.may_join


def test_nobody_joins_a_number_of_nodes():
    assert not planned(options={"rdzv_endpoint": "jwb0001:7"}).meeting.may_join
    assert not planned().meeting.may_grow
    assert not planned(options={"nnodes": "1:3"}).meeting.may_grow
    assert planned(options={"nnodes": "1:4"}).meeting.may_grow


@pytest.mark.parametrize("job", [None, step(), ONE_NODE_STEP])
def test_a_range_and_standalone(job):
    plan = planned(job, options={"nnodes": "1:2", "standalone": True})
    assert plan.options["nnodes"].value == "1"
    text = "--nnodes=1:2 counts as 1: nobody can join with --standalone"
    assert plan.messages.notes == (Message("HPC155", text),)


@pytest.mark.parametrize("options", [{"rdzv_backend": "static"}, {"master_port": 7}])
@pytest.mark.parametrize(("nodes", "nnodes"), [(1, "1:2"), (3, "2:4"), (3, "3:9")])
def test_static_waits_for_the_highest_number(options, nodes, nnodes):
    job = step(nodes=THREE[:nodes])
    high = nnodes.partition(":")[2]
    text = f"--nnodes={nnodes}, but the static rendezvous waits for {high} nodes"
    error = refused("HPC157", text, planned, job, options=options | {"nnodes": nnodes})
    assert error.everywhere


def test_one_node_whose_name_no_launcher_tells():
    job = replace(step(nodes=("",)), hostname="jwb0001")
    plan = planned(job, options={"nnodes": "1:2"}, hostname="jwb0001")
    assert plan.meeting.endpoint == f"jwb0001i:{PORT}"
    assert plan.meeting.local_address == "10.20.0.1"


@pytest.mark.parametrize("options", [{"rdzv_backend": "static"}, {"master_port": 1}])
def test_static_rank_beyond_one_node_is_refused(options):
    """It would wait for a rank 0 that nobody starts."""
    options = {**options, "node_rank": 1}
    text = "--node_rank=1, but a world of one node"
    refused("HPC064", text, planned, ONE_NODE_STEP, options=options)


@pytest.mark.parametrize("job", [None, *ONE_NODE_JOBS.values()])
@pytest.mark.parametrize(
    "options", [{}, {"nnodes": "1"}, {"standalone": True}, {"master_addr": "127.0.0.1"}]
)
def test_rank_beyond_one_node_is_ignored_where_torch_ignores_it(job, options):
    plan = planned(job, options={**options, "node_rank": 1})
    assert plan.options["node_rank"].value == 0
    (advice,) = plan.messages.advice
    assert advice.code == "HPC075"
    assert advice.text.startswith("--node_rank=1 is ignored: a world of one node")
    assert planned(job, options={**options, "node_rank": 0}).messages.advice == ()


@pytest.mark.parametrize(
    ("run_id", "taken"),
    [("a/b", False), ("x" * 246, True), ("x" * 247, False), ("é" * 124, False)],
)
def test_id_that_names_no_folder_is_left_to_torch_on_one_node(run_id, taken):
    options = planned(None, options={"rdzv_id": run_id}).options
    assert values(options).get("rdzv_id") == (None if taken else "none")


@pytest.mark.parametrize("nnodes", [" 1", "+1", "1 ", "1 : +1", "01"])
def test_numbers_of_nodes_as_torch_reads_them(nnodes):
    plan = planned(None, options={"nnodes": nnodes})
    assert (plan.meeting.nodes, "nnodes" in plan.options) == (1, False)


def test_backend_of_standalone_is_torchs_own():
    plan = planned(None, options={"standalone": True, "rdzv_backend": "etcd"})
    assert plan.meeting.backend == "c10d"
    assert values(plan.options)["rdzv_backend"] == "c10d"


# --- a site that has no effect ------------------------------------------------------

SITE = {"hpc_site": "jsc"}
NO_EFFECT = "HPC077 --hpc_site=jsc has no effect"
ONE_NODE = f"{NO_EFFECT} on a world of one node"
BY_HAND = {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}


@pytest.mark.parametrize(
    ("plan", "notes"),
    [
        (planned(None, options=SITE), [ONE_NODE]),
        (planned(options=SITE | {"standalone": True}), [ONE_NODE]),
        (planned(None, options=SITE | BY_HAND), [f"{NO_EFFECT} without a scheduler"]),
        (planned(None), []),  # recognised, not explicit
        (planned(options=SITE), []),  # it has an effect
        (planned(None, site=None, options={"hpc_site": "none"}), []),
        # If a module sets the site, a note would come with each job of one node.
        (planned(None, options=SITE, environ={"PET_HPC_SITE": "jsc"}), []),
    ],
)
def test_an_explicit_site_that_has_no_effect(plan, notes):
    assert [*map(str, plan.messages.notes)] == notes
