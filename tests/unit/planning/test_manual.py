"""The plan for several machines without a scheduler."""

from __future__ import annotations

import pytest

from tests.support.juelich import STEP, juelich
from tests.support.plans import planned, refused
from torchrun_hpc.reporting.console import is_reporter
from torchrun_hpc.variables import FAULT_HANDLER

# --- several nodes without a scheduler ----------------------------------------------


def test_the_same_line_with_its_rank_on_each_machine():
    options = {"nnodes": "2", "node_rank": 1, "master_addr": "10.10.10.11"}
    plan = planned(None, options=options)
    assert (plan.meeting.nodes, plan.meeting.node_rank, plan.options) == (2, 1, {})
    assert plan.meeting.endpoint == "10.10.10.11:29500"
    assert plan.messages.title == "no scheduler"
    assert plan.environment.keys() == {"OMP_NUM_THREADS", FAULT_HANDLER}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("host", "own", "interface"), [("jwb0001i", 20, "ib0"), ("jwb0001", 10, "eth0")]
)
def test_explicit_c10d_on_each_machine(rank, host, own, interface):
    options = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:1"}
    plan = planned(
        None, network=juelich(rank), options=options, hostname=f"jwb000{rank + 1}"
    )
    # Torch knows node 0 by its name; in the other network it has another one.
    is_told = rank == 0 and host == "jwb0001i"
    conf = plan.options.get("rdzv_conf")
    assert (conf and conf.value) == ("is_host=1" if is_told else None)
    assert plan.options["local_addr"].value == f"10.{own}.0.{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == interface
    assert plan.meeting.listen == ((f"10.{own}.0.1", 1) if is_told else None)
    assert is_reporter(plan.meeting.report_rank) is (rank == 0)


def test_explicit_static_on_each_machine_gets_the_interface():
    options = {"nnodes": "2", "node_rank": 1, "master_addr": "10.20.0.1"}
    plan = planned(None, network=juelich(1), options=options)
    assert plan.options == {}
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert (plan.meeting.interface, is_reporter(plan.meeting.report_rank)) == (
        "ib0",
        False,
    )


def test_static_node_0_is_on_another_machine():
    options = {"nnodes": "2", "master_addr": "jwb0001i"}
    (said,) = planned(None, network=juelich(1), options=options).messages.warnings
    assert said.code == "HPC137"
    assert "--master_addr=jwb0001i is not an address of this machine" in said.text
    assert planned(None, options=options).messages.warnings == ()


@pytest.mark.parametrize("explicit", [{}, {"node_rank": 1}, {"rdzv_backend": "c10d"}])
def test_several_nodes_and_nothing_that_says_which(explicit):
    options = {"nnodes": "2"} | explicit
    refused("HPC066", "--nnodes=2, but no scheduler's", planned, None, options=options)


def test_several_nodes_without_scheduler_and_a_name_that_does_not_resolve():
    options = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "nowhere:1"}
    message = "--rdzv_endpoint=nowhere:1 does not resolve here"
    refused("HPC067", message, planned, None, options=options)


def test_standalone_and_several_nodes():
    options = {"standalone": True, "nnodes": "2"}
    refused("HPC065", "--nnodes=2 and --standalone", planned, options=options)


@pytest.mark.parametrize("address", ["nonsense", "10.20.0.2"])
@pytest.mark.parametrize("job", [None, STEP])
def test_an_explicit_local_address_of_another_node(address, job):
    text = f"--local_addr={address} is not an address of this node"
    error = refused("HPC052", text, planned, job, options={"local_addr": address})
    assert "10.20.0.1" in str(error)
    assert not error.everywhere


def test_suspicion_of_a_node_rank_that_is_0_everywhere():
    plan = planned(options={"node_rank": 0})
    assert plan.meeting.hint == "is --node_rank=0 set on every node?"
    assert "node_rank" not in planned().meeting.hint


def test_head_whose_fast_name_resolves_elsewhere_only_takes_what_comes():
    network = juelich(0, hosts={"jwb0001i": ""})
    assert planned(network=network).meeting.listen is None
