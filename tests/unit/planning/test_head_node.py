"""The head node by name, and as each node sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.juelich import ALIASES, THREE, juelich, step
from tests.support.networks import make_network
from tests.support.plans import PORT, conf_of, planned, refused
from torchrun_hpc.errors import Message
from torchrun_hpc.planning import head_node
from torchrun_hpc.variables import FAULT_HANDLER

# --- explicit endpoints ---------------------------------------------------------------


# The endpoint, as a person reads it, as torch gets it, and the node that hosts it.
ENDPOINTS = [
    # names of node 0
    ("jwb0001:29400", "jwb0001i:29400", "10.20.0.1:29400", 0),
    ("jwb0001i:29400", "jwb0001i:29400", "10.20.0.1:29400", 0),
    ("jwb0001.juwels:29400", "jwb0001i.juwels:29400", "10.20.0.1:29400", 0),
    ("jwb0001i.juwels:29400", "jwb0001i.juwels:29400", "10.20.0.1:29400", 0),
    (" jwb0001i:29400 ", "jwb0001i:29400", "10.20.0.1:29400", 0),
    # without a port
    ("jwb0001", f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0),
    ("jwb0001i", f"jwb0001i:{PORT}", f"10.20.0.1:{PORT}", 0),
    ("10.20.0.1", f"10.20.0.1:{PORT}", f"10.20.0.1:{PORT}", 0),
    # an address stays, even on the slow network
    ("10.20.0.1:29400", "10.20.0.1:29400", "10.20.0.1:29400", 0),
    ("10.10.0.1:29400", "10.10.0.1:29400", "10.10.0.1:29400", 0),
    ("10.10.0.3:29400", "10.10.0.3:29400", "10.10.0.3:29400", 2),
    # the named node hosts
    ("jwb0003:29400", "jwb0003i:29400", "10.20.0.3:29400", 2),
    ("jwb0003i:29400", "jwb0003i:29400", "10.20.0.3:29400", 2),
    # no node has the name: the owner of the address hosts
    ("head:29400", "head:29400", "10.20.0.1:29400", 0),
    ("second:29400", "second:29400", "10.20.0.2:29400", 1),
    ("second-slow:29400", "second-slow:29400", "10.10.0.2:29400", 1),
    # no node has the address: node 0 hosts
    ("vip:29400", "vip:29400", "10.20.0.99:29400", 0),
    ("10.20.0.99:1", "10.20.0.99:1", "10.20.0.99:1", 0),
    ("10.20.0.99:65535", "10.20.0.99:65535", "10.20.0.99:65535", 0),
]


@pytest.mark.parametrize(("endpoint", "shown", "number", "host"), ENDPOINTS)
def test_an_explicit_endpoint(endpoint, shown, number, host):
    options = {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    plans = [
        planned(step(rank), options=options, network=juelich(rank, hosts=ALIASES))
        for rank in range(3)
    ]
    meetings = [plan.meeting for plan in plans]
    assert {each.endpoint for each in meetings} == {shown}
    assert {plan.options["rdzv_endpoint"].value for plan in plans} == {number}
    is_host = [rank == host for rank in range(3)]
    assert [conf_of(plan)["is_host"] == "1" for plan in plans] == is_host
    assert [each.is_coordinator for each in meetings] == is_host
    address, _, port = number.rpartition(":")
    listens = None if "99" in address else (address, int(port))
    assert [each.listen for each in meetings] == [
        listens if hosts else None for hosts in is_host
    ]
    # If no node has the name, only the owner of the address knows that it hosts.
    assert {each.coordinator for each in meetings} <= {None, host}
    assert {each.connect_host for each in meetings} == {address}
    # An explicit port is the only one.
    ports = head_node.ports_of("19.0")[0] if int(port) == PORT else (int(port),)
    assert {each.ports for each in meetings} == {ports}
    (notes,) = {plan.messages.notes for plan in plans}
    is_rewritten = shown.partition(":")[0] != endpoint.strip().partition(":")[0]
    assert bool(notes) is is_rewritten


def test_rewriting_an_explicit_name_is_announced():
    plan = planned(options={"rdzv_endpoint": "jwb0001:29400"})
    text = "jwb0001 rewritten to jwb0001i (site jsc)"
    assert plan.messages.notes == (Message("HPC074", text),)


@pytest.mark.parametrize("rank", range(3))
def test_without_a_site_an_explicit_name_stays(rank):
    plan = planned(step(rank), site=None, options={"rdzv_endpoint": "jwb0001:29400"})
    assert plan.options["rdzv_endpoint"].value == "10.10.0.1:29400"
    assert plan.messages.notes == ()


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
        step(rank, nodes=("n1", "n2")),
        site=None,
        options={"rdzv_endpoint": endpoint},
        network=network,
    )
    port = 29400 if endpoint.endswith(":29400") else PORT
    assert plan.options["rdzv_endpoint"].value == f"[fd00::1]:{port}"
    assert plan.options["local_addr"].value == f"fd00::{rank + 1}"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"
    assert plan.meeting.listen == (("fd00::1", port) if rank == 0 else None)
    assert conf_of(plan)["is_host"] == "10"[rank]


NO_ENDPOINT = {
    "jwb0001:0": ("HPC051", "port 0 means a random port"),
    "10.20.0.1:0": ("HPC051", "port 0 means a random port"),
    "nonsense:29400": (
        "HPC059",
        "nonsense (--rdzv_endpoint=nonsense:29400) does not resolve here",
    ),
    "loop:29400": (
        "HPC059",
        "loop (--rdzv_endpoint=loop:29400) resolves only to 127.0.1.1 here",
    ),
    "127.0.0.1:29400": ("HPC059", "resolves only to 127.0.0.1 here"),
    "[::1]:29400": ("HPC059", "resolves only to ::1 here"),
    "0.0.0.0:29400": ("HPC059", "resolves only to 0.0.0.0 here"),
}


@pytest.mark.parametrize("endpoint", NO_ENDPOINT)
def test_endpoint_that_cannot_work(endpoint):
    for rank in 0, 1:
        error = refused(
            *NO_ENDPOINT[endpoint],
            planned,
            step(rank),
            options={"rdzv_endpoint": endpoint},
            network=juelich(rank, hosts={"loop": "127.0.1.1"}),
        )
        assert f"--rdzv_endpoint={endpoint}" in str(error), rank
        assert error.everywhere, rank


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_master_port_that_cannot_work(backend):
    options = {"rdzv_backend": backend, "master_port": 0}
    assert refused("HPC051", "--master_port=0", planned, options=options).everywhere


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
def test_the_option_with_port_0_is_named(options, named, proposed):
    error = refused("HPC051", f"--{named}: port 0 means", planned, options=options)
    assert str(error).endswith(f"pass one: --rdzv_endpoint={proposed}:29400")


@pytest.mark.parametrize("rank", range(2))
def test_file_store_has_a_path_for_an_endpoint(rank):
    options = {
        "rdzv_backend": "c10d",
        "rdzv_conf": "store_type=file",
        "rdzv_endpoint": "/scratch/rendezvous",
    }
    plan = planned(step(rank), options=options)
    assert plan.options.keys() == {"nnodes", "rdzv_id", "local_addr", "node_rank"}
    assert plan.meeting.endpoint == "/scratch/rendezvous"
    assert plan.meeting.listen is None
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "ib0"


# --- ports --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch_id", "ports"),
    [
        # 20000 + the first 64 bits that sha256sum prints, modulo 9000; then of "19.0 1"
        # and so on
        ("19.0", (25592, 25875, 27324, 24349, 27631, 26166, 21124, 26447)),
        ("123456_7.0-r1", (27106, 22904, 24784, 22369, 23448, 27470, 20122, 24018)),
        ("123456.0", (26058,)),
        ("26_0.0", (22331,)),
        ("26_1.0", (23060,)),
    ],
)
def test_ports_are_stable(launch_id, ports):
    assert head_node.ports_of(launch_id)[0][: len(ports)] == ports


@given(st.text("0123456789._-r", min_size=1))
def test_ports_are_some_and_differ(launch_id):
    ports, notices = head_node.ports_of(launch_id)
    assert ports[0] == head_node.port_of(launch_id)
    assert 5 <= len(ports) == len(set(ports)) <= 8
    assert 1 <= len(notices) <= 4
    assert len({*ports, *notices}) == len(ports) + len(notices)
    assert all(20000 <= port <= 28999 for port in ports + notices)


def test_jobs_that_share_their_first_port_do_not_share_the_others():
    by_first: dict[int, list[set[int]]] = {}
    for job in range(3000):
        ports, _ = head_node.ports_of(f"{job}.0")
        by_first.setdefault(ports[0], []).append(set(ports[1:]))
    shared = [others for others in by_first.values() if len(others) > 1]
    assert len(shared) > 300
    assert not [1 for first, second, *_ in shared if first == second]


def test_ports_spread():
    ports = {head_node.port_of(f"{job}.0") for job in range(1000)}
    # 1000 of 9000 drawn at random: 946 different ones are expected.
    assert len(ports) > 900
    assert min(ports) < 20100
    assert max(ports) > 28900


def test_two_steps_of_a_job_do_not_meet():
    plan = [planned(replace(step(), launch_id=f"19.{number}")) for number in range(2)]
    assert len({m.options["rdzv_id"].value for m in plan}) == 2
    assert len({m.meeting.listen for m in plan}) == 2
    assert set(plan[0].meeting.ports).isdisjoint(plan[1].meeting.ports)


# --- addresses ----------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(3))
def test_own_entry_in_hosts_is_loopback(rank):
    """Debian's 127.0.1.1 for the own name: the route to another node decides."""
    hosts = {THREE[rank]: "127.0.1.1"}
    plan = planned(step(rank), site=None, network=juelich(rank, hosts=hosts))
    assert plan.options["local_addr"].value == f"10.10.0.{rank + 1}"
    assert plan.options["rdzv_endpoint"].value == f"10.10.0.1:{PORT}"
    assert plan.meeting.listen == (("10.10.0.1", PORT) if rank == 0 else None)
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert plan.messages.warnings == ()


