from __future__ import annotations

import ipaddress
import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from tests.support.networks import make_network
from tests.support.patience import PATIENCE
from torchrun_hpc.host import procfs
from torchrun_hpc.host.network import (
    bound_socket,
    local_ports,
    port_holder,
    port_problem,
    reserved_ports,
    resolve,
    source_toward,
    this_node,
)
from torchrun_hpc.schedulers.job import same_host

ip = ipaddress.ip_address


# --- addresses ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
        ("127.0.1.1", ""),
        ("127.0.1.1 10.0.0.1", "10.0.0.1"),
        ("::1 fd00::1", "fd00::1"),
        ("169.254.3.4 fe80::1 10.0.0.1", "10.0.0.1"),
        ("0.0.0.0 :: 224.0.0.1 ff02::1", ""),
        ("10.0.0.1 10.0.0.1", "10.0.0.1"),
        # by number, not by text
        ("10.0.0.10 10.0.0.9", "10.0.0.9 10.0.0.10"),
        ("10.0.0.9 10.0.0.10", "10.0.0.9 10.0.0.10"),
        # IPv4 first, although its number may be the higher
        ("fd00::1 10.0.0.1", "10.0.0.1 fd00::1"),
        ("::2 10.0.0.1", "10.0.0.1 ::2"),
    ],
)
def test_addresses_of_a_name(known, expected):
    node = make_network({}, {"n1": known})
    assert node.addresses_of("n1") == tuple(map(ip, expected.split()))


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("10.0.0.1", "eth0"),
        ("10.0.1.1", "eth0"),
        ("10.2.0.1", "ib0"),
        ("fd00::1", "ib0"),
        ("10.0.0.2", None),  # in a network of ours, but not ours
        ("fd00::2", None),
        ("127.0.0.1", "lo"),
    ],
)
def test_owner_of_an_address(address, owner):
    node = make_network(
        {
            "lo": "127.0.0.1/8",
            "eth0": "10.0.0.1/24 10.0.1.1/24",
            "ib0": "10.2.0.1/16 fd00::1/64",
        }
    )
    found = node.owner(ip(address))
    assert (found and found.name) == owner


def test_nothing_has_no_owner():
    assert make_network({"eth0": "10.0.0.1/24"}).owner(None) is None


@pytest.mark.parametrize(
    ("known", "own"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.2", None),
        ("10.0.0.2 10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", None),
        ("127.0.1.1 fd00::1", "fd00::1"),
        ("fd00::1 10.0.0.1", "10.0.0.1"),
        ("10.2.0.1 10.0.0.1", "10.0.0.1"),
        ("", None),
    ],
)
def test_own_address(known, own):
    node = make_network(
        {"lo": "127.0.0.1/8 ::1/128", "eth0": "10.0.0.1/24 10.2.0.1/24 fd00::1/64"},
        {"n1": known},
    )
    assert node.own_address("n1") == (own and ip(own))


@pytest.mark.parametrize(
    ("other", "routes", "expected"),
    [
        ("10.0.0.9", {}, "10.0.0.1"),
        ("10.9.0.9", {}, None),
        ("10.9.0.9", {"10.9.0.0/16": "10.0.0.1"}, "10.0.0.1"),
        ("10.9.0.9", {"10.9.0.0/16": "10.0.0.7"}, None),  # nobody's
        ("127.0.0.1", {}, None),
        ("fe80::9", {}, None),
        ("fd00::9", {}, "fd00::1"),
    ],
)
def test_address_toward_another_node(other, routes, expected):
    node = make_network(
        {"lo": "127.0.0.1/8", "eth0": "10.0.0.1/24 fd00::1/64 fe80::1/64"},
        routes=routes,
    )
    assert node.address_toward(ip(other)) == (expected and ip(expected))


# --- siblings -----------------------------------------------------------------------

