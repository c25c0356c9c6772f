"""Agents and their coordinator over loopback: real sockets, no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from torchrun_hpc.planning.endpoints import notice_ports
from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.rendezvous import client as clients
from torchrun_hpc.rendezvous import coordinator, protocol, search
from torchrun_hpc.rendezvous import server as servers
from torchrun_hpc.rendezvous.client import Client, JobFailedError
from torchrun_hpc.rendezvous.coordinator import Settings
from torchrun_hpc.rendezvous.protocol import Failure, JoinRequest, Kind, Refusal
from torchrun_hpc.rendezvous.search import (
    CoordinatorAddress,
    CoordinatorNotFoundError,
    RefusedError,
)
from torchrun_hpc.rendezvous.server import CoordinatorServer

HERE = "127.0.0.1"
STORE = (HERE, 40000)
SETTINGS = Settings(
    job="19.0",
    run_id="mine",
    nodes=3,
    coordinator=0,
    max_restarts=0,
    join_timeout=60,
    silence_timeout=120,
)
REQUEST = JoinRequest("19.0", "mine", 3, 0, "n0", 100, "0.1.0")

NOT_YET = "nobody listens (not started there yet, or ended)"

# Seconds that anything may take here.
LIMIT = 10.0


def listening(port=0):
    return socket.create_server((HERE, port))


def free_port():
    with listening() as found:
        return found.getsockname()[1]


def together(*functions):
    """Call all at once, in threads; return what they return."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(f) for f in functions]]


def wait_until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def failure_of(client):
    """Wait until an agent hears why the job failed."""
    wait_until(lambda: client.failure)
    return client.failure


class Job:
    """A coordinator, if it is started, and clients to close after the test."""

    def __init__(self):
        self.server = None
        self.port = None
        self._clients = []

    def start_server(self, port=0, unknown_peers=servers.UNKNOWN_PEERS, **settings):
        opened = listening(port)
        self.port = opened.getsockname()[1]
        self.server = CoordinatorServer(
            opened, replace(SETTINGS, **settings), unknown_peers
        )
        self.server.start()

    def client(
        self,
        rank,
        ports=None,
        *,
        where=None,
        on_event=None,
        own_failure=None,
        **request,
    ):
        """Make the client of an agent, by default of node ``rank`` of the job."""
        where = {
            "host": HERE,
            "ports": ports or (self.port,),
            "timeout": LIMIT,
            "silence_timeout": 120,
        } | (where or {})
        request = {"rank": rank, "host": f"n{rank}", "pid": 100 + rank} | request
        made = Client(
            replace(REQUEST, **request),
            CoordinatorAddress(**where),
            on_event or (lambda _: None),
            own_failure,
        )
        self._clients.append(made)
        return made

    def all_connected(self):
        made = [self.client(rank) for rank in range(3)]
        together(*(client.connect for client in made))
        return made

    def all_at_work(self):
        made = self.all_connected()
        join_all(made)
        return made

    def close(self):
        for client in self._clients:
            client.leave()
        if self.server is not None:
            self.server.close(0.5, 0.5)


def join_all(made):
    return together(
        *(
            lambda m=client: m.join(STORE if m.request.rank == 0 else None)
            for client in made
        )
    )


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """Let seconds be shorter."""
    monkeypatch.setattr(servers, "_TICK", 0.02)
    monkeypatch.setattr(clients, "_TICK", 0.02)


class Raw:
    """A peer that writes and reads lines."""

    def __init__(self, port):
        self._socket = socket.create_connection((HERE, port), timeout=LIMIT)
        self._file = self._socket.makefile("rb")

    def send(self, data):
        self._socket.sendall(data)

    def send_message(self, **message):
        self.send(protocol.encode(message))

    def request(self, rank, **changes):
        request = replace(REQUEST, rank=rank, host=f"n{rank}", pid=100 + rank)
        self.send_message(protocol=protocol.VERSION, **asdict(request) | changes)

    def receive(self):
        """Return the next message but heartbeats; None at the end."""
        with suppress(ConnectionResetError):
            for line in self._file:
                message = json.loads(line)
                if message != {"heartbeat": True}:
                    return message
        return None

    def close(self):
        self._file.close()
        self._socket.close()