def test_name_with_several_addresses():
    hosts = {"jwb0001i": "127.0.1.1 10.20.0.1 fd00::1 10.20.0.200"}
    plan = planned(network=juelich(0, hosts=hosts))
    assert plan.options["local_addr"].value == "10.20.0.1"
    assert plan.meeting.listen == ("10.20.0.1", PORT)
    other = planned(step(1), network=juelich(1, hosts=hosts))
    assert other.options["rdzv_endpoint"].value == f"jwb0001i:{PORT}"


def test_name_with_an_address_of_each_family():
    hosts = {"jwb0001i": "fd00::1 10.20.0.1"}
    for rank in range(2):
        plan = planned(step(rank), network=juelich(rank, hosts=hosts))
        assert plan.options["rdzv_endpoint"].value == f"10.20.0.1:{PORT}"


def test_name_with_an_address_that_its_node_does_not_have():
    """All must meet where the head node listens, or be left to try each address."""
    hosts = {"jwb0001i": "10.19.0.7 10.20.0.1"}
    plan = [
        planned(step(rank), network=juelich(rank, hosts=hosts)) for rank in range(2)
    ]
    assert plan[0].meeting.listen == ("10.20.0.1", PORT)
    endpoint = plan[1].options["rdzv_endpoint"].value
    assert endpoint in {f"10.20.0.1:{PORT}", f"jwb0001i:{PORT}"}


