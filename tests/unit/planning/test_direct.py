"""The plan of a task that is a worker."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.detection import changed, detected
from tests.support.juelich import ALIASES, JSC, THREE, job_at, juelich, step
from tests.support.networks import make_network
from tests.support.plans import (
    BLOCK,
    CYCLIC,
    ONE_WORKER,
    PORT,
    UNEVEN,
    Given,
    make_inputs,
    make_plan,
    planned_at,
    planned_task,
    refused,
    values,
    visible,
    worker_environment,
)
from tests.support.recordings import recorded
from torchrun_hpc.errors import LaunchError, Message, Setting
from torchrun_hpc.planning import resources
from torchrun_hpc.planning.inputs import Node
from torchrun_hpc.planning.messages import DIRECT_MODE
from torchrun_hpc.planning.workers import Workers
from torchrun_hpc.reporting.start_line import start_line
from torchrun_hpc.schedulers import hydra, openmpi, pals
from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process

if TYPE_CHECKING:
    from typing_extensions import Unpack


NOTHING: dict[str, str] = {}

# --- the variables of a worker ------------------------------------------------------


def environment(plan):
    return values(plan.environment)


def exported(address=None, port=None):
    """Return what a user, or a hook of a container, has exported."""
    return changed({}, {"MASTER_ADDR": address, "MASTER_PORT": port})


def master(plan):
    """Return where a worker looks for rank 0: ``ADDRESS:PORT``."""
    found = environment(plan)
    return f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}"


@pytest.mark.parametrize("places", [BLOCK, CYCLIC, UNEVEN, [0, 1, 1], [0, 0, 1, 2]])
def test_variables_of_all_workers(places):
    plans = [planned_at(places, rank) for rank in range(len(places))]
    found = [environment(each) for each in plans]
    assert found == [worker_environment(rank, places) for rank in range(len(places))]
    others = len(places) - 1
    assert [each.meeting.report_rank == 0 for each in plans] == [True] + [
        False
    ] * others
    listening = [each.meeting.listen for each in plans]
    assert listening == [("10.20.0.1", PORT)] + [None] * others
    assert {each.meeting.endpoint for each in plans} == {f"jwb0001i:{PORT}"}
    assert all(value.source for each in plans for value in each.environment.values())


@pytest.mark.parametrize(
    ("places", "shape"),
    [
        (BLOCK, "2 nodes x 4 tasks"),
        (CYCLIC, "2 nodes x 2 tasks"),
        ([0, 0], "1 node x 2 tasks"),
        (UNEVEN, "2 nodes, 3 tasks"),
    ],
)
def test_shape(places, shape):
    assert start_line(planned_at(places, 0)).partition(": ")[2].startswith(f"{shape}; ")


def test_values_carry_their_sources():
    where = (
        "first of SLURM_STEP_NODELIST, jwb0001i by site jsc, its address, "
        "port by hash of 19.0"
    )
    plan = planned_at(BLOCK, 5)
    provenance = {name: value.source for name, value in plan.environment.items()}
    assert provenance == {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
        "LOCAL_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
        "GROUP_RANK": "SLURMD_NODENAME",
        "GROUP_WORLD_SIZE": "SLURM_STEP_NODELIST",
        "ROLE_RANK": "SLURM_PROCID",
        "ROLE_WORLD_SIZE": "SLURM_STEP_TASKS_PER_NODE",
        "ROLE_NAME": "default",
        "MASTER_ADDR": where,
        "MASTER_PORT": where,
        "TORCHELASTIC_RUN_ID": "SLURM_JOB_ID, SLURM_STEP_ID",
        "TORCHELASTIC_RESTART_COUNT": "no agent",
        "TORCHELASTIC_MAX_RESTARTS": "no agent",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "as torchrun",
        "GLOO_SOCKET_IFNAME": "ib0 has 10.20.0.2",
    }


@pytest.mark.parametrize("rank", [0, 5])
def test_without_a_site_the_plain_names_are_used(rank):
    found = environment(planned_at(BLOCK, rank, site=None))
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("10.10.0.1", "eth0")


@pytest.mark.parametrize("rank", range(4))
def test_one_node(rank):
    plan = planned_at([0] * 4, rank)
    found = environment(plan)
    assert found == {
        name: value
        for name, value in worker_environment(rank, [0] * 4).items()
        if name != "GLOO_SOCKET_IFNAME"
    } | {"MASTER_ADDR": "127.0.0.1"}
    assert (plan.meeting.endpoint, plan.meeting.site) == (f"127.0.0.1:{PORT}", None)
    assert plan.meeting.listen == (("127.0.0.1", PORT) if rank == 0 else None)


def test_one_node_needs_no_network():
    network = make_network({"lo": "127.0.0.1/8"})
    assert planned_at([0, 0], 1, network=network).messages.warnings == ()


def test_variables_that_the_user_has_set_stay():
    environ = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "OMP_NUM_THREADS": "7",
        "RANK": "99",
        "WORLD_SIZE": "99",
    }
    found = environment(planned_at(BLOCK, 1, environ=environ))
    assert environ.keys() & found.keys() == {"RANK", "WORLD_SIZE"}
    assert (found["RANK"], found["WORLD_SIZE"]) == ("1", "8")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ("auto", "8"), ("3", "3")]
)
def test_threads_only_by_the_option(value, expected):
    """A task may have been given CPUs of its own by the launcher."""
    options = {} if value is None else {"hpc_omp_threads": value}
    found = environment(planned_at(BLOCK, 1, options=options, node=Node(1, cpus=8)))
    assert found.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(
    ("value", "cpus", "expected"),
    [(None, 16, "16"), ("auto", 16, "16"), ("3", 16, "3"), (None, 64, None)],
)
def test_threads_that_pbs_has_set(value, cpus, expected):
    """ncpus=64, whatever the task may use: HPC094 for nearly every job."""
    environ = {"PBS_JOBID": "1.pbs", "NCPUS": "64", "OMP_NUM_THREADS": "64"}
    options = {} if value is None else {"hpc_omp_threads": value}
    plan = planned_at(
        BLOCK, 0, options=options, environ=environ, node=Node(1, cpus=cpus)
    )
    assert environment(plan).get("OMP_NUM_THREADS") == expected
    assert plan.messages.advice == ()


def test_threads_that_pbs_has_set_on_one_node_only():
    """Open MPI over ssh: the tasks of other nodes have none, and nobody asks them."""
    job = replace(job_at(BLOCK, 0), nodelist_is_shared=False)
    user = {"OMP_NUM_THREADS": "4"}
    first = {"PBS_JOBID": "1.pbs", "NCPUS": "8", "OMP_NUM_THREADS": "8"}
    for environ in first, {"PBS_JOBID": "1.pbs"}, {}, user:
        plan = planned_task(job, environ=environ, node=Node(1, cpus=2))
        expected = None if environ == user else "2"
        assert environment(plan).get("OMP_NUM_THREADS") == expected


def test_debugging():
    found = environment(planned_at(BLOCK, 1, options={"hpc_debug": True}))
    assert set(found) > set(worker_environment(1, BLOCK))


def test_a_dry_run_looks_for_no_agents():
    plan = planned_task(job_at(BLOCK, 5), options={"hpc_dry_run": "table"})
    assert plan.asked.is_c10d
    assert not plan.meeting.uses_ours(plan.asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hpc_outcome", "/outcome.json"),
        ("hpc_rendezvous", "c10d"),
        ("hpc_stall_report", "600"),
        ("hpc_without_patches", "agent"),
    ],
)
def test_options_of_the_agent_have_no_effect(name, value):
    note = Message("HPC077", f"--{name}={value} has no effect {DIRECT_MODE}")
    assert planned_at(BLOCK, 1, options={name: value}).messages.notes == (note,)


@pytest.mark.parametrize("options", [{}, {"hpc_stall_report": "none"}])
def test_no_note_without_an_option_of_the_agent(options):
    assert planned_at(BLOCK, 1, options=options).messages.notes == ()


def test_a_process_outside_of_the_nodes():
    refused(
        "HPC068",
        "not on one of the job's nodes",
        planned_task,
        replace(step(), node_rank=None),
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_a_name_that_resolves_nowhere(rank):
    hosts = {"jwb0001": "", "jwb0001i": ""}
    network = juelich(rank // 4, hosts=hosts, interfaces={"lo": "127.0.0.1/8"})
    error = refused(
        "HPC059",
        "the head node's name jwb0001 (SLURM_STEP_NODELIST) does not resolve here",
        planned_task,
        job_at(BLOCK, rank),
        network=network,
    )
    assert "export MASTER_ADDR=HOST" in str(error)


@pytest.mark.parametrize("rank", range(8))
def test_a_warning_of_a_node_is_given_by_its_first_task(rank):
    network = juelich(rank // 4, hosts={"jwb0001i": "", "jwb0002i": ""})
    plan = planned_at(BLOCK, rank, network=network)
    assert bool(plan.messages.warnings) is (rank % 4 == 0)
    assert environment(plan)["MASTER_ADDR"] == "10.10.0.1"


# --- what is probably not meant -----------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("places", "told"), [(CYCLIC, {2}), ([0, 0, 1, 1], set()), ([0, 1, 1], set())]
)
def test_tasks_in_turn(places, told, rank):
    if rank >= len(places):
        return
    codes = [message.code for message in planned_at(places, rank).messages.advice]
    assert codes == (["HPC079"] if rank in told else [])


def test_tasks_in_turn_and_what_to_type():
    (message,) = planned_at(CYCLIC, 2).messages.advice
    assert "the second one on this node is task 2 (SLURM_PROCID)" in message.text
    assert message.text.endswith("\n    srun --distribution=block …")


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        (openmpi.MPIRUN, "mpirun --map-by ppr:4:node …"),
        (hydra.MPIEXEC, "mpiexec -ppn 4 …"),
        (pals.MPIEXEC, "mpiexec --ppn 4 …"),
    ],
)
def test_tasks_in_turn_by_other_launchers(launcher, words):
    job = step(task=Task(3, 12, 1, 4), launcher=launcher)
    (message,) = resources.task_advice(make_inputs(job), job, Workers())
    assert message.text.endswith(f"\n    {words}")


GPUS = [*visible(CUDA="", HIP="", ROCR=""), "ZE_AFFINITY_MASK"]


@pytest.mark.parametrize("rank", range(8))
def test_one_gpu_for_each_task(rank):
    """--gpus-per-task=1: every task sees its own as number 0."""
    for variable in GPUS:
        plan = planned_at(BLOCK, rank, environ={variable: "0"})
        codes = [message.code for message in plan.messages.advice]
        assert codes == (["HPC098"] if rank == 1 else []), variable
        for message in plan.messages.advice:
            text = f"{variable}=0 shows one GPU to each task"
            assert message.text.startswith(text)


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        ({}, {}),
        ({}, visible(CUDA="0,1,2,3")),
        ({}, visible(CUDA="")),
        ({"virtual_local_rank": True}, visible(CUDA="0")),
    ],
)
def test_nothing_to_say_of_gpus(options, environ):
    assert planned_at(BLOCK, 1, options=options, environ=environ).messages.advice == ()


VIRTUAL = {
    # what is visible, and to the second task alone
    "nothing said": ({}, visible(CUDA="1")),
    "all": (visible(CUDA="4,5,6,7"), visible(CUDA="5")),
    "one": (visible(CUDA="3"), {}),
    "of AMD": (visible(ROCR="0,1", HIP="2,3"), visible(ROCR="1", HIP="3")),
    "by name": (visible(CUDA="GPU-0ec1,GPU-1a2b"), visible(CUDA="GPU-1a2b")),
}


@pytest.mark.parametrize(("environ", "gpus"), VIRTUAL.values(), ids=VIRTUAL)
def test_virtual_local_rank(environ, gpus):
    options = {"virtual_local_rank": True}
    found = environment(planned_at(BLOCK, 1, options=options, environ=environ))
    assert found == worker_environment(1, BLOCK) | {"LOCAL_RANK": "0"} | gpus


# --- MASTER_ADDR and MASTER_PORT ----------------------------------------------------

DERIVED = f"10.20.0.1:{PORT}"
# The exported variables, and the address on every node.
KEPT = {
    "the node": (exported("jwb0001"), DERIVED),
    "its fast name": (exported("jwb0001i"), DERIVED),
    "with its domain": (exported("jwb0001.juwels"), DERIVED),
    "its fast address": (exported("10.20.0.1"), DERIVED),
    "its slow address": (exported("10.10.0.1"), f"10.10.0.1:{PORT}"),
    "a name made of its own": (exported("jwb0001-ib0"), DERIVED),
    "and a port": (exported("jwb0001", "29500"), "10.20.0.1:29500"),
    "a port only": (exported(port="29500"), "10.20.0.1:29500"),
    "empty ones": (exported("", ""), DERIVED),
}


@pytest.mark.parametrize(("environ", "expected"), KEPT.values(), ids=KEPT)
def test_what_names_the_first_node_is_kept(environ, expected):
    address, port = expected.split(":")
    for rank in 0, 1, 4:
        network = juelich(rank // 4, hosts=ALIASES | {"jwb0001-ib0": "10.20.0.1"})
        plan = planned_at(BLOCK, rank, environ=environ, network=network)
        assert (master(plan), plan.messages.notes) == (expected, ()), rank
        listens = (address, int(port)) if rank == 0 else None
        assert plan.meeting.listen == listens, rank


@pytest.mark.parametrize(
    "address",
    ["jwb0002", "jwb0002i", "jwb00010", "jwb000", "login01", "localhost", "127.0.0.1"],
)
def test_what_a_hook_has_left_is_replaced(address):
    text = f"MASTER_ADDR={address} is not node 0 of this step, jwb0001, and is replaced"
    for port, rank in product([None, "29500", "x"], [0, 4]):
        plan = planned_at(BLOCK, rank, environ=exported(address, port))
        notes = [str(note) for note in plan.messages.notes]
        assert (master(plan), notes) == (DERIVED, [f"HPC078 {text}"]), (port, rank)


@pytest.mark.parametrize("address", ["10.20.0.2", "10.9.9.9", "fd00::9"])
def test_a_number_that_is_not_the_first_nodes_is_seen_by_rank_0(address):
    """The other nodes cannot know whose it is."""
    environ = exported(address)
    error = refused(
        "HPC039",
        f"rank 0 is on jwb0001, but the other nodes will look for it on {address}",
        planned_task,
        job_at(BLOCK, 0),
        environ=environ,
    )
    assert "MASTER_ADDR" in str(error)
    for rank in (4, 7):
        assert master(planned_at(BLOCK, rank, environ=environ)) == f"{address}:{PORT}"


@pytest.mark.parametrize(
    ("job_id", "port", "expected"),
    [
        ("19", "61019", PORT),
        ("1234567", "61775", PORT),
        ("19", "61020", "61020"),
        ("0", "61000", PORT),
        (None, "61019", "61019"),
        ("", "61019", "61019"),
        ("x", "61019", "61019"),
        ("9" * 5000, "61019", "61019"),
    ],
)
@pytest.mark.parametrize("address", [None, "jwb0001"])
def test_port_of_the_hook_of_enroot(job_id, port, expected, address):
    """It is a number of the job, the same for all its steps: 61000 + id % 4536."""
    environ = changed(exported(address, port), {"SLURM_JOB_ID": job_id})
    assert master(planned_at(BLOCK, 4, environ=environ)) == f"10.20.0.1:{expected}"


@pytest.mark.parametrize("address", ["jwb0001", "10.10.0.1", "localhost", "127.0.0.1"])
def test_an_address_of_the_only_node_is_kept(address):
    plan = planned_at([0, 0], 1, environ=exported(address, "29500"))
    assert (master(plan), plan.messages.notes) == (f"{address}:29500", ())


@pytest.mark.parametrize("name", ["jwb0001", ""])
def test_another_address_on_the_only_node_is_replaced(name):
    job = replace(job_at([0, 0], 1), nodes=(name,), hostname="jwb0001")
    plan = planned_task(job, environ=exported("jwb0002"))
    assert environment(plan)["MASTER_ADDR"] == "127.0.0.1"
    (note,) = plan.messages.notes
    assert note.code == "HPC078"
    assert ", ," not in note.text


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "29500x", "٢٩٤٠٠", "9" * 30])
def test_a_port_that_is_none(port):
    text = f"MASTER_PORT={port} is not a port"
    for address, places in product([None, "jwb0001"], [BLOCK, [0] * 8]):
        environ = exported(address, port)
        error = refused(
            "HPC014", text, planned_task, job_at(places, 5), environ=environ
        )
        assert error.everywhere, (address, places)


# --- where the launcher shows no names ----------------------------------------------


def jobs_of(name, changes=None, exchange=None):
    """Return the jobs of all tasks of a recorded launch."""
    return [
        detected(
            Process(changed(environ, changes or {}), host, exchange=lambda _: exchange)
        )
        for environ, host in recorded(name)
    ]


def planned_as(job, **given: Unpack[Given]):
    """Plan a task as a worker or an agent, as its job demands."""
    given.setdefault("node", ONE_WORKER)
    return make_plan(make_inputs(job, **given))


def all_planned(name, changes=None, environ=NOTHING, exchange=None, site=JSC):
    """Plan all tasks of a recorded launch, or return their refusals."""
    plans: list[Any] = []
    for job in jobs_of(name, changes, exchange):
        network = juelich(int(job.hostname[-1]) - 1)
        try:
            plans.append(planned_as(job, network=network, site=site, environ=environ))
        except LaunchError as error:
            plans.append(f"{error.code} {error}")
    return plans


def masters(plans):
    return {environment(plan)["MASTER_ADDR"] for plan in plans}


URI = "OMPI_MCA_orte_hnp_uri"
TWO_EACH_4 = "openmpi-4.1.4-2-nodes-2-each"
TWO_EACH_5 = "openmpi-5.0.11-2-nodes-2-each"


# Addresses of the machine of mpirun, and the one on the job's network: with the site
# it is the one of the names with i, without it the one of the plain names.
SHOWN = [
    ("10.10.0.1,10.20.0.1", JSC, "10.20.0.1"),  # as recorded
    ("10.10.0.1,10.20.0.1", None, "10.10.0.1"),
    ("10.20.0.1,10.10.0.1", JSC, "10.20.0.1"),
    ("10.20.0.1,10.10.0.1", None, "10.10.0.1"),
    ("192.0.2.2,10.20.0.1", None, "10.20.0.1"),  # a network that no other node has
    ("10.20.0.1", None, "10.20.0.1"),
]


@pytest.mark.parametrize(("addresses", "site", "expected"), SHOWN)
def test_open_mpi_4_shows_addresses(addresses, site, expected):
    changes = {URI: f"1.0;tcp://{addresses}:42367"}
    plans = all_planned(TWO_EACH_4, changes, site=site)
    assert masters(plans) == {expected}
    assert len({master(plan) for plan in plans}) == 1
    listening = [plan.meeting.listen is not None for plan in plans]
    assert listening == [True, False, False, False]


@pytest.mark.parametrize(("addresses", "site", "expected"), SHOWN)
def test_open_mpi_4_shows_addresses_to_agents(addresses, site, expected):
    """As on a real PBS, whose management network was closed between the nodes.

    There the first address was that of the closed network.
    """
    changes = {URI: f"1.0;tcp://{addresses}:42367"}
    plans = all_planned("openmpi-4.1.4-3-nodes", changes, site=site)
    assert {plan.meeting.connect_host for plan in plans} == {expected}
    (is_named,) = {bool(plan.meeting.network_hint) for plan in plans}
    assert is_named is ("," in addresses)


TWO_NETWORKS = "10.10.0.1,10.20.0.1"
HELP = (
    "Name the network: mpirun -x MASTER_ADDR=HOST, or --mca oob_tcp_if_include "
    "INTERFACE; in a PBS job -x PBS_JOBID"
)


@pytest.mark.parametrize("resolved", ["", "127.0.1.1", "192.0.2.7"])
@pytest.mark.parametrize("addresses", [TWO_NETWORKS, f"172.17.0.1,{TWO_NETWORKS}"])
def test_a_name_that_does_not_tell_the_network(resolved, addresses):
    """The nodes could choose different ones. Agents can wait, and say what helps."""
    changes = {URI: f"1.0;tcp://{addresses}:42367"}
    for job in jobs_of("openmpi-4.1.4-3-nodes", changes):
        network = juelich(job.node_rank, hosts={job.hostname: resolved})
        meeting = planned_as(job, network=network, site=None).meeting
        assert meeting.connect_host == "10.10.0.1"
        text = "Name the network: mpirun" if job.node_rank else ""
        assert meeting.network_hint.startswith(text)
    for job in jobs_of(TWO_EACH_4, changes):
        network = juelich(job.node_rank, hosts={job.hostname: resolved})
        plan = partial(planned_as, job, network=network, site=None)
        if job.node_rank == 0:  # all of them are its own
            assert plan().meeting.connect_host == "10.10.0.1"
            continue
        text = f"10.10.0.1 and 10.20.0.1, and this node's name, {job.hostname}, "
        assert str(refused("HPC230", text, plan)).endswith(f". {HELP}")
        explicit = plan(environ=exported("10.20.0.1"))
        assert explicit.meeting.connect_host == "10.20.0.1"


def test_several_addresses_on_one_network():
    """They are rails of one machine, or aliases: each will do."""
    for job in jobs_of(TWO_EACH_4, {URI: "1.0;tcp://10.10.0.1,10.10.0.101:42367"})[2:]:
        network = juelich(1, hosts={job.hostname: "127.0.1.1"})
        plan = planned_as(job, network=network, site=None)
        assert plan.meeting.connect_host == "10.10.0.1"


def test_a_network_that_is_reached_by_a_route():
    """None of the addresses is in a network of this node."""
    shown = "192.0.2.2,198.51.100.1"
    routes = {"192.0.2.0/24": "10.10.0.2", "198.51.100.0/24": "10.20.0.2"}
    job = jobs_of("openmpi-4.1.4-3-nodes", {URI: f"1.0;tcp://{shown}:42367"})[1]
    for site, expected in ((None, "192.0.2.2"), (JSC, "198.51.100.1")):
        network = juelich(1, routes=routes)
        plan = planned_as(job, network=network, site=site)
        assert plan.meeting.connect_host == expected


def test_an_address_that_every_node_has():
    """A bridge for containers: for another node it is itself."""
    bridge = {"docker0": "172.17.0.1/16"}
    found = []
    for job in jobs_of(TWO_EACH_4, {URI: "1.0;tcp://172.17.0.1,10.10.0.1:42367"}):
        number = job.node_rank + 1
        network = juelich(
            interfaces={"lo": "127.0.0.1/8", "eth0": f"10.10.0.{number}/24"} | bridge
        )
        plan = planned_task(job, network=network, site=None)
        found.append(environment(plan)["MASTER_ADDR"])
    assert found[2:] == ["10.10.0.1"] * 2
    assert set(found[:2]) <= {"10.10.0.1", "172.17.0.1"}  # both are its own


def test_open_mpi_5_shows_a_name():
    assert masters(all_planned(TWO_EACH_5)) == {"10.20.0.1"}
    assert masters(all_planned(TWO_EACH_5, site=None)) == {"10.10.0.1"}


FROM_LOGIN = {
    "version 4, workers": (TWO_EACH_4, {URI: "1.0;tcp://10.10.0.254:58543"}),
    "version 5, workers": (TWO_EACH_5, {"PMIX_NAMESPACE": "prterun-login01-84@1"}),
    "version 4, agents": ("openmpi-4.1.4-3-nodes-from-login", {}),
    "version 5, agents": ("openmpi-5.0.11-3-nodes-from-login", {}),
}


@pytest.mark.parametrize(("name", "changes"), FROM_LOGIN.values(), ids=FROM_LOGIN)
def test_mpirun_on_a_login_node(name, changes):
    """Rank 0 sees that the others will look for it elsewhere, and speaks for all.

    The others cannot know better; mpirun ends them with rank 0.
    """
    first, *plans = all_planned(name, changes)
    assert first.startswith("HPC039 rank 0 is on jwb0001, but the other nodes will ")
    assert "where mpirun runs" in first
    assert "mpirun -x MASTER_ADDR=jwb0001 …" in first
    for job, plan in zip(jobs_of(name, changes)[1:], plans, strict=True):
        if job.node_rank == 0:
            continue
        if isinstance(plan, str):  # its name does not have to resolve here
            assert plan.startswith("HPC059 the head node's name login01")
        else:
            assert plan.meeting.connect_host == "10.10.0.254"


@pytest.mark.parametrize(("name", "changes"), FROM_LOGIN.values(), ids=FROM_LOGIN)
def test_mpirun_on_a_login_node_with_a_head(name, changes):
    plans = all_planned(name, changes, exported("jwb0001", "29500"), site=None)
    assert not [text for text in plans if isinstance(text, str)]
    assert {plan.meeting.connect_host for plan in plans} == {"10.10.0.1"}
    (port,) = {plan.meeting.ports[0] for plan in plans}
    assert port != 29500  # a port that perhaps some nodes do not know
    assert [plan.meeting.listen for plan in plans] == [
        ("10.10.0.1", port),
        *[None] * (len(plans) - 1),
    ]


# Without an answer of its process manager, Hydra's tasks know no name of a node.
@pytest.mark.parametrize("name", [TWO_EACH_5, "mpich-4.0.2-2-nodes-2-each"])
def test_a_wrong_head_that_was_exported_is_seen_by_rank_0(name):
    plans = all_planned(name, environ=exported("jwb0002"))
    assert plans[0].startswith("HPC039 rank 0 is on jwb0001")
    assert "MASTER_ADDR" in plans[0]


NO_HEAD = {
    "Hydra, workers": ("mpich-4.0.2-2-nodes-2-each", "export MASTER_ADDR=HOST"),
    "Hydra, agents": ("mpich-4.0.2-3-nodes", "pass --rdzv_endpoint=HOST:"),
    "Hydra, in turn": ("mpich-4.0.2-cyclic", "export MASTER_ADDR=HOST"),
}


@pytest.mark.parametrize(("name", "hint"), NO_HEAD.values(), ids=NO_HEAD)
def test_nobody_shows_a_head(name, hint):
    for text in all_planned(name):
        assert re.match("HPC038 Hydra gives [23] nodes ranks, but no names", text)
        assert "(PMI_SIZE)" in text
        assert hint in text


@pytest.mark.parametrize("case", NO_HEAD)
def test_a_head_that_was_exported_or_that_the_tasks_have_told_each_other(case):
    for address, how in (
        ("10.10.0.1", {"environ": exported("jwb0001"), "site": None}),
        ("10.20.0.1", {"exchange": Exchanged("jwb0001", "0badcafe")}),
    ):
        plans = all_planned(NO_HEAD[case][0], **how)
        assert {plan.meeting.connect_host for plan in plans} == {address}
        assert len({plan.meeting.ports[0] for plan in plans}) == 1


def test_a_bad_port_for_agents():
    environ = exported("jwb0001", "none")
    for text in all_planned("mpich-4.0.2-3-nodes", environ=environ):
        assert text.startswith("HPC014 MASTER_PORT=none is not a port")


@pytest.mark.parametrize("rank", range(3))
def test_where_a_scheduler_names_the_nodes_agents_do_not_look_at_it(rank):
    """Hooks of containers export old ones."""
    plan = make_plan(make_inputs(step(rank), environ=exported("jwb0003", "x")))
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(
    "name", [TWO_EACH_4, TWO_EACH_5, "openmpi-4.1.4-subset", "openmpi-5.0.11-subset"]
)
def test_mpirun_on_other_nodes_than_the_first_ones(name, first):
    """Slurm's list is then a wrong guess; rank 0 sees that it is elsewhere."""
    slurm = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "jwb000[1-3]"}
    environ, _ = recorded(name)[0]
    job = detected(Process(environ | slurm, THREE[first]))
    text = f"rank 0 is on {THREE[first]}, but the other nodes will look for it on"
    error = refused("HPC039", text, planned_as, job, network=juelich(first))
    assert "(SLURM_JOB_NODELIST). Let mpirun place it there" in str(error)
    assert not error.everywhere


def test_rank_0_is_told_to_be_on_another_node():
    """In an order of the user's own it may be on any; that it is, it sees itself."""
    job = replace(step(2, task=Task(0, 6, 0, 2)), listed_at=2)
    message = "rank 0 is on jwb0003, but the other nodes will"
    error = refused("HPC039", message, planned_task, job, environ=exported("jwb0001"))
    assert "export MASTER_ADDR=10.20.0." in str(error)


def test_value_of_a_master():
    plan = planned_at(BLOCK, 0, environ=exported("jwb0001"))
    source = (
        f"MASTER_ADDR=jwb0001:{PORT}, jwb0001i by site jsc, its address, "
        "port by hash of 19.0"
    )
    assert plan.environment["MASTER_ADDR"] == Setting("10.20.0.1", source)