@pytest.fixture
def raw(job):
    """Connect peers that may send anything to the coordinator."""
    made = []

    def connect():
        made.append(Raw(job.port))
        return made[-1]

    yield connect
    for each in made:
        each.close()


# --- a job --------------------------------------------------------------------------


def test_a_job_from_its_beginning_to_its_end(job):
    job.start_server()
    made = job.all_connected()
    assert [client.next_round for client in made] == [0, 0, 0]
    for go in join_all(made):
        assert go == {"go": 0, "store": list(STORE)}
    together(*(client.finish for client in made))
    together(*(client.leave for client in made))
    start = time.monotonic()
    job.server.close(5, 5)
    assert time.monotonic() - start < 1
    assert [client.failure for client in made] == [None] * 3
    assert job.server.coordinator.finished


def test_a_job_that_restarts(job):
    job.start_server(max_restarts=1)
    made = job.all_at_work()
    made[1].watch({4: lambda: None, 5: lambda: 7})
    wait_until(lambda: all(client.is_over for client in made))
    assert [client.next_round for client in made] == [1, 1, 1]
    for go in join_all(made):
        assert go["go"] == 1
    assert not any(client.is_over for client in made)
    assert [client.failure for client in made] == [None] * 3
    made[2].watch({9: lambda: -9})
    wait_until(lambda: all(client.failure for client in made))
    assert {client.failure for client in made} == {
        Failure(Kind.WORKER, (2,), rank=9, code=-9)
    }
    for client in made:
        with pytest.raises(JobFailedError):
            client.join(None)
        with pytest.raises(JobFailedError):
            client.finish()


def test_workers_that_are_no_longer_watched(job):
    job.start_server()
    made = job.all_at_work()
    code = [None]
    made[1].watch({5: lambda: code[0]})
    made[1].watch({})
    code[0] = 1
    time.sleep(0.3)
    assert made[0].failure is None


def test_a_last_look_at_the_workers(job):
    job.start_server()
    made = job.all_at_work()
    made[1]._workers = {4: lambda: 0, 5: lambda: 3, 6: lambda: 1}
    made[1].check_workers()
    made[1].check_workers()
    assert failure_of(made[0]) == Failure(Kind.WORKER, (1,), rank=5, code=3)


def test_who_finishes_before_the_restart_takes_no_part_in_it(job):
    job.start_server(max_restarts=3)
    made = job.all_at_work()
    made[1].watch({5: lambda: 7})
    wait_until(lambda: made[2].is_over)
    with pytest.raises(JobFailedError) as caught:
        # It was about to: the restart of the others has crossed it.
        made[2].finish()
    assert caught.value.failure == Failure(
        Kind.WORKER, (1,), rank=5, code=7, finished=1
    )


def test_an_agent_that_gives_up(job):
    job.start_server(max_restarts=3)
    made = job.all_at_work()
    gone = Failure(Kind.SIGNAL, (1,), code=15)
    made[1].fail(gone)
    for client in (made[0], made[2]):
        with pytest.raises(JobFailedError) as caught:
            client.finish()
        assert caught.value.failure == gone


def test_the_first_failure_is_everybodys(job):
    job.start_server()
    made = job.all_at_work()
    first = Failure(Kind.SIGNAL, (1,), code=15)
    made[1].fail(first)
    wait_until(lambda: job.server.coordinator.failure)
    made[2].failure = None  # as if it was not informed yet
    made[2].fail(Failure(Kind.AGENT, (2,), text="mine"))
    made[2].leave()
    wait_until(lambda: made[0].failure)
    assert {made[0].failure, made[1].failure} == {first}


def test_a_late_agent_is_informed_of_the_failure(job):
    job.start_server()
    early = job.client(1)
    early.connect()
    gone = Failure(Kind.AGENT, (1,), text="why")
    early.fail(gone)
    wait_until(lambda: job.server.coordinator.failure)
    late = job.client(2)
    with suppress(JobFailedError):  # now or at the next step
        late.connect()
    with pytest.raises(JobFailedError) as caught:
        late.join(None)
    assert caught.value.failure == gone