@pytest.mark.parametrize("rank", range(3))
def test_fast_name_that_does_not_resolve(rank):
    hosts = {"jwb0001i": "", "jwb0002i": "", "jwb0003i": ""}
    plan = planned(step(rank), network=juelich(rank, hosts=hosts))
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


def test_an_explicit_name_whose_fast_name_does_not_resolve():
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
    plan = planned(step(rank), network=juelich(rank, interfaces=nat))
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
    """Its own store is on this node, even without a route to another node."""
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
    plan = planned(step(1), network=network)
    assert plan.meeting.local_address == "172.17.0.2"
    assert plan.environment["GLOO_SOCKET_IFNAME"].value == "eth0"
    (warning,) = plan.messages.warnings
    assert warning.code == "HPC136"
    assert warning.text.startswith("jwb0002i resolves to 10.20.0.2, which no interface")
    assert "The other nodes use 172.17.0.2." in warning.text


@pytest.mark.parametrize("down", ["ib0", "eth0"])
def test_an_interface_that_is_down(down):
    warnings = planned(step(1), network=juelich(1, down=(down,))).messages.warnings
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
        planned,
        step(1),
        site=None,
        network=juelich(1, hosts={"jwb0001": known}),
    )
    assert f"--rdzv_endpoint=HOST:{PORT}" in str(error)
    assert not error.everywhere