RAILS = {f"hsn{number}": f"10.4.0.{number + 1}/16" for number in range(4)}
RAILS_OF_IPV6 = {"hsn0": "fd00::1/64", "hsn1": "fd00::2/64", "hsn2": "fd01::3/64"}
TWO_NETWORKS = {"eth0": "10.0.0.1/24 10.7.0.1/24", "eth1": "10.7.0.2/24"}
VLAN = {"ib0": "10.2.0.1/24", "ib0.8001": "10.2.0.9/24"}
VLAN_OF_A_BOND = {"bond0": "10.2.0.1/24", "bond0.2093": "10.2.0.9/24"}
ELSEWHERE = VLAN_OF_A_BOND | {"bond0": "10.1.0.1/24"}
LABEL = {"eth0": "10.0.0.1/24", "eth0:1": "10.0.0.9/24"}


@pytest.mark.parametrize(
    ("interfaces", "down", "address", "expected"),
    [
        (RAILS, [], "10.4.0.1", "hsn0 hsn1 hsn2 hsn3"),
        (RAILS, [], "10.4.0.3", "hsn0 hsn1 hsn2 hsn3"),
        (RAILS, ["hsn2"], "10.4.0.1", "hsn0 hsn1 hsn3"),
        (RAILS, ["hsn0"], "10.4.0.1", "hsn0 hsn1 hsn2 hsn3"),  # it has the address
        (RAILS | {"hsn4": ""}, [], "10.4.0.1", "hsn0 hsn1 hsn2 hsn3"),
        ({"eth0": "10.0.0.1/24", "eth1": "10.1.0.1/24"}, [], "10.0.0.1", "eth0"),
        # the chosen address says in which network
        (TWO_NETWORKS, [], "10.0.0.1", "eth0"),
        (TWO_NETWORKS, [], "10.7.0.1", "eth0 eth1"),
        ({"eth0": "10.0.0.1/24", "eth1": "10.0.0.2/16"}, [], "10.0.0.1", "eth0"),
        ({"eth0": "10.0.0.1/24", "ens0": "10.0.0.2/24"}, [], "10.0.0.1", "eth0"),
        ({"eth0": "10.0.0.1/24", "neth0": "10.0.0.2/24"}, [], "10.0.0.1", "eth0"),
        # VLANs and labels are no rails
        (VLAN, [], "10.2.0.1", "ib0"),
        (VLAN, [], "10.2.0.9", "ib0.8001"),
        (VLAN_OF_A_BOND, [], "10.2.0.1", "bond0"),
        (ELSEWHERE, [], "10.2.0.9", "bond0.2093"),
        (LABEL, [], "10.0.0.1", "eth0"),
        (LABEL, [], "10.0.0.9", "eth0:1"),
        # a stem that is a regular expression
        ({"e.0": "10.0.0.1/24", "ex0": "10.0.0.2/24"}, [], "10.0.0.1", "e.0"),
        (RAILS_OF_IPV6, [], "fd00::1", "hsn0 hsn1"),
    ],
)
def test_siblings(interfaces, down, address, expected):
    node = make_network(interfaces, down=down)
    owner = node.owner(ip(address))
    assert owner is not None
    found = node.siblings(owner, ip(address))
    assert [interface.name for interface in found] == expected.split()


# --- names --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("n1", "n1", True),
        ("n1", "n2", False),
        ("n1", "n10", False),
        ("n1", "n1i", False),
        ("n1", "", False),
        # with or without the domain
        ("n1", "n1.cluster", True),
        ("n1.cluster", "n1.cluster", True),
        ("n1.cluster", "n1.other", False),
        ("n1.cluster", "n1.cluster.example", False),
        ("n1", "n2.n1", False),
    ],
)
def test_same_host(one, other, same):
    assert same_host(one, other) is same
    assert same_host(other, one) is same


# --- this machine -------------------------------------------------------------------


@pytest.fixture
def listening():
    with bound_socket("127.0.0.1", 0) as opened:
        opened.listen()
        yield opened.getsockname()[1]


def test_this_node_has_a_loopback_interface():
    node = this_node()
    owner = node.owner(ip("127.0.0.1"))
    assert owner is not None
    assert owner.name == "lo"
    assert ipaddress.ip_interface("127.0.0.1/8") in owner.addresses
    assert owner.up


