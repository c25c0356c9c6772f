"""Where the nodes meet, as each of them sees it."""

from __future__ import annotations

import pytest
from nodes import THREE, juelich
from plans import PORT, conf_of, planned, refused

from torchrun_hpc.errors import Message
from torchrun_hpc.variables import FAULT_HANDLER

# --- addresses ----------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(3))
def test_own_entry_in_hosts_is_loopback(rank):
    """Debian's 127.0.1.1 for the own name: the route to another node decides."""
    hosts = {THREE[rank]: "127.0.1.1"}
    plan = planned(rank, site=None, network=juelich(rank, hosts=hosts))
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.meeting.listen == (("10.10.0.1", PORT) if rank == 0 else None)
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert plan.messages.warnings == ()


def test_name_with_several_addresses():
    hosts = {"jwb0001i": "127.0.1.1 10.20.0.1 fd00::1 10.20.0.200"}
    plan = planned(0, network=juelich(0, hosts=hosts))
    assert plan.options["local_addr"].value == "10.20.0.1"
    assert plan.meeting.listen == ("10.20.0.1", PORT)
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
    assert plan[0].meeting.listen == ("10.20.0.1", PORT)
    endpoint = plan[1].options["rdzv_endpoint"].value
    assert endpoint in {f"10.20.0.1:{PORT}", f"jwb0001i:{PORT}"}


@pytest.mark.parametrize("rank", range(3))
def test_fast_name_that_does_not_resolve(rank):
    hosts = {"jwb0001i": "", "jwb0002i": "", "jwb0003i": ""}
    plan = planned(rank, network=juelich(rank, hosts=hosts))
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.meeting.endpoint == f"jwb0001:{PORT}"
    names = dict.fromkeys(["jwb0001", THREE[rank]])
    assert plan.messages.warnings == tuple(
        Message(
            "HPC056",
            f"{name}i does not resolve here, although site 'jsc' uses this name. Using "
            f"{name}. If this is not that site, pass --hpc-site=none",
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
    assert plan.environment.keys() == {"OMP_NUM_THREADS", FAULT_HANDLER}
    assert plan.options["local_addr"].value == f"{THREE[rank]}i"
    assert (plan.meeting.local_address, plan.meeting.listen) == (None, None)
    assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"
    assert conf_of(plan)["is_host"] == ("1" if rank == 0 else "0")
    (warning,) = plan.messages.warnings
    assert str(warning).startswith(f"HPC057 {THREE[rank]} has no known address")
    assert "listens on all interfaces" in warning.text


@pytest.mark.parametrize("known", ["127.0.1.1", "127.0.0.1 ::1"])
def test_head_node_reaches_itself_under_a_name_that_is_loopback(known):
    """Without a route to another node, too: its own store is there all the same."""
    nat = {"lo": "127.0.0.1/8", "eth0": "172.17.0.2/16"}
    hosts = {"jwb0001i": known}
    plan = planned(network=juelich(hosts=hosts, interfaces=nat))
    assert plan.options["rdzv_endpoint"].value == f"{known.split()[0]}:{PORT}"
    assert (plan.meeting.local_address, plan.meeting.listen) == (None, None)
    assert conf_of(plan)["is_host"] == "1"
    assert [warning.code for warning in plan.messages.warnings] == ["HPC057"]


def test_route_of_a_container_decides_where_names_do_not():
    own = {"lo": "127.0.0.1/8", "eth0": "172.17.0.2/16"}
    network = juelich(1, interfaces=own, routes={"10.20.0.0/24": "172.17.0.2"})
    plan = planned(1, network=network)
    assert plan.meeting.local_address == "172.17.0.2"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    (warning,) = plan.messages.warnings
    assert warning.code == "HPC136"
    assert warning.text.startswith("jwb0002i resolves to 10.20.0.2, which no interface")
    assert "The other nodes use 172.17.0.2." in warning.text


@pytest.mark.parametrize("down", ["ib0", "eth0"])
def test_an_interface_that_is_down(down):
    warnings = planned(1, network=juelich(1, down=(down,))).messages.warnings
    assert [w.code for w in warnings] == (["HPC165"] if down == "ib0" else [])
    if warnings:
        assert "interface ib0, which has 10.20.0.2, is down" in warnings[0].text


@pytest.mark.parametrize(
    ("known", "fault"),
    [("127.0.1.1", "resolves only to 127.0.1.1 here"), ("", "does not resolve here")],
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
