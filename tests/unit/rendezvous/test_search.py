"""How an agent finds the coordinator, over loopback."""

from __future__ import annotations

import socket
import struct
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from tests.support.loopback import (
    FAILURE_BEFORE,
    FOREVER,
    HERE,
    JOB,
    NOT_YET,
    OTHER_PROGRAMS,
    WELCOME,
    LoopbackJob,
    failure_of,
    key_of,
    other_program,
    started,
    take_part,
)
from tests.support.patience import PATIENCE, until
from tests.support.simulated_job import STORE
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
            until(lambda: client.search._attempts)
            job.clock.go_on(limits.PORT_DELAY)
        connected.result(PATIENCE)
        assert take_part(client).store == STORE
    assert capfd.readouterr() == ("", "")


def not_found(job, client):
    """Look for the coordinator until the time is over; return the problem."""
    search, address = client.search, client.search._address
    connected = started(client.connect)
    ports = {*address.ports, *address.notice_ports}
    until(lambda: search._programs.keys() >= ports and not search._attempts)
    assert not connected.done()
    job.clock.passes_until(connected.done, address.timeout)
    with pytest.raises(CoordinatorNotFoundError) as caught:
        connected.result()
    return str(caught.value)


def looking(job, rank, ports=None, **options):
    """Start to look for the coordinator, without a limit; return client and thread."""
    client = job.client(rank, ports, timeout=FOREVER, **options)
    return client, started(client.connect)


def found(job, connected):
    """Let time pass until the coordinator is found."""
    job.clock.passes_until(connected.done)
    connected.result()


@pytest.mark.parametrize("case", OTHER_PROGRAMS)
def test_another_program_and_nobody_else(job, case, monkeypatch):
    if case == SILENT:
        monkeypatch.setattr(limits, "WELCOME_TIMEOUT", 0)
    with other_program(OTHER_PROGRAMS[case]) as port:
        problem = not_found(job, job.client(0, (port,)))
    other = "another program, or an older torchrun_hpc"
    program = "a program that sends nothing" if case == SILENT else other
    assert problem == f"port {port}: {program}"


def test_a_program_that_keeps_the_connection(job):
    """The reports name it before its time to answer is over."""
    with other_program(OTHER_PROGRAMS[SILENT]) as port:
        client, connected = looking(job, 1, (port,))
        until(lambda: client.search._programs)  # before any time has passed
        job.clock.passes_until(lambda: job.events[1])
        assert client.search._attempts.keys() == {port}
        assert not connected.done()
    problem = f"port {port}: a program that sends nothing"
    assert job.events[1][0] == Looking(1, problem)


@pytest.fixture
def other_job():
    """Start the coordinator of another job; return it."""
    with closing(LoopbackJob()) as other:
        other.start_server(key=key_of(launch="20.0"))
        yield other


def test_the_coordinator_of_another_job_on_the_first_port(job, other_job):
    job.start_server(nodes=1)
    client = job.client(0, (other_job.port, job.port), nodes=1)
    client.connect()
    assert other_job.server.coordinator.members.unproved == {HERE: False}


def test_another_job_on_a_port_for_notices(job, other_job):
    ports = {"ports": (job.unused_port(),), "notice_ports": (other_job.port,)}
    not_found(job, job.client(1, **ports))


OURS, THEIRS, NONE = key_of(b"ours"), key_of(b"theirs"), key_of()


@pytest.mark.parametrize(
    ("key", "head_key"), [(OURS, THEIRS), (OURS, NONE), (NONE, OURS)]
)
def test_two_keys(job, key, head_key):
    """It looks again for a while: the file with the key may be seen late."""
    job.start_server(key=head_key)
    job.client(0, key=head_key).connect()  # it reports
    _, connected = looking(job, 1, key=key)
    job.clock.passes_until(lambda: job.events[1])
    problem = f"port {job.port}: no proof: another job, or another key"
    assert job.events[1][0] == Looking(1, problem)
    job.clock.passes_until(
        lambda: len(job.events[1]) == limits.KEY_FILE_TIMEOUT - 1 or connected.done()
    )
    assert not connected.done()
    job.clock.passes_until(connected.done)
    with pytest.raises(RefusedError) as caught:
        connected.result()
    assert (caught.value.reason, caught.value.port) == (Refused.UNPROVED, job.port)
    assert job.events[0] == [Unproved(HERE, head_key.name)]


def test_strangers_who_come_and_go(job):
    """They are no coordinator that has had another key for so long."""
    port = job.unused_port()
    client, connected = looking(job, 1, (port,))
    programs = client.search._programs
    for _ in range(3):
        with other_program(pretended, port):
            job.clock.passes_until(lambda: "no proof" in programs.get(port, ""))
        job.clock.passes_until(lambda: NOT_YET in programs[port])
        job.clock.go_on(limits.KEY_FILE_TIMEOUT)
    assert not connected.done()


def key_at(file, source="--hpc_key_file=FILE"):
    """Return the key in a file that the user has set, or at the default path."""
    return Key(KeyFile(str(file), source=source), JOB)