def test_this_node_lists_what_psutil_lists():
    names = [interface.name for interface in this_node().interfaces]
    assert names == list(psutil.net_if_addrs())


def test_what_the_driver_of_an_interface_says(monkeypatch):
    state = SimpleNamespace(isup=False, mtu=4092, speed=200000)
    entry = SimpleNamespace(family=socket.AF_INET, address="10.20.0.1", netmask=None)
    entries = {name: [entry] for name in ("ib0", "ib0:1", "unknown")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"ib0": state})
    found = [(each.up, each.mtu, each.speed_mbit) for each in this_node().interfaces]
    assert found == [(False, 4092, 200000), (False, 4092, 200000), (True, 0, 0)]


def test_this_node_resolves_and_routes():
    node = this_node()
    assert ip("127.0.0.1") in node.resolve("127.0.0.1")
    assert node.source_toward(ip("127.0.0.1")) == ip("127.0.0.1")


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "127.0.1.1"])
def test_a_number_resolves_to_itself(host):
    assert resolve(host) == (ip(host),)


def test_localhost_resolves():
    assert set(resolve("localhost")) & {ip("127.0.0.1"), ip("::1")}


@pytest.mark.parametrize(
    "host",
    ["", "a..b", "x" * 64, "a b", "10.0.0.256", "fd00::1::2", "\u2028", "no\nde"],
)
def test_nonsense_does_not_resolve(host):
    assert resolve(host) == ()


def test_no_source_toward_where_no_route_is():
    # Broadcasting is refused to a socket that has not asked for it.
    assert source_toward(ip("255.255.255.255")) is None


def test_listener_listens_on_one_address(listening):
    with socket.create_connection(("127.0.0.1", listening), timeout=PATIENCE) as client:
        assert client.getpeername() == ("127.0.0.1", listening)
    assert not port_problem("127.0.0.2", listening)


def test_listener_on_ipv6():
    try:
        with bound_socket("::1", 0) as opened:
            opened.listen()
            assert opened.family is socket.AF_INET6
            assert opened.getsockname()[0] == "::1"
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_listener_refuses_what_is_taken(listening):
    with pytest.raises(OSError, match="in use"):
        bound_socket("127.0.0.1", listening)


def test_port_problem_until_it_is_free(listening):
    """On an address where nobody else can take it: it is held on the other one."""
    with bound_socket("127.0.0.2", listening) as opened:
        opened.listen()
        assert port_problem("127.0.0.2", listening)
    assert not port_problem("127.0.0.2", listening)


def test_port_on_an_address_of_another_node():
    problem = port_problem("203.0.113.77", 28999)  # an address for documentation
    assert problem == "Cannot assign requested address"


def test_holder_of_a_port_is_named(listening):
    me = psutil.Process()
    holder = port_holder(listening)
    assert holder == f"{me.name()} (pid {os.getpid()}, {me.username()})"


def test_holder_of_a_port_where_nobody_listens():
    with bound_socket("127.0.0.1", 0) as opened:
        port = opened.getsockname()[1]
        assert port_holder(port) == "a program of another user"


# --- ports of the system --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("32768\t60999\n", (32768, 60999)),
        ("1024 65535", (1024, 65535)),
        (None, (0, 0)),  # there is no such file
        *(
            (bad, (0, 0))
            for bad in ("", "32768", "1 2 3", "a b", "-1 5", "1 " + "9" * 9)
        ),
    ],
)
def test_ports_that_connections_get(text, ports, monkeypatch):
    monkeypatch.setattr(procfs, "read", lambda _: text)
    assert local_ports() == ports


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("\n", ""),
        ("8080,20000-20010\n", "8080,20000-20010"),
        (None, ""),
        ("all of them", ""),
        ("1\n2", ""),
    ],
)
def test_ports_that_are_reserved(text, ports, monkeypatch):
    monkeypatch.setattr(procfs, "read", lambda _: text)
    assert reserved_ports() == ports