def test_the_coordinator_stays_until_all_are_informed(job, raw):
    job.start_server()
    made = job.client(0)
    made.connect()
    silent = raw()
    silent.request(1)
    assert "welcome" in silent.receive()
    made.fail(Failure(Kind.AGENT, (0,), text="why"))
    assert silent.receive()["failed"]["text"] == "why"
    made.leave()
    start = time.monotonic()
    closing = threading.Thread(target=job.server.close)
    closing.start()
    time.sleep(0.3)
    assert closing.is_alive()
    silent.send_message(read=True)
    time.sleep(0.3)
    assert closing.is_alive()  # node 2 has not been there yet
    late = raw()
    late.request(2)
    assert late.receive()["failed"]["text"] == "why"
    late.send_message(read=True)
    closing.join(LIMIT)
    assert 0.3 < time.monotonic() - start < servers.CLOSE_TIMEOUT


def test_the_coordinator_does_not_stay_for_ever(job, raw):
    job.start_server()
    silent = raw()
    silent.request(1)
    silent.receive()
    start = time.monotonic()
    job.server.close(0.4, 0.4)
    assert 0.4 <= time.monotonic() - start < 2
    job.server.close()  # it is closed already


def test_a_failure_of_the_head_node(job):
    job.start_server()
    made = job.all_at_work()
    own = Failure(Kind.AGENT, (0,), text="why")
    job.server.fail(own)
    for client in made:
        assert failure_of(client) == own


def test_leaving_without_having_come(job):
    client = job.client(0, (free_port(),))
    client.leave()
    client.fail(Failure(Kind.AGENT, (0,)))
    client.leave()


# --- who is gone --------------------------------------------------------------------


def cut(client):
    """End an agent's connection without a word, as its death does."""
    client._in_thread(client._channel._transport.abort)


def test_an_agent_that_is_gone(job):
    job.start_server()
    events = []
    made = [job.client(0, on_event=events.append), job.client(1), job.client(2)]
    together(*(client.connect for client in made))
    join_all(made)
    cut(made[2])
    for client in made[:2]:
        assert failure_of(client) == Failure(Kind.LOST, (2,))
    assert events == []  # nobody is waited for


def test_an_agent_that_is_started_again(job):
    job.start_server(max_restarts=1)
    events = []
    made = [job.client(0, on_event=events.append), job.client(1), job.client(2)]
    together(*(client.connect for client in made))
    join_all(made)
    cut(made[2])
    wait_until(lambda: made[0].is_over and made[1].is_over)
    again = job.client(2, pid=999)
    again.connect()
    assert again.next_round == 1
    made[2] = again
    for go in join_all(made):
        assert go["go"] == 1
    assert events == [{"lost": 2}]


def test_the_coordinator_is_gone(job):
    job.start_server()
    made = job.all_at_work()
    job.server._loop.call_soon_threadsafe(job.server._loop.stop)
    for client in made:
        assert failure_of(client) == Failure(Kind.COORDINATOR)


def test_the_end_of_the_coordinator_is_no_loss_to_an_agent_that_has_finished(job):
    job.start_server()
    made = job.all_at_work()
    together(*(client.finish for client in made))
    job.server.close(0, 0)
    time.sleep(0.2)
    assert [client.failure for client in made] == [None] * 3


@pytest.mark.usefixtures("quick")
def test_an_agent_that_does_not_answer(job, raw):
    job.start_server(silence_timeout=60)
    events = []
    made = [job.client(0, on_event=events.append), job.client(1)]
    silent = raw()
    silent.request(2)
    silent.send_message(join=0)
    together(*(client.connect for client in made))
    join_all(made)
    for client in made:
        assert failure_of(client) == Failure(Kind.SILENT, (2,), code=60)
    # All others have answered all the time.
    reported = [event for event in events if "silent" in event]
    assert reported == [{"silent": [2], "left": 30}]


@pytest.fixture
def silent_coordinator(job):
    """Start a coordinator that sends a welcome, and nothing after it."""
    server = listening()
    job.port = server.getsockname()[1]
    ended = threading.Event()

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            welcome = {"welcome": protocol.VERSION, "job": "19.0", "round": 0}
            connection.sendall(protocol.encode(welcome))
            ended.wait(LIMIT)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    ended.set()
    thread.join()
    server.close()


