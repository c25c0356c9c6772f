"""The link of two nodes, on loopback: figures, and who does not answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import socket
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from tests.support.loopback import OTHER_PROGRAMS, Raw, key_of, other_program, together
from tests.support.patience import NEVER_S, PATIENCE, until
from torchrun_hpc import limits, wire
from torchrun_hpc.doctor import link
from torchrun_hpc.doctor.link import SILENT, Links, Peer, merged
from torchrun_hpc.doctor.results import Link
from torchrun_hpc.rendezvous.key import UnprovedError
from torchrun_hpc.rendezvous.server import UNKNOWN_PEERS

MTU = 65536
KEY = key_of(b"ours")
SOON = 0.05  # seconds
OPEN, PARTNER, MESSAGE, FIRST = LIMITS = (
    *("LINK_OPEN_TIMEOUT", "PARTNER_TIMEOUT"),
    *("LINK_MESSAGE_TIMEOUT", "FIRST_BYTE_TIMEOUT"),
)


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """Send little, and let nothing end by a limit but those that a test sets."""
    values = dict.fromkeys(LIMITS, PATIENCE) | {"SEND_TIME": 0.01, "PING_TIME": 0.01}
    for name, value in values.items():
        monkeypatch.setattr(limits, name, value)
    return partial(monkeypatch.setattr, limits)


@contextlib.contextmanager
def nodes_at(address):
    made = [Links(KEY, address, 2) for _ in range(2)]
    peers = [Peer(rank, address, each.port, MTU) for rank, each in enumerate(made)]
    try:
        yield [*zip(made, peers, strict=True)]
    finally:
        for links in made:
            links.stop()


@pytest.fixture
def nodes():
    with nodes_at("127.0.0.1") as found:
        yield found


def measure(nodes, turn="0/0", seen=None):
    """Let both nodes measure; return their link. `seen` is the other one, for each."""
    (first, here), (second, there) = nodes
    to_second, to_first = seen or (there, here)
    halves = together(
        partial(first.measure, here, to_second, turn),
        partial(second.measure, there, to_first, turn),
    )
    return merged(*halves)


# --- figures --------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5", "::1"])
def test_figures(address):
    with nodes_at(address) as nodes:
        links = [measure(nodes, turn) for turn in "01"]
        for found in links:
            assert (found.first, found.second, found.problem) == (0, 1, "")
            assert found.latency_s > 0
            assert min(found.forward, found.backward) > 1e6
            assert abs(found.clock_s) <= found.latency_s  # it is the same clock
            assert (found.lost_mtu, found.blocked) == (0, ())
        # A busy machine sends some again in vain: once more than a tenth.
        assert 0 <= min(found.lost for found in links) < 0.1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.9", nodes[0][0].port), PATIENCE)


@pytest.mark.parametrize("size", [0, 1, 10**5])
def test_however_much_comes(size):
    sending, receiving = socket.socketpair()
    with sending, receiving:
        sending.sendall(bytes(size))
        sending.shutdown(socket.SHUT_WR)
        assert (link._receive(receiving) > 0) is (size > 0)
        assert sending.recv(2) == b"+"


def test_more_files_than_select_takes(nodes):
    """Node 0 of a large job has a connection to each task."""
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= high < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (high, high))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert measure(nodes).problem == ""
    finally:
        for file in many:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


@pytest.mark.parametrize("silent", [1, 2])
def test_large_packets_that_are_lost(nodes, silent, limit, monkeypatch):
    """Small messages arrive, and then no byte of one of the two."""
    send, calls = link._send, itertools.count(1)

    def lose(connection):
        if next(calls) == silent:
            return link._exactly(connection, 1)
        return send(connection)

    limit(FIRST, SOON)
    monkeypatch.setattr(link, "_send", lose)
    assert measure(nodes) == Link(0, 1, lost_mtu=MTU)


# --- what is in the way ---------------------------------------------------------------


@pytest.mark.parametrize("blocked", [(0,), (1,), (0, 1)])
def test_a_firewall(nodes, blocked, limit):
    """Of which this port, on which nobody listens, has to do the work."""
    limit(PARTNER, SOON)
    seen = [peer for _, peer in reversed(nodes)]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for rank in blocked:
            seen[rank] = replace(seen[rank], port=closed.getsockname()[1])
        found = measure(nodes, seen=seen)
    assert found == Link(0, 1, problem="Connection refused", blocked=blocked)


@pytest.mark.parametrize("kind", OTHER_PROGRAMS)
def test_another_program(nodes, kind, limit):
    """Or the system of a node whose doctor hangs."""
    problem = "another program answers there"
    if kind == "one that never answers":
        problem = SILENT
        limit(OPEN, SOON)
    (first, here), (_, there) = nodes
    with other_program(OTHER_PROGRAMS[kind]) as port:
        half = first.measure(here, replace(there, port=port), "0/0")
    assert half == Link(0, 1, problem, blocked=(0,))


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_hangs_or_ends_in_the_middle(nodes, rank, hangs, limit):
    (links, own), (others, other) = nodes[rank], nodes[1 - rank]
    if hangs:
        limit(MESSAGE, SOON)

    def follow():
        ends = others._open(other, own, "0/0"), others._wait(rank, "0/0")
        for end in () if hangs else ends:
            end.close()
        return ends

    half, ends = together(partial(links.measure, own, other, "0/0"), follow)
    for end in ends:
        end.close()
    problems = "no answer, or" if hangs else "node closed|reset by peer|Broken pipe"
    assert re.search(problems, half.problem)
    assert not half.blocked


def test_an_answer_has_one_deadline(monkeypatch, limit):
    limit(OPEN, 3)
    clock = mock.Mock(monotonic=itertools.count().__next__)
    monkeypatch.setattr(link, "time", clock)
    slow = mock.Mock(recv=lambda _: b"{")  # a byte each second
    with pytest.raises(wire.WireError):
        link._answer(slow)
    seconds = [call.args[0] for call in slow.settimeout.call_args_list]
    assert seconds[:4] == [2, 1, 1e-3, 1e-3]


# --- who connects ---------------------------------------------------------------------


@pytest.fixture
def connect(nodes):
    """Connect to the first node, as anybody can; prove and ask, if asked to."""
    with contextlib.ExitStack() as stack:

        def connect(key=KEY, **request):
            peer = Raw(nodes[0][0].port, NEVER_S, key)
            stack.enter_context(contextlib.closing(peer))
            if request:
                peer.prove(**request)
            return peer

        yield connect


def said(peer):
    """Return the first byte of an answer, or nothing at the end of a connection."""
    with contextlib.suppress(ConnectionError):
        return peer._file.read(1)
    return b""


@pytest.mark.parametrize("key", [b"theirs", b""])
def test_who_has_another_key_or_none_is_no_node(nodes, connect, key):
    with pytest.raises(UnprovedError):
        connect(key_of(key), rank=1, turn="0/0")
    assert measure(nodes).problem == ""


@pytest.mark.parametrize(
    "wrong",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\n", b"\n", b"{}\n", b"x" * 5000,
     b'{"nonce":"0","request":"0","to":' + b"[" * 900 + b"]" * 900 + b"}\n",
     *({"rank": rank, "turn": "0/0"} for rank in ("x", None, [1], True, 1.0, -1, 2)),
     {"rank": 1, "turn": 0}, {"rank": 1, "turn": None}, {"rank": 1, "turn": []},
     {"rank": 1}, {"to": [1, "0/0"]}],
)  # fmt: skip
def test_what_is_wrong_ends_its_connection_alone(nodes, connect, wrong):
    """Whether an unknown peer sends it, or another node."""
    if isinstance(wrong, dict):
        peer = connect(**wrong)
    else:
        peer = connect()
        peer.send(wrong)
    assert said(peer) == b""
    assert measure(nodes).problem == ""


def test_idle_connections_cost_no_threads_and_keep_nobody_out(nodes, connect):
    threads = threading.active_count()
    idle = [connect() for _ in range(2 * UNKNOWN_PEERS)]
    assert measure(nodes).problem == ""
    until(lambda: threading.active_count() <= threads)
    assert [said(each) for each in idle[:100]] == [b""] * 100
    idle[-1].prove(rank=1, turn="later")  # the newest are kept
    assert said(idle[-1]) == b"+"


def test_a_newer_connection_takes_the_place_of_an_older_one(nodes, connect, limit):
    """One of another turn is none of this turn."""
    (first, _), _ = nodes
    peers = [connect(rank=1, turn=turn) for turn in ("a", "b", "b")]
    assert [said(each) for each in (*peers, *peers[:2])] == [b"+"] * 3 + [b""] * 2
    with first._wait(1, "b") as kept:
        peers[2].send(b"!")
        assert kept.recv(1) == b"!"
    assert said(connect(rank=1, turn="old")) == b"+"
    assert measure(nodes, "new").problem == ""
    assert said(connect(rank=1, turn="old")) == b"+"
    limit(PARTNER, SOON)
    with pytest.raises(ConnectionError, match="did not connect"):
        first._wait(1, "new")


# --- what both have seen --------------------------------------------------------------

BY_FIRST, BY_SECOND = (Link(0, 1, "refused", blocked=(rank,)) for rank in (0, 1))
FINE, LATE = Link(0, 1), Link(0, 1, "nobody has come")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (replace(FINE, backward=5.0, lost=0.1, latency_s=1e-5, clock_s=0.2),
         replace(FINE, forward=7.0, lost=0.3),
         Link(0, 1, latency_s=1e-5, clock_s=0.2, forward=7.0, backward=5.0, lost=0.3)),
        (BY_FIRST, LATE, BY_FIRST),
        (LATE, BY_SECOND, BY_SECOND),
        (BY_FIRST, BY_SECOND, replace(BY_FIRST, blocked=(0, 1))),
        (LATE, FINE, LATE),
        (FINE, LATE, LATE),
        (LATE, replace(FINE, lost_mtu=9000), replace(FINE, lost_mtu=9000)),
        (replace(FINE, lost_mtu=9000), LATE, replace(FINE, lost_mtu=9000)),
    ],
)  # fmt: skip
def test_what_both_have_seen(first, second, expected):
    assert merged(first, second) == expected
