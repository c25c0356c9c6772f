"""How an agent finds the coordinator, over loopback."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.loopback import (
    FAILURE_BEFORE,
    FOREVER,
    HERE,
    JOB,
    NOT_YET,
    OTHER_PROGRAMS,
    STORE,
    WELCOME,
    LoopbackJob,
    fail,
    failure_of,
    key_of,
    other_program,
    started,
    take_part,
)
from tests.support.patience import PATIENCE, until
from torchrun_hpc import limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.errors import (
    CoordinatorNotFoundError,
    JobFailedError,
    Refused,
    RefusedError,
)
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.messages import Looking, Unproved
from torchrun_hpc.rendezvous.protocol import FROM_COORDINATOR

SILENT = "one that never answers"


@pytest.mark.parametrize("case", OTHER_PROGRAMS)
def test_another_program_on_the_first_port(job, case, capfd):
    job.start_server(nodes=1)
    with other_program(OTHER_PROGRAMS[case]) as port:
        client = job.client(0, (port, job.port), nodes=1)
        connected = started(client.connect)
        if case == SILENT:  # it keeps a port for longer than the others are tried
            until(lambda: client._search._attempts)
            job.clock.go_on(limits.PORT_DELAY)
        connected.result(PATIENCE)
        assert take_part(client).store == STORE
    assert capfd.readouterr() == ("", "")


def not_found(job, client):
    """Look for the coordinator until the time is over; return what was found."""
    connected = started(client.connect)
    looking = client._search
    ports = {*looking._address.ports, *looking._address.notice_ports}
    until(lambda: looking._programs.keys() >= ports and not looking._attempts)
    assert not connected.done()
    job.clock.passes_until(connected.done, looking._address.timeout)
    with pytest.raises(CoordinatorNotFoundError) as caught:
        connected.result()
    return str(caught.value)


@pytest.mark.parametrize("case", OTHER_PROGRAMS)
def test_another_program_and_nobody_else(job, case, monkeypatch):
    if case == SILENT:
        monkeypatch.setattr(limits, "WELCOME_TIMEOUT", 0)
    with other_program(OTHER_PROGRAMS[case]) as port:
        found = not_found(job, job.client(0, (port,)))
    other = "another program, or an older torchrun_hpc"
    what = "a program that sends nothing" if case == SILENT else other
    assert found == f"port {port}: {what}"


def test_a_program_that_keeps_the_connection(job):
    """The reports name it before its time to answer is over."""
    with other_program(OTHER_PROGRAMS[SILENT]) as port:
        client = job.client(1, (port,), where={"timeout": FOREVER})
        connected = started(client.connect)
        until(lambda: client._search._programs)  # before any time has passed
        job.clock.passes_until(lambda: job.events[1])
        assert client._search._attempts.keys() == {port}
        assert not connected.done()
    found = f"port {port}: a program that sends nothing"
    assert job.events[1][0] == Looking(1, found)


def test_the_coordinator_of_another_job_on_the_first_port(job):
    other = LoopbackJob()
    other.start_server(key=key_of(launch="20.0"))
    job.start_server(nodes=1)
    try:
        client = job.client(0, (other.port, job.port), nodes=1)
        client.connect()
        assert other.server.coordinator.members.unproved == {HERE: False}
    finally:
        other.close()


OURS, THEIRS, NONE = key_of(b"ours"), key_of(b"theirs"), key_of()


@pytest.mark.parametrize(
    ("own", "theirs"), [(OURS, THEIRS), (OURS, NONE), (NONE, OURS)]
)
def test_two_keys(job, own, theirs):
    """It looks again for a while: the file with the key may be seen late."""
    (reporter,) = (job.start_server(key=theirs), job.client(0, key=theirs))[1:]
    reporter.connect()
    client = job.client(1, key=own, where={"timeout": FOREVER})
    connected = started(client.connect)
    job.clock.passes_until(lambda: job.events[1])
    found = f"port {job.port}: no proof: another job, or another key"
    assert job.events[1][0] == Looking(1, found)
    job.clock.passes_until(
        lambda: len(job.events[1]) == limits.KEY_FILE_TIMEOUT - 1 or connected.done()
    )
    assert not connected.done()
    job.clock.passes_until(connected.done)
    with pytest.raises(RefusedError) as caught:
        connected.result()
    assert (caught.value.reason, caught.value.port) == (Refused.UNPROVED, job.port)
    assert job.events[0] == [Unproved(HERE, theirs.name)]


def test_strangers_who_come_and_go(job):
    """They are no coordinator that has had another key for so long."""
    port = job.unused_port()
    client = job.client(1, (port,), where={"timeout": FOREVER})
    connected, found = started(client.connect), client._search._programs
    for _ in range(3):
        with other_program(pretended, port):
            job.clock.passes_until(lambda: "no proof" in found.get(port, ""))
        job.clock.passes_until(lambda: NOT_YET in found[port])
        job.clock.go_on(limits.KEY_FILE_TIMEOUT)
    assert not connected.done()


def test_a_key_that_the_head_node_sees_late(job, tmp_path):
    """It cannot make one where it is, but the next node can: at the first launch."""
    file = KeyFile(str(tmp_path / "key"), source="--hpc_key_file=FILE")
    head, own = (Key(file, JOB) for _ in "ab")
    job.start_server(key=head)
    job.client(0, key=head).connect()
    own.load()
    client = job.client(1, key=own, where={"timeout": FOREVER})
    connected = started(client.connect)
    job.clock.passes_until(connected.done)
    connected.result()
    assert head.secret == own.secret != key_of().secret


def test_a_key_that_is_seen_late(job, tmp_path):
    file = tmp_path / "folder" / "key"
    key = Key(KeyFile(str(file), source=""), JOB)
    key.load()
    job.start_server(key=key_of(b"k" * 32))
    client = job.client(1, key=key, where={"timeout": FOREVER})
    connected = started(client.connect)
    job.clock.passes_until(lambda: job.events[1])
    file.parent.mkdir()
    file.touch(0o600)
    file.write_bytes(b"k" * 32)
    job.clock.passes_until(connected.done)
    connected.result()


def test_a_key_of_the_agent_that_has_just_been_made(job, tmp_path):
    """Both have one: nobody else can join."""
    keys = [
        Key(KeyFile(str(tmp_path / "key"), source="--hpc_key_file=FILE"), JOB)
        for _ in "ab"
    ]
    for key in keys:
        key.load()
    job.start_server(key=keys[0])
    job.client(1, key=keys[1]).connect()
    assert job.simulated.connected == {1}


def pretended(data):
    """Answer as a coordinator does, without its secret."""
    if b"nonce" in data:
        return wire.to_line({"nonce": "0" * 32, "proof": "0" * 64})
    return wire.to_line(wire.encode(WELCOME, FROM_COORDINATOR))


def test_who_resets_each_connection(job):
    job.start_server()
    with socket.create_server((HERE, 0)) as server:

        def serve():
            linger = struct.pack("ii", 1, 0)
            with suppress(OSError):
                while True:
                    opened, _ = server.accept()
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    opened.close()

        started(serve)
        for rank in range(3):
            ports = (server.getsockname()[1], job.port)
            job.client(rank, ports, where={"timeout": FOREVER}).connect()
        server.shutdown(socket.SHUT_RDWR)
    assert len(job.simulated.connected) == 3


def test_who_pretends_to_be_the_coordinator(job):
    job.start_server(key=OURS)
    with other_program(pretended) as port:
        client = job.client(1, (port, job.port), key=OURS)
        client.connect()
    assert job.simulated.connected == {1}


def test_who_passes_everything_on_to_the_coordinator(job):
    """Its port is not the one of the coordinator: each proof covers it."""
    job.start_server(key=OURS)
    passed = []

    def pass_on(data):
        with socket.create_connection((HERE, job.port)) as there:
            passed.append(data)
            there.sendall(data)
            return there.recv(1000) or None

    with other_program(pass_on) as port:
        lonely = job.client(1, (port,), key=OURS, where={"timeout": FOREVER})
        connected = started(lonely.connect)
        until(lambda: passed)
        assert b'"to":["127.0.0.1",' + str(port).encode() in passed[0]
        job.client(0, key=OURS).connect()
        job.clock.passes_until(lambda: job.events[0] == [Unproved(HERE, OURS.name)])
        assert not connected.done()
    assert job.simulated.connected == {0}


def test_a_coordinator_that_is_late(job):
    port, events = job.unused_port(), job.events[0]
    client = job.client(0, (port,), where={"timeout": FOREVER}, nodes=1)
    connected = started(client.connect)
    job.clock.passes_until(lambda: events)
    job.start_server(port, nodes=1)
    job.clock.passes_until(connected.done)
    assert events[0] == Looking(1, f"port {port}: {NOT_YET}", is_reached=True)
    assert [event.seconds for event in events] == [*range(1, len(events) + 1)]


def test_a_late_coordinator_on_its_last_port(job):
    """All ports are tried now and then: the first one may be taken."""
    ports = [job.unused_port() for _ in range(4)]
    client = job.client(0, ports, where={"timeout": FOREVER}, nodes=1)
    connected = started(client.connect)
    until(lambda: len(client._search._programs) == 4)
    job.start_server(ports[-1], nodes=1)
    job.clock.passes_until(connected.done)
    connected.result()


def test_no_coordinator_at_all(job):
    ports = (job.unused_port(), job.unused_port())
    found = not_found(job, job.client(0, ports))
    assert found == f"port {ports[0]}, {ports[1]}: {NOT_YET}"


CANNOT = Failure(Kind.AGENT, (2,), text="HPC018 torch cannot be imported")


def test_an_agent_that_cannot_start_ends_all(job):
    """Its --rdzv-id and number of nodes may be unknown, as where torch is missing."""
    others = job.connected(0, 1)
    last = job.client(2, own_failure=CANNOT, run_id="")
    with suppress(JobFailedError):
        last.connect()
    assert [failure_of(client) for client in (*others, last)] == [CANNOT] * 3


def test_an_agent_that_cannot_start_is_informed_of_the_first_failure(job):
    job.start_server()
    fail(job.server, FAILURE_BEFORE)
    last = job.client(2, own_failure=CANNOT, run_id="")
    with suppress(JobFailedError):
        last.connect()
    assert failure_of(last) == FAILURE_BEFORE


def test_an_agent_that_comes_back_and_cannot_start(job):
    """It takes the place of one that is gone, or that it has been itself."""
    others = job.connected(0, 1)
    same = job.client(1, own_failure=replace(CANNOT, nodes=(1,)), run_id="")
    with suppress(JobFailedError):
        same.connect()
        same.fail(replace(CANNOT, nodes=(1,)))
    assert failure_of(others[0]) == replace(CANNOT, nodes=(1,))


def test_another_job_on_a_port_for_notices(job):
    other = LoopbackJob()
    other.start_server(key=key_of(launch="20.0"))
    try:
        where = {"notice_ports": (other.port,)}
        not_found(job, job.client(1, (job.unused_port(),), where=where))
    finally:
        other.close()


def test_a_second_agent_that_cannot_start_ends_nothing(job):
    """A launch within a worker, say: its node's own agent is at work."""
    first, *_ = job.at_work()
    second = job.client(1, agent="second", own_failure=replace(CANNOT, nodes=(1,)))
    with pytest.raises(RefusedError):
        second.connect()
    assert first.state.failure is None