@pytest.mark.usefixtures("quick", "silent_coordinator")
def test_a_coordinator_that_does_not_answer(job):
    events = []
    where = {"silence_timeout": 50}
    client = job.client(1, where=where, on_event=events.append)
    client.connect()
    with pytest.raises(JobFailedError) as caught:
        client.join(None)
    assert caught.value.failure == Failure(Kind.COORDINATOR, code=50)
    assert events == [{"coordinator_silent": coordinator.SILENCE_REPORT, "left": 20}]


@pytest.mark.usefixtures("quick")
def test_a_coordinator_that_answers_again(job):
    with other_program(line(welcome=protocol.VERSION, job="19.0", round=0)) as port:
        events = []
        where = {"silence_timeout": 1000}
        client = job.client(1, (port,), where=where, on_event=events.append)
        client.connect()
        wait_until(lambda: events)
        for number in range(3):
            client.send({"ask": number})
            time.sleep(0.2)
    reported = [event for event in events if "welcome" not in event]
    assert [*map(list, reported)] == [
        ["coordinator_silent", "left"],
        ["coordinator_answers"],
    ]
    assert coordinator.SILENCE_REPORT < reported[1]["coordinator_answers"] < 1000


@pytest.mark.usefixtures("quick")
def test_a_coordinator_that_is_stopped_for_a_while(job):
    """As all of them, by the scheduler: nobody is older than what it did itself."""
    job.start_server(silence_timeout=60)
    events = []
    where = {"silence_timeout": 60}
    client = job.client(0, where=where, on_event=events.append)
    client.connect()
    for loop in (job.server._loop, client._loop):
        loop.call_soon_threadsafe(time.sleep, 1.5)  # 75 of their seconds
    time.sleep(1.7)
    assert events == []
    assert client.failure is None


# --- the store ----------------------------------------------------------------------


def test_questions_to_the_store(job):
    job.start_server()
    made = job.all_at_work()
    assert made[1].ask({"set": {"a": "1", "b": "\xff"}}, LIMIT) is True
    assert made[2].ask({"get": ["b", "a"]}, LIMIT) == ["\xff", "1"]
    assert made[0].ask({"add": "a", "by": 2}, LIMIT) == 3
    assert made[0].ask({"check": ["a", "c"]}, LIMIT) is False

    def set_late():
        time.sleep(0.2)
        return made[0].ask({"set": {"c": "late"}}, LIMIT)

    answers = together(lambda: made[1].ask({"get": ["c"]}, LIMIT), set_late)
    assert answers == [["late"], True]


def test_an_answer_that_does_not_come(job):
    job.start_server()
    client = job.client(0)
    client.connect()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        client.ask({"get": ["a"]}, 0.3)
    assert 0.3 <= time.monotonic() - start < 2
    assert client.ask({"set": {"a": "1"}}, LIMIT) is True
    assert client.ask({"get": ["a"]}, LIMIT) == ["1"]


def test_no_answer_any_more(job):
    job.start_server()
    made = job.all_at_work()

    def fail():
        time.sleep(0.2)
        made[1].fail(Failure(Kind.AGENT, (1,), text="why"))

    def ask():
        with pytest.raises(JobFailedError):
            made[0].ask({"get": ["a"]}, LIMIT)

    together(ask, fail)


# --- where the coordinator is -------------------------------------------------------


@contextmanager
def other_program(answer):
    """Serve another program.

    Args:
        answer: What it answers to what it gets; None if it keeps silent.
    """
    server = listening()
    connections = []

    def talk(connection):
        with suppress(OSError):
            while data := connection.recv(4096):
                answered = answer(data)
                if answered is not None:
                    connection.sendall(answered)

    def serve():
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                threading.Thread(
                    target=talk, args=(connections[-1],), daemon=True
                ).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in connections:
            connection.close()


def line(**message):
    return lambda _: protocol.encode(message)


