"""What is between two nodes, on loopback: figures, and who does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from loopback import key_of
from waiting import PATIENCE, until

from torchrun_hpc import wire
from torchrun_hpc.doctor import link
from torchrun_hpc.doctor.link import Links, Peer
from torchrun_hpc.rendezvous.proof import UnprovedError

MTU = 65536
KEY = key_of(b"ours")


@contextlib.contextmanager
def nodes_at(address):
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(contextlib.closing(Links(KEY, address)))
            for _ in range(2)
        ]
        yield [
            (links, Peer(rank, address, links.port, MTU))
            for rank, links in enumerate(found)
        ]


@pytest.fixture
def nodes():
    with nodes_at("127.0.0.1") as found:
        yield found


def peers_with(nodes, **changes):
    return [(links, replace(peer, **changes)) for links, peer in nodes]


def measure(nodes, turn="0", seen=None, **options):
    """Let both nodes measure; return what the first one finds.

    `seen` has how each node sees the other.
    """
    (first, here), (second, there) = nodes
    to_second, to_first = seen or (there, here)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(second.measure, there, to_first, turn, **options)
        found = first.measure(here, to_second, turn, **options)
        assert following.result(PATIENCE) is None
    return found


def test_figures(nodes):
    for turn in "01":
        found = measure(nodes, turn)
        assert (found["first"], found["second"], found["problem"]) == (0, 1, "")
        assert found["latency_s"] > 0
        assert min(found["forward"], found["backward"]) > 1e6
        assert abs(found["clock_s"]) <= found["latency_s"]  # it is the same clock
        assert (found["lost_mtu"], found["networks"]) == (0, {})
        assert 0 <= found["lost"] < 0.1  # a busy machine sends some again in vain


def test_more_files_than_select_takes(nodes):
    """Node 0 of a large job has a connection to each task."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= high < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (high, high))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [os.dup(null) for _ in range(1100)]
    try:
        assert measure(nodes)["problem"] == ""
    finally:
        for file in (null, *many):
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


@pytest.fixture
def is_checked(monkeypatch):
    """Let nodes look early whether a late one is alive; return the event of it."""
    found = threading.Event()
    has_arrived, wait_for = link._Channel.has_arrived, Links._wait_for
    check = Links._check_alive

    def arrived_early(self, timeout=0):
        return has_arrived(self, min(timeout, 0.01))

    def wait_less(self, rank, purpose, timeout, instead=None):
        return wait_for(self, rank, purpose, min(timeout, 0.01), instead)

    def check_alive(self, own, other):
        check(self, own, other)
        monkeypatch.setattr(Links, "_wait_for", wait_for)
        found.set()

    monkeypatch.setattr(link, "_OPEN_TIMEOUT", PATIENCE)
    monkeypatch.setattr(link._Channel, "has_arrived", arrived_early)
    monkeypatch.setattr(Links, "_wait_for", wait_less)
    monkeypatch.setattr(Links, "_check_alive", check_alive)
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_that_is_late_is_waited_for(nodes, is_checked, late):
    """As long as it is alive: it may have waited for another one."""
    measures = [
        partial(links.measure, own, nodes[1 - rank][1], "0")
        for rank, (links, own) in enumerate(nodes)
    ]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(measures[1 - late])
        assert is_checked.wait(PATIENCE)
        found = measures[late](), waiting.result(PATIENCE)
    assert found[late]["problem"] == ""


def test_nobody_is_there(nodes, monkeypatch):
    monkeypatch.setattr(link, "_BLOCKED_TIMEOUT", 0.1)
    (first, here), (second, there) = nodes
    second.close()
    found = first.measure(here, there, "0")
    assert found["problem"] == "Connection refused"
    assert found["blocked"] == [0, 1]


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_firewall_in_one_direction(nodes, blocked, monkeypatch):
    """Of which this port, on which nobody listens, has to do the work."""
    monkeypatch.setattr(link, "_BLOCKED_TIMEOUT", 2)
    seen = [peer for _, peer in reversed(nodes)]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        seen[blocked] = replace(seen[blocked], port=closed.getsockname()[1])
        found = measure(nodes, seen=seen)
    assert (found["problem"], found["blocked"]) == ("Connection refused", [blocked])


