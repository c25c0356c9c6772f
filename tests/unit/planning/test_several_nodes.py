"""The plan of a step with an agent on each of several nodes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from tests.support.detection import detected
from tests.support.juelich import (
    ALIASES,
    COMMAND,
    JSC,
    ONE_NODE_STEP,
    STEP,
    THREE,
    juelich,
    step,
)
from tests.support.plans import PORT, make_inputs, planned, refused, values
from tests.support.recordings import node_file, recorded, recordings
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.planning import head_node
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.planning.plan import meet
from torchrun_hpc.planning.several_nodes import meeting_to_give_up
from torchrun_hpc.reporting.console import is_reporter, reports_wait_for
from torchrun_hpc.reporting.start_line import start_line
from torchrun_hpc.schedulers.job import LaunchContext
from torchrun_hpc.schedulers.openmpi import MPIRUN
from torchrun_hpc.schedulers.process import Process
from torchrun_hpc.variables import FAULT_HANDLER

# --- three nodes at Jülich ----------------------------------------------------------

JUELICH = [
    # node, its address, is_host, where it listens
    (0, "10.20.0.1", "1", ("10.20.0.1", PORT)),
    (1, "10.20.0.2", "0", None),
    (2, "10.20.0.3", "0", None),
]


@pytest.mark.parametrize(("rank", "address", "is_host", "listen"), JUELICH)
def test_three_nodes_at_juelich(rank, address, is_host, listen):
    plan = planned(step(rank))
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
        FAULT_HANDLER: "1",
        "GLOO_SOCKET_IFNAME": "ib0",
    }
    assert (plan.meeting.nodes, plan.meeting.node_rank, plan.workers.number) == (
        3,
        rank,
        2,
    )
    assert plan.meeting.endpoint == f"jwb0001i:{PORT}"
    assert (plan.meeting.local_address, plan.meeting.listen) == (address, listen)
    assert is_reporter(plan.meeting.report_rank) is (rank == 0)
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
    plan = planned(step(rank), site=None)
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert plan.meeting.endpoint == f"jwb0001:{PORT}"
    assert plan.messages.notes == ()


def test_subset_of_the_jobs_nodes():
    nodes = ("jwb0002", "jwb0003")
    plan = planned(
        replace(step(nodes=nodes, allocated_nodes=3), launch_id="22.0"),
        network=juelich(1),
    )
    assert plan.messages.title == "Slurm 22.0 (2 of 3 nodes)"
    assert plan.options["nnodes"].value == "2"
    assert plan.meeting.listen == ("10.20.0.2", 20706)


@pytest.mark.parametrize("rank", range(3))
def test_ranks_follow_the_scheduler_where_names_sort_otherwise(rank):
    nodes = ("n9", "n10", "n11")
    hosts = {"n9": "10.20.0.1", "n10": "10.20.0.2", "n11": "10.20.0.3"}
    plan = planned(
        step(rank, nodes=nodes), site=None, network=juelich(rank, hosts=hosts)
    )
    assert (plan.meeting.node_rank, plan.ranks_follow_scheduler) == (rank, True)
    assert plan.meeting.endpoint == f"n9:{PORT}"
    assert (plan.meeting.listen is not None) is (rank == 0)


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
def test_explicit_options_stay(name, value):
    plan = planned(options={name: value})
    derived = planned().options.keys()
    assert plan.options.keys() == derived - {name}
    assert plan.messages.notes == ()


@pytest.mark.parametrize("rank", range(3))
def test_an_explicit_address_chooses_the_interface(rank):
    address = f"10.10.0.{rank + 1}"
    for options in {"local_addr": address}, {"rdzv_endpoint": "10.10.0.1:29400"}:
        plan = planned(step(rank), options=options)
        assert plan.meeting.local_address == address
        assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"


def test_an_explicit_local_address_does_not_move_the_endpoint():
    """The other nodes do not know an option that only this node has."""
    plan = planned(options={"local_addr": "10.10.0.1"})
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"
    assert plan.meeting.listen == ("10.20.0.1", PORT)


# --- static and etcd ----------------------------------------------------------------

STATIC = [
    {"rdzv_backend": "static"},
    {"node_rank": "own"},
    {"master_addr": "jwb0001i"},
    {"master_addr": "jwb0001"},
    {"master_addr": "10.20.0.1", "node_rank": "own"},
    {"rdzv_backend": "static", "rdzv_endpoint": "jwb0001i"},
]


@pytest.mark.parametrize("given", STATIC)
def test_static_stays_static_with_host_and_interface_corrected(given):
    for rank in range(3):
        options = {k: rank if v == "own" else v for k, v in given.items()}
        plan = planned(step(rank), options=options)
        assert plan.options["node_rank"].value == rank, rank
        assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}", rank
        if "rdzv_backend" not in options:
            assert plan.options["rdzv_backend"].value == "static", rank
        assert "rdzv_conf" not in plan.options, rank
        assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0", rank
        listens = ("10.20.0.1", PORT) if rank == 0 else None
        assert plan.meeting.listen == listens, rank
        assert not plan.ranks_follow_scheduler, rank
        is_noted = options.get("master_addr") == "jwb0001"
        assert bool(plan.messages.notes) is is_noted, rank


@pytest.mark.parametrize("backend", [{}, {"rdzv_backend": "static"}])
def test_an_explicit_master_port(backend):
    plan = planned(step(1), options=backend | {"master_port": 29501})
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
        planned,
        step(rank),
        options=options | {"node_rank": node_rank},
    )
    assert "$SLURM_NODEID" in str(error)
    assert not error.everywhere


def test_static_rank_where_the_list_of_nodes_gives_the_rank():
    provenance = {"nodes": "SLURM_STEP_NODELIST", "launch_id": "SLURM_JOB_ID"}
    job = replace(step(1), provenance=provenance)
    text = "this is node 1 of the step (SLURM_STEP_NODELIST)"
    refused("HPC071", text, planned, job, options={"node_rank": 0})


@pytest.mark.parametrize("rank", [0, 1])
def test_static_hosted_by_the_address_of_another_node_is_refused(rank):
    message = "--master_addr=10.20.0.2 is not an address of node 0, but"
    error = refused(
        "HPC069", message, planned, step(rank), options={"master_addr": "10.20.0.2"}
    )
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
    job = replace(step(rank), started_by=MPIRUN)
    error = refused("HPC069", "is node 1 of the step", planned, job, options=options)
    assert "is on node 0, jwb0001" in str(error)
    assert error.everywhere
    # Slurm's ranks may be no places in its list: these two see who is not node 0.
    error = refused(
        "HPC069", "is not an address of node 0", planned, step(rank), options=options
    )
    assert not error.everywhere


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_etcd_is_left_alone(rank, backend):
    options = {"rdzv_backend": backend, "rdzv_endpoint": "keeper:2379"}
    plan = planned(step(rank), options=options)
    assert values(plan.options) == {
        "nnodes": "3",
        "rdzv_id": "19.0",
        "local_addr": f"10.20.0.{rank + 1}",
        "node_rank": 0,
    }
    assert (plan.meeting.endpoint, plan.meeting.listen) == ("keeper:2379", None)
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
    line = start_line(plan).partition(": ")[2]
    assert line.startswith(f"{said}, 2 workers here; Slurm")
    assert plan.meeting.nodes == 3


WORKER = {"TORCHELASTIC_RUN_ID": "19.0", "RANK": "5"}


@pytest.mark.parametrize("rank", range(3))
def test_a_launch_inside_a_worker_of_the_same(rank):
    said = "this is worker 5 of launch 19.0 (TORCHELASTIC_RUN_ID)"
    for options in ({}, {"rdzv_id": "other"}, {"hpc_rendezvous": "c10d"}):
        error = refused(
            "HPC164", said, planned, step(rank), environ=WORKER, options=options
        )
        assert "Pass --standalone" in str(error)
        assert not error.everywhere  # perhaps one worker does it


@pytest.mark.parametrize(
    ("job", "environ", "options"),
    [
        (STEP, WORKER | {"TORCHELASTIC_RUN_ID": "18.0"}, {}),  # by sbatch
        (STEP, {"TORCHELASTIC_RUN_ID": "19.0"}, {}),
        (STEP, WORKER, {"standalone": True}),
        (STEP, WORKER, {"nnodes": "1"}),
        (STEP, WORKER, {"rdzv_endpoint": "jwb0001:29400"}),
        (STEP, WORKER, {"rdzv_endpoint": "jwb0001:2379", "rdzv_backend": "etcd"}),
        (step(nodes=THREE[:1]), WORKER, {}),
        (None, WORKER, {}),
    ],
)
def test_a_launch_inside_a_worker_that_does_not_meet_the_same(job, environ, options):
    planned(job, environ=environ, options=options)


@pytest.mark.parametrize(
    ("late", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
def test_one_node_says_that_another_is_late(late, reporters):
    plans = [planned(step(rank)) for rank in range(3)]
    ranks = [plan.meeting.node_rank for plan in plans]
    assert [rank for rank in ranks if reports_wait_for(rank, late)] == reporters


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
        planned,
        step(rank, allocated_nodes=allocated),
        options={"nnodes": nnodes},
    )
    line = f"run:\n    srun --nodes={fix} --ntasks={fix} --ntasks-per-node=1 {COMMAND}"
    words = line if isinstance(fix, int) else f"start it on {fix} nodes"
    assert str(error).endswith(f". Remove the option, or {words}")
    assert error.everywhere


def test_process_on_none_of_the_nodes():
    """No source says so today; one that does is not taken for node 0."""
    message = "this process is not on one of the job's nodes"
    refused("HPC068", message, planned, replace(step(), node_rank=None))


def test_several_nodes_in_a_step_of_one():
    job = ONE_NODE_STEP
    error = refused("HPC070", "--nnodes=2", planned, job, options={"nnodes": "2"})
    assert "on 1 node (SLURM_STEP_NODELIST)" in str(error)


@pytest.mark.parametrize(
    "options", [{"nnodes": "three"}, {"rdzv_conf": "is_host"}, {"rdzv_conf": "a=b,=c"}]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_option_of_all_nodes_is_reported_once(options, rank):
    with pytest.raises(LaunchError) as caught:
        planned(step(rank), options=options)
    assert caught.value.everywhere


@pytest.mark.parametrize("rank", [0, 2])
def test_an_explicit_rank_is_ignored_by_c10d_and_says_so(rank):
    plan = planned(step(rank), options={"rdzv_backend": "c10d", "node_rank": 5})
    text = "--node_rank=5 is ignored: the scheduler numbers the nodes"
    assert plan.messages.notes == (Message("HPC075", text),)
    assert (plan.meeting.node_rank, plan.options["node_rank"].value) == (rank, 0)
    assert plan.ranks_follow_scheduler


# --- how the nodes meet -------------------------------------------------------------


@pytest.mark.parametrize("rank", range(3))
def test_nodes_that_the_scheduler_has_numbered_meet_by_their_numbers(rank):
    plan = planned(step(rank))
    assert plan.meeting.backend == "scheduler"
    assert (plan.meeting.launch_id, plan.meeting.coordinator) == ("19.0", 0)
    assert plan.meeting.connect_host == "10.20.0.1"
    assert (plan.meeting.ports, plan.meeting.notice_ports) == head_node.ports_of("19.0")
    assert plan.meeting.ports[0] == PORT
    assert plan.meeting.is_coordinator is (rank == 0)
    assert plan.meeting.endpoint == f"jwb0001i:{PORT}"


# Explicit options, and the rendezvous that follows.
KINDS = {
    "scheduler": [
        {},
        {"rdzv_backend": "c10d"},
        {"rdzv_id": "mine"},
        {"nnodes": "3"},
        {"nnodes": "3:3"},  # a range of one
        {"rdzv_endpoint": "jwb0001:29400"},
        {"rdzv_conf": "join_timeout=5"},
        {"hpc_rendezvous": "auto"},
        {"hpc_rendezvous": "scheduler"},
        {"hpc_rendezvous": "scheduler", "rdzv_backend": "c10d"},
    ],
    "c10d": [
        {"hpc_rendezvous": "c10d"},
        {"nnodes": "2:3"},
        {"nnodes": "2:3", "hpc_rendezvous": "auto"},
        {"rdzv_backend": "c10d", "rdzv_conf": "store_type=file", "rdzv_endpoint": "/f"},
    ],
    "static": [
        {"rdzv_backend": "static"},
        {"rdzv_backend": "static", "hpc_rendezvous": "auto"},
        {"rdzv_backend": "static", "hpc_rendezvous": "c10d"},
        {"master_addr": "jwb0001"},
    ],
    "etcd": [{"rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"}],
}


@pytest.mark.parametrize("expected", KINDS)
def test_kind_of_rendezvous(expected):
    for options, rank in product(KINDS[expected], [0, 2]):
        plan = planned(step(rank), options=options)
        assert plan.meeting.backend == expected, (options, rank)
        # Torch's has one port, and so has who types one.
        tries_all = expected == "scheduler" and "rdzv_endpoint" not in options
        number = 8 if tries_all else 1
        assert len(plan.meeting.ports) == number, (options, rank)
        # torchrun itself is told c10d: that is what it would be without us.
        if expected == "scheduler" and "rdzv_backend" not in options:
            assert plan.options["rdzv_backend"].value == "c10d", (options, rank)


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
    text = "--hpc_rendezvous=scheduler needs"
    by_numbers = {"hpc_rendezvous": "scheduler"} | options
    error = refused("HPC126", text, planned, step(rank), options=by_numbers)
    assert error.everywhere
    for name, value in options.items():
        if name != "rdzv_endpoint":
            assert f"--{name}={value}" in str(error)


@pytest.mark.parametrize("options", [{}, {"nnodes": "3"}, {"rdzv_backend": "c10d"}])
def test_a_kind_of_rendezvous_is_no_note(options):
    for value in "auto", "scheduler", "c10d":
        plan = planned(options={"hpc_rendezvous": value} | options)
        assert plan.messages.notes == (), value


ONE_NODE = "on a world of one node"


@pytest.mark.parametrize(
    ("job", "others", "noted"),
    [
        (None, {}, ONE_NODE),
        (ONE_NODE_STEP, {}, ONE_NODE),
        (STEP, {"standalone": True}, ONE_NODE),
        (STEP, {"nnodes": "1"}, ONE_NODE),
        (None, {"nnodes": "2", "rdzv_endpoint": "10.10.0.1:1"}, "without a scheduler"),
    ],
)
def test_an_explicit_kind_of_rendezvous_that_has_no_effect(job, others, noted):
    for value in ("scheduler", "auto", "c10d"):
        plan = planned(job, options={"hpc_rendezvous": value} | others)
        notes = [str(note) for note in plan.messages.notes]
        expected = f"HPC077 --hpc_rendezvous=scheduler has no effect {noted}"
        assert notes == ([expected] if value == "scheduler" else [])
        assert not plan.meeting.is_ours
        is_ours = noted == ONE_NODE and value != "c10d"
        assert plan.meeting.in_process == is_ours


# --- a node that gives up -------------------------------------------------------------

# What it needs to tell the others.
MEETS_BY = (
    *("backend", "nodes", "node_rank", "launch_id", "started_by", "started"),
    *("hosts", "fast_hosts", "spares", "key", "site", "endpoint", "connect_host"),
    *("ports", "notice_ports", "coordinator", "is_coordinator", "listen"),
)
ENDPOINT: dict[str, object] = {"rdzv_endpoint": "jwb0002:29400"}
GIVEN: list[dict[str, object]] = [
    {},
    ENDPOINT,
    {"rdzv_endpoint": "10.10.0.1"},
    {"rdzv_endpoint": "vip:29400"},
    {"master_addr": "jwb0001", "master_port": 4444},
    {"rdzv_backend": "static"},
    {"rdzv_backend": "c10d", "rdzv_conf": "is_host=1"},
    {"nnodes": "1:9"},
    {"hpc_spares": 1},
    {"hpc_auth": "none"},
    {"hpc_key_file": "/k"},
    {"hpc_dry_run": "json"},
    {"hpc_rendezvous": "c10d"},
    {"rdzv_id": "mine"},
]


def tasks_of(name):
    """Return the job and the variables of each task of a recorded launch."""
    tasks = recorded(name)
    listed = node_file(name) if name.startswith("pbs-pbsdsh") else None
    for environ, host in tasks:
        with suppress(LaunchError):  # some recorded launches are refused
            yield detected(Process(environ, host, read=lambda _: listed)), environ


@pytest.mark.parametrize("name", recordings(""))
def test_a_node_that_gives_up_meets_the_others_where_the_plan_says(name):
    for (job, environ), options in product(tasks_of(name), GIVEN):
        network = juelich(job.index or 0, hosts=ALIASES)
        inputs = make_inputs(job, environ=environ, options=options, network=network)
        if (
            inputs.mode is not Mode.SEVERAL_NODES
            or job.context is not LaunchContext.STEP
        ):
            continue
        with suppress(LaunchError):  # then the options are at fault
            meeting = meet(inputs)
            other = meeting_to_give_up(inputs, job)
            for field in MEETS_BY:
                assert getattr(other, field) == getattr(meeting, field), field


FAULTS = [
    {"rdzv_endpoint": "nowhere:29400"},
    {"rdzv_endpoint": "jwb0001:0"},
    {"rdzv_endpoint": "jwb0001:x"},
    {"rdzv_endpoint": "nowhere", "rdzv_conf": "is_host=1"},
    {"rdzv_conf": "is_host=maybe"},
    {"max_restarts": -1},
    {"local_addr": "10.9.9.9"},
]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("options", FAULTS)
def test_nodes_with_the_same_wrong_option_meet_without_it(options, rank):
    meeting = meet(make_inputs(step(rank)))
    other = meeting_to_give_up(make_inputs(step(rank), options=options), step(rank))
    for field in MEETS_BY:
        assert getattr(other, field) == getattr(meeting, field), field


def test_a_wrong_option_leaves_the_right_endpoint():
    options = ENDPOINT | {"max_restarts": -1, "hpc_auth": "perhaps"}
    site = replace(JSC, options={"hpc_key_file": "/site/key"})
    inputs = make_inputs(step(1), options=options, site=site)
    meeting = meeting_to_give_up(inputs, step(1))
    assert (meeting.endpoint, meeting.is_coordinator) == ("jwb0002i:29400", True)
    assert meeting.key.path == "/site/key"


def test_a_node_that_does_not_reach_the_head_node_can_tell_nobody():
    network = juelich(1, hosts={"jwb0001": "", "jwb0001i": ""})
    inputs = make_inputs(step(1), network=network)
    refused("HPC059", "does not resolve here", meeting_to_give_up, inputs, step(1))