OTHER_PROGRAMS = {
    "one that never answers": lambda _: None,
    "an echo": lambda data: data,
    "one of SSH": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n",
    "noise": lambda _: b"\0\xff\n" * 100,
    "a number": lambda _: b"5\n",
    "a welcome to another job": line(welcome=1, job="20.0", round=0),
    "a welcome of another version": line(welcome=2, job="19.0", round=0),
    "a welcome without a round": line(welcome=1, job="19.0"),
    "a refusal without a reason": line(refused="bored", value=""),
    "a failure that is none": line(failed=1),
    "a failure of nothing": line(failed={}),
    "a heartbeat": line(heartbeat=True),
}


@pytest.mark.parametrize("case", OTHER_PROGRAMS)
def test_another_program_on_the_first_port(job, case):
    job.start_server(nodes=1)
    with other_program(OTHER_PROGRAMS[case]) as port:
        # One that says nothing keeps a port for longer than the others are tried.
        client = job.client(0, (port, job.port), nodes=1)
        start = time.monotonic()
        client.connect()
        assert time.monotonic() - start < 4
        assert client.join(STORE)["store"] == list(STORE)


@pytest.mark.parametrize("case", OTHER_PROGRAMS)
def test_another_program_and_nobody_else(job, case, monkeypatch):
    monkeypatch.setattr(search, "_ANSWER_TIMEOUT", 0.2)
    with other_program(OTHER_PROGRAMS[case]) as port:
        client = job.client(0, (port,), where={"timeout": 0.3})
        with pytest.raises(CoordinatorNotFoundError) as caught:
            client.connect()
    silent = case == "one that never answers"
    what = "somebody who says nothing" if silent else "somebody else"
    assert str(caught.value) == f"port {port}: {what}"


