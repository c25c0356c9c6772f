"""Agents and their coordinator over loopback: real sockets, no torch."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from torchrun_hpc.failures.collection import WorkerFailure
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous import server as servers
from torchrun_hpc.rendezvous.client import Client
from torchrun_hpc.rendezvous.coordinator import Coordinator, Settings
from torchrun_hpc.rendezvous.protocol import Failure, JoinRequest, Kind
from torchrun_hpc.rendezvous.search import (
    CoordinatorAddress,
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


def worker_failure(rank, **changes):
    """Return how a worker failed, of four on each of three nodes."""
    values = {"size": 12, "node": rank // 4, "local_rank": rank % 4, "code": 1}
    return WorkerFailure(rank, **values | {"time": 1.7e9} | changes)


def listening(port=0):
    return socket.create_server((HERE, port))


def free_port():
    with listening() as found:
        return found.getsockname()[1]


def together(*functions):
    """Call all at once, in threads; return what they return."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(f) for f in functions]]


def wait_until(condition, limit=LIMIT):
    end = time.monotonic() + limit
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
            opened, Coordinator(replace(SETTINGS, **settings)), unknown_peers
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


class Raw:
    """A peer that writes and reads lines."""

    def __init__(self, port, timeout=LIMIT):
        self._socket = socket.create_connection((HERE, port), timeout=timeout)
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


VERSION = protocol.VERSION
OTHER_PROGRAMS = {
    "one that never answers": lambda _: None,
    "an echo": lambda data: data,
    "one of SSH": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n",
    "noise": lambda _: b"\0\xff\n" * 100,
    "a number": lambda _: b"5\n",
    "a welcome to another job": line(welcome=VERSION, job="20.0", round=0),
    "a welcome of another version": line(welcome=VERSION + 1, job="19.0", round=0),
    "a welcome without a round": line(welcome=VERSION, job="19.0"),
    "a refusal without a reason": line(refused="bored", value=""),
    "a failure that is none": line(failed=1),
    "a failure of nothing": line(failed={}),
    "a heartbeat": line(heartbeat=True),
}


FAILURE_BEFORE = Failure(Kind.AGENT, (0,), text="HPC111 cannot listen")
