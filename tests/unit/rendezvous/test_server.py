"""What connects to the coordinator, and how it ends, over loopback."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.support.loopback import (
    FAILURE_BEFORE,
    FOREVER,
    HERE,
    LIMIT,
    Clock,
    failure_of,
    join_all,
    key_of,
    listening,
    settle,
    started,
    take_part,
    together,
)
from tests.support.patience import NEVER_S, PATIENCE, until
from tests.support.simulated_job import STORE, request_of
from torchrun_hpc import limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.head_node import ports_of
from torchrun_hpc.planning.meeting import KeyFile, Meeting, Spares
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous import server as servers
from torchrun_hpc.rendezvous.connection import inform
from torchrun_hpc.rendezvous.errors import JobFailedError, Refused
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    Answer,
    Ask,
    Bye,
    Check,
    Get,
    Go,
    Join,
    Read,
    Set,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTS = ("n0", "n1", "n2")


def closing(job):
    """Let the coordinator's node end; return the thread, which waits for others."""
    closed = started(job.server.close)
    until(lambda: job.server._end)
    settle(job.server)
    assert not closed.done()
    return closed


def test_the_coordinator_stays_until_all_are_informed(job, raw):
    (client,) = job.connected(0)
    peer = raw().accepted(1)
    client.fail(Failure(Kind.AGENT, (0,), text="why"))
    assert peer.receive().failure.text == "why"
    client.leave()
    closed = closing(job)
    peer.send_message(Read())
    peer.send_message(Ask(1, Check(("a",))))
    assert isinstance(peer.receive(), Answer)
    assert not closed.done()  # node 2 has not been there yet
    late = raw()
    late.request(2)
    assert late.receive().failure.text == "why"
    assert not closed.done()
    late.send_message(Read())
    closed.result(PATIENCE)


def test_the_coordinator_does_not_stay_forever(job, raw):
    job.start_server()
    raw().accepted(1)
    closed = closing(job)
    job.clock.passes_until(closed.done)
    job.server.close()  # it is closed already


@pytest.mark.parametrize("spares", [0, 1])
def test_a_coordinator_that_cannot_start_informs_all(job, spares):
    """It uses a port of its own if the job's ports are taken."""
    job_id = f"19.{os.getpid()}"  # its ports for notices are no other test's
    with listening() as taken:
        _, notices = ports_of(job_id)
        meeting = Meeting(
            "c10d", nodes=3, hosts=HOSTS, launch_id=job_id, listen=(HERE, 1),
            ports=(taken.getsockname()[1],), notice_ports=notices,
            spares=Spares(spares), is_coordinator=True,
        )  # fmt: skip
        search = {"notice_ports": notices, "timeout": FOREVER}
        search["key"] = key_of(launch=job_id)
        others = [
            job.client(rank, meeting.ports, **search, spares=spares) for rank in (1, 2)
        ]
        failures = job.clock.passes_while(
            lambda: inform(meeting, FAILURE_BEFORE, NEVER_S, print),
            *(lambda client=client: failure_after(client) for client in others),
        )
    assert failures == [None, FAILURE_BEFORE, FAILURE_BEFORE]


def test_who_has_no_key_that_is_required_tells_nobody_the_failure():
    """Its port would be open to anybody who knows the launch id."""
    with listening() as server:
        port = server.getsockname()[1]
    key = KeyFile(
        "/dev/null", source="--hpc_key_file=FILE", required="--hpc_auth=require"
    )
    meeting = Meeting(
        "c10d", nodes=3, hosts=HOSTS, ports=(port,), listen=(HERE, 1),
        is_coordinator=True, key=key,
    )  # fmt: skip
    later = started(lambda: inform(meeting, FAILURE_BEFORE, NEVER_S, print))
    assert later.result(PATIENCE) is None


def failure_after(client):
    with suppress(JobFailedError):
        client.connect()
    client.leave()
    return client.state.failure


NO_AGENTS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": b"\0\xff\xfe" * 50 + b"\n",
    "a number": b"1\n",
    "an empty message": b"{}\n",
    "a verb of an agent": wire.to_line(wire.encode(Join(), FROM_AGENT)),
    "half a join request": wire.to_line({"protocol": protocol.VERSION}),
    "a long line": b"x" * (protocol.JOIN_REQUEST_LIMIT + 1),
    "a deep line": b"[" * 4000 + b"\n",
}


@pytest.mark.parametrize("case", NO_AGENTS)
def test_a_peer_that_is_no_agent_is_disconnected(job, raw, case, caplog, capfd):
    """Whether it says so at first, or after a proof."""
    job.start_server(nodes=1)
    for has_proved in False, True:
        peer = raw()
        proof = wire.to_line(peer.proved({})) if has_proved else b""
        peer.send(proof + NO_AGENTS[case])
        assert peer.receive() is None
    assert take_part(job.connect(0, nodes=1))
    assert (caplog.text, capfd.readouterr().err) == ("", "")