def test_a_node_that_hangs_in_the_middle(nodes, monkeypatch):
    """Its system accepts connections; it says nothing."""
    monkeypatch.setattr(link, "_OPEN_TIMEOUT", 0.2)
    monkeypatch.setattr(link, "_MESSAGE_TIMEOUT", 0.2)
    (first, here), _ = nodes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = Peer(1, "127.0.0.1", silent.getsockname()[1], MTU)
        found = first.measure(here, hangs, "0")
    assert "does not answer" in found["problem"]


def stranger_at(nodes, stack, sent=b""):
    """Connect to the first node, as anybody can."""
    (first, _), _ = nodes
    there = ("127.0.0.1", first.port)
    connection = stack.enter_context(socket.create_connection(there, PATIENCE))
    connection.sendall(sent)
    return connection


def ends(connection):
    """Wait for the end of a connection; return what came before."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(100)
    return b""


def request_of(purpose="0", rank=1):
    return {"rank": rank, "for": purpose}


HELLO = b'{"hello":true}\n'


def says(connection, request, key=KEY):
    """Send a request, and prove who sends it; return the answer."""
    steps = key.secret.call(connection.getpeername(), request)
    connection.sendall(wire.to_line(next(steps)))
    connection.sendall(wire.to_line(steps.send(wire.from_json(connection.recv(500)))))
    return ends(connection)


def greeted(nodes, stack, **request):
    """Connect as another node; return the connection."""
    connection = stranger_at(nodes, stack)
    assert says(connection, request_of(**request)) == HELLO
    return connection


@contextlib.contextmanager
def alone(nodes):
    """Connect before and after, and see that both connections are kept."""
    with contextlib.ExitStack() as stack:
        greeted(nodes, stack, purpose="before")
        yield stranger_at(nodes, stack)
        greeted(nodes, stack, purpose="after")
        (first, _), _ = nodes
        until(lambda: set(first._arrived) == {(1, "before"), (1, "after")})


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n" + bytes(range(256)),  # TLS
        b"\xff\xfe\n",
        b"\n",
        b"[]\n",
        b"null\n",
        b"[" * 4000 + b"\n",
        b"9" * 4090 + b"\n",
        b"{}\n",
        b"x" * 5000,
        *(
            b'{"nonce":"0","request":"0","to":' + b"[" * depth + b"]" * depth + b"}\n"
            for depth in (10, 480, 900, 1900)
        ),
    ],
)
def test_what_an_unknown_peer_sends_ends_its_connection_alone(nodes, sent):
    with alone(nodes) as stranger:
        stranger.sendall(sent)
        assert ends(stranger) == b""


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": rank} for rank in ("x", None, [1], True)),
        *({"for": purpose} for purpose in (0, None, [])),
    ],
)
def test_what_another_node_sends_ends_its_connection_alone(nodes, wrong):
    with alone(nodes) as stranger:
        assert says(stranger, request_of() | wrong) == b""


@pytest.mark.parametrize("key", [b"theirs", b""])
def test_who_has_another_key_or_none_is_no_node_of_the_launch(nodes, key):
    with alone(nodes) as stranger, pytest.raises(UnprovedError):
        says(stranger, request_of(), key_of(key))


@pytest.mark.parametrize("sent", [b"", b'{"job"'])
def test_an_unknown_peer_that_ends_its_connection(nodes, sent):
    with contextlib.ExitStack() as stack:
        stranger = stranger_at(nodes, stack, sent)
        stranger.shutdown(socket.SHUT_WR)
        assert ends(stranger) == b""


def test_a_first_line_has_one_deadline(nodes, monkeypatch):
    """Whatever number of bytes arrives before it."""
    monkeypatch.setattr(link, "_OPEN_TIMEOUT", 0.3)
    with contextlib.ExitStack() as stack:
        silent, slow = (stranger_at(nodes, stack) for _ in range(2))
        slow.settimeout(0.05)
        for _ in range(4000):  # the length of a line ends it later
            try:
                slow.sendall(b"{")
                assert slow.recv(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            break
        else:
            pytest.fail("it is held as long as it sends")
        assert ends(silent) == b""


class Slow:
    """A connection of a program that sends a byte each second, and its clock."""

    def __init__(self):
        self.now = 0.0

    def setsockopt(self, *_):
        """Take any option."""

    def settimeout(self, _):
        """Take any limit of a single byte."""

    def recv(self, _):
        self.now += 1
        assert self.now < 100, "it is read as long as it sends"
        return b"{"

    def monotonic(self):
        return self.now


def test_an_answer_has_one_deadline(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(link, "time", slow)
    with pytest.raises(TimeoutError):
        link._Channel(slow).receive(3)
    assert slow.now == 3


def test_idle_connections_cost_no_threads_and_keep_nobody_out(nodes, monkeypatch):
    monkeypatch.setattr(link, "_OPEN_TIMEOUT", PATIENCE)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        idle = [stranger_at(nodes, stack) for _ in range(500)]
        greeted(nodes, stack)
        assert threading.active_count() <= threads
        for connection in idle[: 500 - link._UNKNOWN_PEERS]:
            assert ends(connection) == b""
        # The newest are kept.
        assert says(idle[-1], request_of("later")) == HELLO


def test_a_newer_connection_takes_the_place_of_an_older_one(nodes):
    with contextlib.ExitStack() as stack:
        there = [greeted(nodes, stack, purpose="a") for _ in range(3)]
        other = greeted(nodes, stack, purpose="b")
        assert [ends(connection) for connection in there[:2]] == [b"", b""]
        (first, _), _ = nodes
        until(lambda: len(first._arrived) == 2)
        with first._changed:
            kept = list(first._arrived.values())
        for connection in (there[2], other):
            connection.sendall(b'{"n": 1}\n')
        assert [channel.receive(PATIENCE) for channel in kept] == [{"n": 1}] * 2


def test_known_peers_are_kept_up_to_a_number(nodes, monkeypatch):
    monkeypatch.setattr(link, "_KNOWN_PEERS", 3)
    with contextlib.ExitStack() as stack:
        there = [greeted(nodes, stack, rank=rank) for rank in range(5)]
        assert [ends(connection) for connection in there[:2]] == [b"", b""]
        (first, _), _ = nodes
        until(lambda: set(first._arrived) == {(2, "0"), (3, "0"), (4, "0")})


def test_a_connection_that_cannot_be_accepted(nodes, monkeypatch):
    """It is greeted as soon as a file is left for it."""
    accept, errors = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def accept_later(listening):
        if errors:
            raise OSError(errors.pop(), "not now")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with contextlib.ExitStack() as stack:
        greeted(nodes, stack)
    assert not errors


def test_large_packets_that_are_lost(nodes, monkeypatch):
    """Bytes would be lost, too, and are not sent."""
    exchange = link._exchange_packets

    def small_only(packets, host, port, _size):
        exchange(packets, host, port, 1000)

    monkeypatch.setattr(link, "_exchange_packets", small_only)
    found = measure(nodes)
    assert (found["lost_mtu"], found["problem"]) == (MTU, "")
    assert (found["forward"], found["backward"]) == (0, 0)
    assert found["latency_s"] > 0


def test_other_networks(nodes):
    others = {"eth0": "127.0.0.2", "eth1": "127.0.0.1"}
    found = measure(peers_with(nodes, others=others), all_networks=True)
    assert found["networks"] == {"eth0": True, "eth1": True}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_network_that_is_closed(nodes, rank, monkeypatch):
    """On one side: nobody answers, here as a program's queue of connections is full."""
    reach = link.reach
    monkeypatch.setattr(link, "reach", lambda *to: reach(*to[:2], 0.5))
    _, closed = nodes[rank]
    where = "127.0.0.9", closed.port
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(where)
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(where)
        found = measure(peers_with(nodes, others={"eth0": where[0]}), all_networks=True)
    assert (found["networks"], found["problem"]) == ({"eth0": False}, "")


@pytest.mark.parametrize("address", ["::1", "127.0.0.5"])
def test_it_listens_where_the_job_is(address):
    with nodes_at(address) as nodes:
        found = measure(nodes)
        assert (found["problem"], found["lost_mtu"]) == ("", 0)
        (links, _), _ = nodes
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", links.port), 1)