def test_a_web_server_on_the_first_port(job, capfd):
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_args):
            pass

    job.start_server(nodes=1)
    server = HTTPServer((HERE, 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        client = job.client(0, (server.server_port, job.port), nodes=1)
        client.connect()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_the_coordinator_of_another_job_on_the_first_port(job):
    other = Job()
    other.start_server(job="20.0")
    job.start_server(nodes=1)
    try:
        client = job.client(0, (other.port, job.port), nodes=1)
        client.connect()
        assert other.server.coordinator.failure is None
        lonely = job.client(1, (other.port, free_port()), where={"timeout": 0.2})
        with pytest.raises(
            CoordinatorNotFoundError, match=f"port {other.port}: another job; port "
        ):
            lonely.connect()
    finally:
        other.close()


def test_a_coordinator_that_is_late(job):
    port, events = free_port(), []
    client = job.client(0, (port,), nodes=1, on_event=events.append)
    starting = threading.Timer(1.3, lambda: job.start_server(port, nodes=1))
    starting.start()
    client.connect()
    starting.join()
    found = f"port {port}: {NOT_YET}"
    assert events == [{"looking": 1, "found": found}]


def test_a_late_coordinator_on_its_last_port(job):
    """All ports are tried now and then: the first one may be taken."""
    ports = [free_port() for _ in range(4)]
    client = job.client(0, ports, nodes=1)
    starting = threading.Timer(0.3, lambda: job.start_server(ports[-1], nodes=1))
    starting.start()
    client.connect()
    starting.join()


def test_no_coordinator_at_all(job):
    ports = (free_port(), free_port())
    client = job.client(0, ports, where={"timeout": 0.4})
    start = time.monotonic()
    with pytest.raises(CoordinatorNotFoundError) as caught:
        client.connect()
    assert 0.4 < time.monotonic() - start < 2
    assert str(caught.value) == f"port {ports[0]}, {ports[1]}: {NOT_YET}"


def test_a_coordinator_that_has_ended(job):
    """Whoever took a connection was there; a port that refuses each may be early."""
    with listening() as opened:
        port = opened.getsockname()[1]
        client = job.client(0, (port,), where={"timeout": 1})
        ending = threading.Thread(
            target=lambda: (opened.accept()[0].close(), opened.close())
        )
        ending.start()
        with pytest.raises(
            CoordinatorNotFoundError, match=f"port {port}: nobody listens any more"
        ):
            client.connect()
        ending.join()


CANNOT = Failure(Kind.AGENT, (2,), text="HPC018 torch cannot be imported")


def test_an_agent_that_cannot_start_ends_all(job):
    """Its --rdzv-id and number of nodes may be unknown, as where torch is missing."""
    job.start_server()
    others = [job.client(0), job.client(1)]
    together(*(client.connect for client in others))
    last = job.client(2, own_failure=CANNOT, run_id="")
    with suppress(JobFailedError):
        last.connect()
    assert [failure_of(client) for client in (*others, last)] == [CANNOT] * 3


def test_an_agent_that_cannot_start_is_informed_of_the_first_failure(job):
    job.start_server()
    job.server.fail(FAILURE_BEFORE)
    last = job.client(2, own_failure=CANNOT, run_id="")
    with suppress(JobFailedError):
        last.connect()
    assert failure_of(last) == FAILURE_BEFORE


def test_an_agent_that_comes_back_and_cannot_start(job):
    """It takes the place of one that is gone, or that it has been itself."""
    job.start_server()
    others = [job.client(0), job.client(1)]
    together(*(client.connect for client in others))
    same = job.client(1, own_failure=replace(CANNOT, nodes=(1,)), run_id="")
    with suppress(JobFailedError):
        same.connect()
        same.fail(replace(CANNOT, nodes=(1,)))
    assert failure_of(others[0]) == replace(CANNOT, nodes=(1,))


def test_another_job_on_a_port_for_notices(job):
    other = Job()
    other.start_server(job="20.0")
    try:
        where = {"notice_ports": (other.port,), "timeout": 0.5}
        client = job.client(1, (free_port(),), where=where)
        with pytest.raises(CoordinatorNotFoundError):
            client.connect()
    finally:
        other.close()


def test_a_second_agent_that_cannot_start_ends_nothing(job):
    """A launch within a worker, say: its node's own agent is at work."""
    job.start_server()
    first, *_ = job.all_at_work()
    second = job.client(1, pid=999, own_failure=replace(CANNOT, nodes=(1,)))
    with pytest.raises(RefusedError):
        second.connect()
    assert first.failure is None


FAILURE_BEFORE = Failure(Kind.AGENT, (0,), text="HPC111 cannot listen")


def test_a_coordinator_that_cannot_start_informs_all(job):
    """On a port of its own if those of the job are taken."""
    with listening() as taken:
        plan = LaunchPlan(
            title="", nodes=3, node_rank=0, workers=1, is_reporter=True, endpoint="",
            launch_id="19.0", ports=(taken.getsockname()[1],), listen=(HERE, 1),
        )  # fmt: skip
        others = [
            job.client(
                rank, plan.ports, where={"notice_ports": notice_ports(plan.launch_id)}
            )
            for rank in (1, 2)
        ]
        start = time.monotonic()
        failures = together(
            lambda: servers.serve_failure(plan, FAILURE_BEFORE, LIMIT),
            *(lambda client=client: failure_after(client) for client in others),
        )
        assert time.monotonic() - start < LIMIT - 1
    assert failures == [None, FAILURE_BEFORE, FAILURE_BEFORE]


def failure_after(client):
    with suppress(JobFailedError):
        client.connect()
    client.leave()
    return client.failure


def test_a_name_that_does_not_resolve(job, monkeypatch):
    def resolve(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    where = {"timeout": 0.2, "host": "no-such-host"}
    client = job.client(0, (1,), where=where)
    with pytest.raises(
        CoordinatorNotFoundError, match="port 1: Name or service not known"
    ):
        client.connect()


@pytest.mark.parametrize(
    ("changes", "reason", "value"),
    [
        ({"job": "20.0"}, Refusal.UNKNOWN, ""),
        ({"run_id": "x"}, Refusal.RUN_ID, "mine"),
        ({"nodes": 4}, Refusal.NODES, "3"),
        ({"nodes": 1}, Refusal.NODES, "3"),
    ],
)
def test_an_agent_that_is_refused(job, changes, reason, value):
    job.start_server()
    client = job.client(1, **changes)
    with pytest.raises(RefusedError) as caught:
        client.connect()
    refused = caught.value
    assert (refused.reason, refused.value, refused.port) == (reason, value, job.port)


def test_an_agent_of_another_version(job, monkeypatch):
    job.start_server()
    first = job.client(0)
    first.connect()
    with monkeypatch.context() as patched:
        patched.setattr(search, "VERSION", 2)
        with pytest.raises(RefusedError) as caught:
            job.client(1).connect()
    assert caught.value.reason is Refusal.VERSION
    assert failure_of(first).kind is Kind.REFUSED


def test_a_second_agent_of_one_node(job):
    job.start_server()
    first = job.client(1)
    first.connect()
    with pytest.raises(RefusedError) as caught:
        job.client(1, pid=999).connect()
    assert caught.value.reason is Refusal.TAKEN
    assert caught.value.value == "process 101 on n1"
    assert first.failure is None


def test_what_a_refusal_may_not_write_on_the_terminal(job):
    answer = line(refused="taken", value="\x1b[2Jx" + "y" * 500)
    with other_program(answer) as port:
        client = job.client(0, (port,))
        with pytest.raises(RefusedError) as caught:
            client.connect()
    assert caught.value.value.isprintable()
    assert len(caught.value.value) == 200


# --- what connects to the coordinator -----------------------------------------------

NO_AGENTS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": b"\0\xff\xfe" * 50 + b"\n",
    "a number": b"1\n",
    "an empty message": b"{}\n",
    "a verb of an agent": b'{"join":0}\n',
    "half a join request": b'{"protocol":1,"job":"19.0"}\n',
    "a long line": b"x" * (protocol.JOIN_REQUEST_LIMIT + 1),
    "a deep line": b"[" * 4000 + b"\n",
}


@pytest.mark.parametrize("case", NO_AGENTS)
def test_a_peer_that_is_no_agent_is_disconnected(job, raw, case, caplog, capfd):
    job.start_server(nodes=1)
    peer = raw()
    peer.send(NO_AGENTS[case])
    assert peer.receive() is None
    client = job.client(0, nodes=1)
    client.connect()
    assert client.join(STORE)
    assert (caplog.text, capfd.readouterr().err) == ("", "")


INVALID_MESSAGES = [
    {"join": 5},
    {"failed": 5},
    {"died": {}, "round": 0},
    {"ask": 1, "add": "a", "by": "x"},
    {"ask": 1, "add": "a", "by": float("inf")},
    {"ask": 1},
]


@pytest.mark.parametrize("message", INVALID_MESSAGES)
def test_an_agent_that_sends_an_invalid_message(job, raw, message, caplog, capfd):
    job.start_server()
    made = [job.client(0), job.client(1)]
    together(*(client.connect for client in made))
    odd = raw()
    odd.request(2)
    assert "welcome" in odd.receive()
    odd.send_message(join=0)
    join_all(made)
    assert "go" in odd.receive()
    odd.send_message(**message)
    while odd.receive() is not None:
        pass
    assert failure_of(made[0]) == Failure(Kind.LOST, (2,))
    assert (caplog.text, capfd.readouterr().err) == ("", "")


def test_a_peer_that_sends_nothing_is_disconnected(job, raw, monkeypatch):
    monkeypatch.setattr(servers, "_JOIN_REQUEST_TIMEOUT", 0.3)
    job.start_server()
    silent, slow, agent = raw(), raw(), raw()
    agent.request(1)
    assert "welcome" in agent.receive()
    slow.send(b'{"protocol"')
    assert silent.receive() is None
    assert slow.receive() is None
    agent.send_message(ask=1, check=["a"])  # after its request it may be silent
    assert agent.receive() == {"answer": 1, "value": False}


def test_the_oldest_unknown_peer_is_disconnected_for_the_next(job, raw):
    job.start_server(nodes=1, unknown_peers=2)
    there = [raw() for _ in range(3)]
    time.sleep(0.2)
    there.append(raw())
    assert there[0].receive() is None
    client = job.client(0, nodes=1)
    client.connect()
    assert there[1].receive() is None
    for other in there[2:]:  # the others are there, and the agent is not counted
        other.send_message(protocol=1, job="20.0")
        assert "refused" in other.receive()
    assert client.failure is None


def test_an_agent_that_does_not_read(job, raw, monkeypatch):
    """What is to be sent to it is not kept for ever."""
    monkeypatch.setattr(servers, "_UNSENT_LIMIT", 100_000)
    job.start_server()
    client = job.client(0)
    client.connect()
    silent = raw()
    silent.request(1)
    silent.receive()
    client.ask({"set": {"a": "x" * 1_000_000}}, LIMIT)
    for number in range(100):
        with suppress(OSError):
            silent.send_message(ask=number, get=["a"])
        if 1 not in job.server.coordinator._agents:
            break
        time.sleep(0.05)
    assert 1 not in job.server.coordinator._agents
    assert client.ask({"check": ["a"]}, LIMIT) is True


# --- signals ------------------------------------------------------------------------


class Signalled(Exception):  # noqa: N818
    """What torch's handler raises."""


@pytest.fixture
def signal_soon():
    """Send this process SIGTERM in a moment, which raises in the main thread."""

    def handle(_number, _frame):
        raise Signalled

    old = signal.signal(signal.SIGTERM, handle)
    started = []

    @contextmanager
    def soon():
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        started.append(timer)
        start = time.monotonic()
        timer.start()
        with pytest.raises(Signalled):
            yield
        assert time.monotonic() - start < 1.3

    yield soon
    for timer in started:
        timer.join()
    signal.signal(signal.SIGTERM, old)


def leave_at_once(client):
    start = time.monotonic()
    client.fail(Failure(Kind.SIGNAL, (client.request.rank,), code=15))
    client.leave()
    assert time.monotonic() - start < 1.5
    assert not client._thread.is_alive()


@pytest.mark.parametrize("who", ["nobody", *list(OTHER_PROGRAMS)[:2]])
def test_a_signal_while_the_coordinator_is_looked_for(job, who, signal_soon):
    nobody = free_port()
    with other_program(OTHER_PROGRAMS.get(who, OTHER_PROGRAMS["noise"])) as port:
        client = job.client(0, (nobody if who == "nobody" else port,))
        with signal_soon():
            client.connect()
        leave_at_once(client)


def test_a_signal_while_others_are_waited_for(job, signal_soon):
    job.start_server()
    client, other = job.client(0), job.client(1)
    client.connect()
    other.connect()
    with signal_soon():
        client.join(STORE)
    leave_at_once(client)
    assert failure_of(other) == Failure(Kind.SIGNAL, (0,), code=15)


def test_a_signal_while_an_answer_is_waited_for(job, signal_soon):
    job.start_server()
    made = job.all_at_work()
    with signal_soon():
        made[0].ask({"get": ["a"]}, LIMIT)
    leave_at_once(made[0])
    wait_until(lambda: made[1].failure)


def test_a_signal_while_others_are_at_work(job, signal_soon):
    job.start_server()
    made = job.all_at_work()
    with signal_soon():
        made[1].finish()
    leave_at_once(made[1])
    assert failure_of(made[2]) == Failure(Kind.SIGNAL, (1,), code=15)


@pytest.mark.usefixtures("silent_coordinator")
def test_a_signal_and_a_coordinator_that_does_not_answer(job, signal_soon):
    client = job.client(1)
    client.connect()
    with signal_soon():
        client.join(None)
    start = time.monotonic()
    client.fail(Failure(Kind.SIGNAL, (1,), code=15))
    client.leave()
    assert time.monotonic() - start < 3


# --- workers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_exit_code_of_a_child(program, code):
    child = subprocess.Popen([sys.executable, "-S", "-c", program])
    look = clients.exit_code_of(child.pid)
    wait_until(lambda: look() is not None)
    assert [look(), look()] == [code, code]  # it is still there to be collected
    assert child.wait() == code
    assert look() is None


def test_a_child_that_still_runs():
    child = subprocess.Popen(["sleep", "60"])
    look = clients.exit_code_of(child.pid)
    assert look() is None
    child.kill()
    child.wait()


def test_a_process_that_is_no_child():
    assert clients.exit_code_of(os.getppid())() is None