INVALID_MESSAGES = [{"unknown": {}}, {"heartbeat": {"seconds": float("nan")}}]


@pytest.mark.parametrize("message", INVALID_MESSAGES)
def test_an_agent_that_sends_an_invalid_message(job, raw, message, caplog, capfd):
    clients = job.connected(0, 1)
    odd = raw().accepted(2)
    assert together(lambda: join_all(clients), odd.take_part)[1] == Go(0, STORE)
    odd.send_message(message)
    while odd.receive() is not None:
        pass
    assert failure_of(clients[0]) == Failure(Kind.LOST, (2,))
    assert (caplog.text, capfd.readouterr().err) == ("", "")


TWICE = {
    "refused, and then one of the job": (
        [request_of(0, nodes=4), request_of(1)],
        [Refused],
    ),
    "of two node ranks that others have": (
        [request_of(0, agent="second"), request_of(2, agent="second")],
        [],
    ),
    "it leaves, and comes again": (
        [request_of(1), wire.encode(Bye(), FROM_AGENT), request_of(1)],
        [Welcome],
    ),
}


@pytest.mark.parametrize("case", TWICE)
def test_two_join_requests_on_one_connection(job, raw, case, caplog):
    """In one packet, so that the second one is there when the first is answered."""
    (first, *others), expected = TWICE[case]
    clients = job.connected(0, 2)
    peer = raw()
    peer.send(b"".join(map(wire.to_line, (peer.proved(first), *others))))
    assert [*map(type, iter(peer.receive, None))] == expected
    job.clock.go_on(20)
    assert job.simulated.connected == {0, 2}
    assert [client.state.failure for client in clients] == [None, None]
    assert caplog.text == ""


def test_a_peer_that_sends_nothing_is_disconnected(job, raw):
    job.start_server()
    silent, slow, agent = raw(), raw(), raw().accepted(1)
    slow.send(b'{"protocol"')
    until(lambda: len(job.server._unproved) == 2)
    job.clock.go_on(limits.JOIN_REQUEST_TIMEOUT)
    assert silent.receive() is None
    assert slow.receive() is None
    agent.send_message(Ask(1, Check(("a",))))  # after its request it may be silent
    assert agent.receive() == Answer(1, value=False)


def test_the_oldest_unknown_peer_is_disconnected_for_the_next(job, raw):
    job.start_server(nodes=1, unknown_peers=2)
    peers = [raw() for _ in range(3)]
    until(lambda: len(job.server._callers) == 3)
    peers.append(raw())
    assert peers[0].receive() is None
    client = job.connect(0, nodes=1)
    assert peers[1].receive() is None
    for other in peers[2:]:  # the others are there, and the agent is not counted
        other.request(0, nodes=4)
        assert other.receive() is Refused.NODES
    assert client.state.failure is None


def test_an_agent_that_does_not_read(job, raw, monkeypatch):
    """Its messages are not kept forever."""
    monkeypatch.setattr(servers, "_UNSENT_LIMIT", 100_000)
    (client,) = job.connected(0)
    silent = raw().accepted(1)
    has_a = Check(("a",))
    client.ask(Set({"a": "x" * 1_000_000}), LIMIT)
    for number in range(100):
        with suppress(OSError):
            silent.send_message(Ask(number, Get(("a",))))
        if 1 not in job.simulated.connected:
            break
        client.ask(has_a, LIMIT)  # the coordinator has had time
    until(lambda: 1 not in job.simulated.connected)
    assert client.ask(has_a, LIMIT) is True


# --- time, and how a connection ends --------------------------------------------------


@pytest.fixture
def noted(job, monkeypatch):
    """Serve a coordinator that notes passed seconds and ended connections.

    The clock of its server stands still.
    """
    job.start_server(clock=Clock())
    coordinator, notes = job.server.coordinator, []
    disconnected = coordinator.disconnected

    def note_end(connection, *, ended=False):
        notes.append("ended" if ended else "disconnected")
        disconnected(connection, ended=ended)

    monkeypatch.setattr(coordinator, "tick", lambda seconds=1: notes.append(seconds))
    monkeypatch.setattr(coordinator, "disconnected", note_end)
    return notes


def test_seconds_are_counted_by_a_clock_that_runs_on(noted, job, monkeypatch):
    moment = job.server._counted
    for passed in (1.0, 1.4, 1.4, 1.4, 0.5, 100.9):  # 0.7 s are left in the end
        moment += passed
        monkeypatch.setattr(servers, "now", lambda moment=moment: moment)
        job.server._loop.call(job.server._tick)
        settle(job.server)
    assert noted == [1, 1, 1, 2, 101]