def test_a_name_that_does_not_resolve(job, monkeypatch):
    def resolve(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    client = job.client(0, (1,), where={"host": "no-such-host"})
    assert not_found(job, client) == "port 1: Name or service not known"


NO_ADDRESSES = {
    "a port above all": ("127.0.0.1", 70000),
    "a port below all": ("127.0.0.1", -1),
    "a name with an empty part": ("n1..cluster", 4000),
    "a name with a NUL": ("n1\0", 4000),
}


@pytest.mark.parametrize("case", NO_ADDRESSES)
def test_what_is_no_address(job, case):
    host, port = NO_ADDRESSES[case]
    client = job.client(0, (port,), where={"host": host})
    assert not_found(job, client).startswith(f"port {port}: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "x"}, Refused.RUN_ID),
        ({"nodes": 4}, Refused.NODES),
        ({"nodes": 2}, Refused.NODES),
        ({"spares": 1}, Refused.SPARES),
        ({"spares": 1, "own_failure": CANNOT}, Refused.SPARES),
    ],
)
def test_an_agent_that_is_refused(job, changes, reason):
    job.start_server()
    client = job.client(1, **changes)
    with pytest.raises(RefusedError) as caught:
        client.connect()
    refused = caught.value
    assert (refused.reason, refused.port) == (reason, job.port)