def test_a_key_that_the_head_node_sees_late(job, tmp_path):
    """It cannot make the key, but the next node can: at the first launch."""
    head_key, key = (key_at(tmp_path / "key") for _ in range(2))
    job.start_server(key=head_key)
    job.client(0, key=head_key).connect()
    key.load()
    _, connected = looking(job, 1, key=key)
    found(job, connected)
    assert head_key.secret == key.secret != key_of().secret


def test_a_key_that_is_seen_late(job, tmp_path):
    file = tmp_path / "folder" / "key"
    key = key_at(file, source="")
    key.load()
    job.start_server(key=key_of(b"k" * 32))
    _, connected = looking(job, 1, key=key)
    job.clock.passes_until(lambda: job.events[1])
    file.parent.mkdir()
    file.touch(0o600)
    file.write_bytes(b"k" * 32)
    found(job, connected)


def test_a_key_of_the_agent_that_has_just_been_made(job, tmp_path):
    """Both have one: nobody else can join."""
    head_key, key = (key_at(tmp_path / "key") for _ in range(2))
    head_key.load()
    key.load()
    job.start_server(key=head_key)
    job.client(1, key=key).connect()
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
            job.client(rank, ports, timeout=FOREVER).connect()
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
        _, connected = looking(job, 1, (port,), key=OURS)
        until(lambda: passed)
        assert b'"to":["127.0.0.1",' + str(port).encode() in passed[0]
        job.client(0, key=OURS).connect()
        job.clock.passes_until(lambda: job.events[0] == [Unproved(HERE, OURS.name)])
        assert not connected.done()
    assert job.simulated.connected == {0}


def test_a_coordinator_that_is_late(job):
    port, events = job.unused_port(), job.events[0]
    _, connected = looking(job, 0, (port,), nodes=1)
    job.clock.passes_until(lambda: events)
    job.start_server(port, nodes=1)
    job.clock.passes_until(connected.done)
    assert events[0] == Looking(1, f"port {port}: {NOT_YET}", is_reached=True)
    assert [event.seconds for event in events] == [*range(1, len(events) + 1)]


def test_a_late_coordinator_on_its_last_port(job):
    """All ports are tried now and then: the first one may be taken."""
    ports = [job.unused_port() for _ in range(4)]
    client, connected = looking(job, 0, ports, nodes=1)
    until(lambda: len(client.search._programs) == 4)
    job.start_server(ports[-1], nodes=1)
    found(job, connected)


def test_no_coordinator_at_all(job):
    ports = (job.unused_port(), job.unused_port())
    problem = not_found(job, job.client(0, ports))
    assert problem == f"port {ports[0]}, {ports[1]}: {NOT_YET}"


CANNOT = Failure(Kind.AGENT, (2,), text="HPC018 torch cannot be imported")


def cannot_start(job, rank):
    """Let an agent connect that cannot start; return its client.

    Its --rdzv-id and number of nodes may be unknown, as where torch is missing.
    """
    client = job.client(rank, failed=replace(CANNOT, nodes=(rank,)), run_id="")
    with suppress(JobFailedError):
        client.connect()
        client.fail(client.request.failed)
    return client


@pytest.mark.parametrize("rank", [1, 2])
def test_an_agent_that_cannot_start_ends_all(job, rank):
    """The agent of node 1 takes the place of one that is gone, or of its own."""
    others = job.connected(0, 1)
    clients = *others[:rank], cannot_start(job, rank)
    failures = [failure_of(client) for client in clients]
    assert failures == [replace(CANNOT, nodes=(rank,))] * len(clients)


def test_an_agent_that_cannot_start_is_informed_of_the_first_failure(job):
    job.start_server()
    job.fail(FAILURE_BEFORE)
    assert failure_of(cannot_start(job, 2)) == FAILURE_BEFORE


def test_a_second_agent_that_cannot_start_ends_nothing(job):
    """A launch within a worker, say: its node's own agent is at work."""
    first, *_ = job.at_work()
    second = job.client(1, agent="second", failed=replace(CANNOT, nodes=(1,)))
    with pytest.raises(RefusedError):
        second.connect()
    assert first.state.failure is None


def test_a_name_that_does_not_resolve(job, monkeypatch):
    def resolve(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    client = job.client(0, (1,), host="no-such-host")
    assert not_found(job, client) == "port 1: Name or service not known"


@pytest.mark.parametrize(
    ("host", "port"),
    [
        *(("127.0.0.1", 70000), ("127.0.0.1", -1)),  # a port above all, or below
        *(("n1..cluster", 4000), ("n1\0", 4000)),  # an empty part, or a NUL
    ],
)
def test_what_is_no_address(job, host, port):
    client = job.client(0, (port,), host=host)
    assert not_found(job, client).startswith(f"port {port}: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": "x"}, Refused.RUN_ID),
        ({"nodes": 4}, Refused.NODES),
        ({"nodes": 2}, Refused.NODES),
        ({"spares": 1}, Refused.SPARES),
        ({"spares": 1, "failed": CANNOT}, Refused.SPARES),
    ],
)
def test_an_agent_that_is_refused(job, changes, reason):
    job.start_server()
    client = job.client(1, **changes)
    with pytest.raises(RefusedError) as caught:
        client.connect()
    refused = caught.value
    assert (refused.reason, refused.port) == (reason, job.port)