def reset(peer):
    """Close a connection as a firewall does that rejects."""
    linger = struct.pack("ii", 1, 0)
    peer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    peer.close()


def ends(job, clients):
    job.fail(Failure(Kind.AGENT, (0,), text="why"))
    for client in clients:
        assert failure_of(client).text == "why"


OURS = key_of(b"ours")
STATES: dict[str, tuple[int, Callable[..., object]]] = {
    "nobody is there": (0, lambda *_: None),
    "it waits for a node": (2, lambda *_: None),
    "it runs": (3, lambda _job, clients: join_all(clients)),
    "it has failed": (3, ends),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("key", [key_of(b"theirs"), key_of()])
def test_nothing_is_answered_without_a_proof(job, raw, state, key):
    """And nothing ends, in whatever state the job is."""
    number, go_on = STATES[state]
    job.start_server(key=OURS)
    go_on(job, [job.connect(rank, key=OURS) for rank in range(number)])
    failure = job.simulated.failure
    for more in {}, {"failed": wire.encode(FAILURE_BEFORE)}, {"asks": True}:
        peer, request = raw(), request_of(1, **more)
        peer.send_message(next(key.secret.call((HERE, job.port), request)))
        sizes = {name: len(value) for name, value in peer.receive().items()}
        assert sizes == {"nonce": 32, "proof": 64}
        question = wire.encode(Ask(1, Get(("a",))), FROM_AGENT)
        lines = {**request, "proof": "0" * 64}, request, question
        peer.send(b"".join(map(wire.to_line, lines)))
        assert peer.receive() is None
    settle(job.server)
    assert job.simulated.failure == failure
    assert len(job.simulated.connected) == number


def test_garbage_and_a_reset(job, raw, caplog):
    """Then the peer's address is unknown."""
    (client,) = job.connected(0)
    for _ in range(50):
        peer = raw()
        peer.send(b"garbage\n")
        reset(peer)
    job.clock.go_on(2)
    assert caplog.text == ""
    assert client.state.failure is None


# How a connection ends, and whether its process has ended.
ENDS = {
    "the process has closed it": (lambda peer: peer.close(), True),
    "it was reset": (reset, False),
    "what it has sent is wrong": (lambda peer: peer.send(b"?\n"), False),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_connection_ends(noted, job, raw, case):
    end, has_ended = ENDS[case]
    peer = raw().accepted(1)
    end(peer)
    until(lambda: noted)
    settle(job.server)
    assert ("ended" in noted) is has_ended


@pytest.mark.usefixtures("noted")
def test_a_connection_that_is_aborted_ends_with_a_reset(raw):
    """A living process must not look like one that has ended."""
    peer = raw().accepted(1)
    peer.send(b"?\n")
    with pytest.raises(ConnectionResetError):
        peer._socket.recv(1)


def test_an_agent_that_aborts_its_connection_sends_a_reset(noted, job):
    client = job.connect(1)
    client._loop.call(client._channel.abort)
    until(lambda: noted)
    settle(job.server)
    assert "ended" not in noted


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("how", ["close", "abort"])
def test_an_agent_notes_how_the_coordinator_has_ended(job, how):
    client = job.connect(1)
    (caller,) = job.server._callers.values()
    job.server._loop.call(getattr(caller, how))
    failure_of(client)
    assert client._channel.at_end is (how == "close")


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("text", ["{}", '{"go":{"round":"x"}}', '{"unknown":{}}'])
def test_a_coordinator_that_sends_an_invalid_message_is_left(job, text):
    client = job.connect(1)
    (caller,) = job.server._callers.values()
    job.server._loop.call(caller.transport.write, f"{text}\n".encode())
    assert failure_of(client) == Failure(Kind.COORDINATOR)
    assert not client._channel.at_end


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("place", ["coordinator.receive", "catch_up"])
def test_a_fault_of_the_coordinator_resets_the_connection(job, monkeypatch, place):
    """Asyncio itself would send an end of file, and the process lives."""
    client = job.connect(1)
    owner = job.server.coordinator if "." in place else job.server
    monkeypatch.setattr(owner, place.rpartition(".")[2], lambda *_: 1 / 0)
    client.send(Join())
    failure_of(client)
    assert not client._channel.at_end


def test_a_fault_of_an_agent_resets_its_connection_and_ends_it(noted, job):
    client = job.connect(1)
    client._channel.on_message = lambda _: 1 / 0
    (caller,) = job.server._callers.values()
    job.server._loop.call(lambda: caller.transport.write(b'{"printed":{}}\n'))
    assert failure_of(client).text == "ZeroDivisionError: division by zero"
    client.leave()
    until(lambda: noted)
    assert noted == ["disconnected"]
