"""Agents and their coordinator over loopback: real sockets, no torch, a clock by hand.

Time stands still for all of them until a test lets it go on: what ends without that has
waited for nothing.
"""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from tests.support.patience import PATIENCE, until
from tests.support.simulated_job import (
    REQUEST,
    STORE,
    SimulatedJob,
    agent_of,
    request_of,
)
from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous import server as servers
from torchrun_hpc.rendezvous.client import Client, Listener
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.key import Key, Secret
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.member import Member
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Ended,
    Heartbeat,
    Join,
    Standby,
    Welcome,
)
from torchrun_hpc.rendezvous.record import first_record
from torchrun_hpc.rendezvous.search import CoordinatorAddress, Search
from torchrun_hpc.rendezvous.server import CoordinatorServer

HERE = "127.0.0.1"
JOB = "19.0"

NOT_YET = "nobody listens (not started there yet, or ended)"

# Seconds of a job's clock: of what is not to end by it.
LIMIT = 10.0
FOREVER = 1e9


def key_of(value=b"", launch=JOB):
    """Return a key; without a value, that of a node that has none."""
    made = Key(KeyFile(), launch)
    made.secret = Secret(launch, value)
    return made


def listening(port=0):
    opened = socket.create_server((HERE, port))
    # Also of what it accepts: no message waits for the kernel's own clock.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def started(function):
    """Call in a thread; return what it returns, later."""
    later = Future()

    def run():
        try:
            later.set_result(function())
        except BaseException as error:  # noqa: BLE001 - for who waits
            later.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return later


def together(*functions):
    """Call all at once, in threads; return what they return."""
    return [later.result(PATIENCE) for later in [started(each) for each in functions]]


def waits(client):
    """Return whether a thread waits for something to change."""
    return bool(client._changed._waiters)


def settle(*peers, aside=True):
    """Let the threads of clients and servers do all that they can do now."""
    for peer in peers * 3:  # question, answer, and what follows
        for _ in range(2):  # what has arrived is handled behind what is called
            done, loop = threading.Event(), peer._loop
            if aside:
                loop.call(loop.call_aside, done.set)  # behind what is reported
            else:
                loop.call(done.set)
            while loop._thread.is_alive() and not done.wait(0.05):
                pass


def loop_started():
    """Return a loop whose thread runs."""
    made = Loop()
    made.start()
    return made


def take_part(client):
    """Wait for the next round; return the coordinator's `Go`."""
    return client.take_part(lambda: STORE)[0]


def failure_of(client):
    """Wait until an agent hears why the job failed."""
    return until(lambda: client.state.failure)


class Clock:
    """The time of clients and servers: it stands still until a test lets it go on."""

    def __init__(self):
        self.now = 1000.0
        self._peers = []

    def __call__(self):
        return self.now

    def drive(self, peer):
        peer._loop.events.time = self
        if isinstance(peer, CoordinatorServer):
            peer._counted = self.now
        self._peers.append(peer)

    def go_on(self, seconds, step=1.0):
        """Let time pass in steps, in each of which all do what is due."""
        settle(*self._peers)
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            settle(*self._peers)
            for peer in self._peers:
                if isinstance(peer, Client):
                    with peer._changed:
                        peer._changed.notify_all()

    def passes_until(self, condition, step=0.5):
        """Let time pass until a condition holds."""
        until(lambda: condition() or self.go_on(step, step))

    def passes_while(self, *functions, step=0.5):
        """Let time pass until all return, in threads; return what they return."""
        running = [started(each) for each in functions]
        self.passes_until(lambda: all(later.done() for later in running), step)
        return [later.result() for later in running]


def fail(server, failure):
    """Let a coordinator end its job, although none of its agents gives up."""
    server._loop.call(server.coordinator.fail, failure)
    server._loop.call(server.flush)


def end(server):
    """End a server, and the thread that it lives in."""
    if server._loop._thread.is_alive():
        server.close(0, 0)
        server._loop.close()


class LoopbackJob:
    """A simulated job, if it is started, whose agents are real clients.

    Attributes:
        events: What the agents of each node are to report: news, and summaries.
    """

    def __init__(self):
        self.clock = Clock()
        self._now, servers.now = servers.now, self.clock
        self.server = None
        self.simulated = None
        self.port = None
        self.events = [[], [], []]
        self._clients = []
        self._unused = []

    def unused_port(self):
        """Return a port on which nobody listens but what the job starts there."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HERE, 0))
        self._unused.append(held)
        return held.getsockname()[1]

    def start_server(
        self,
        port=0,
        unknown_peers=servers.UNKNOWN_PEERS,
        key=None,
        clock=None,
        **settings,
    ):
        opened = listening(port)
        self.port = opened.getsockname()[1]
        limits = {"join_timeout": 60, "silence_timeout": 120}
        self.simulated = SimulatedJob(**limits | settings)
        self.server = CoordinatorServer(
            loop_started(),
            opened,
            self.simulated.coordinator,
            key or key_of(),
            unknown_peers,
        )
        (clock or self.clock).drive(self.server)
        self.server.start()

    def end_server(self):
        """End the coordinator without a word, as its death does."""
        end(self.server)

    def client(  # noqa: PLR0913 - what differs
        self,
        rank,
        ports=None,
        *,
        where=None,
        listener=None,
        own_failure=None,
        silence_timeout=120,
        loop=None,
        key=None,
        **request,
    ):
        """Make the client of an agent, by default of node ``rank`` of the job."""
        where = {
            "host": HERE,
            "ports": ports or (self.port,),
            "timeout": LIMIT,
        } | (where or {})
        asks = replace(REQUEST, **agent_of(rank) | request, failed=own_failure)
        made = Client(
            loop or loop_started(),
            asks,
            Member(rank, first_record(asks.nodes, asks.spares, 0)),
            silence_timeout,
            listener or self._listener(rank),
        )
        address = CoordinatorAddress(**where)
        made._search = Search(asks, address, key or key_of(), made.tell)
        made.connect = partial(made.connect, made._search.find)
        self.clock.drive(made)
        self._clients.append(made)
        return made

    def _listener(self, rank):
        events = self.events[rank]

        def report(summary):
            events.append(summary)
            return summary.first

        return Listener(events.append, report)

    def connected(self, *ranks, **settings):
        """Start the coordinator, and agents that connect to it: by default, all."""
        self.start_server(**settings)
        made = [self.client(rank) for rank in ranks or range(3)]
        together(*(client.connect for client in made))
        return made

    def at_work(self, **settings):
        """Start the coordinator, and all agents; let them join the first round."""
        made = self.connected(**settings)
        join_all(made)
        return made

    def close(self):
        for client in self._clients:
            if client.state.is_running:
                client._loop.call(client._disconnect)
                until(lambda client=client: not client.state.is_running)
            client._loop.close()
        if self.server is not None:
            self.end_server()
        for held in self._unused:
            held.close()
        servers.now = self._now


def join_all(made):
    return together(*(partial(take_part, client) for client in made))


class Raw:
    """A peer that writes and reads lines."""

    def __init__(self, port, timeout=PATIENCE, key=None):
        self._port, self._secret = port, (key or key_of()).secret
        self._socket = socket.create_connection((HERE, port), timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, data):
        self._socket.sendall(data)

    def send_message(self, message):
        """Send a message, or plain data as they are."""
        if not isinstance(message, dict):
            data = wire.encode(message, FROM_AGENT)
            assert wire.decode(FROM_AGENT, json.loads(json.dumps(data))) == message
            message = data
        self.send(wire.to_line(message))

    def request(self, rank, **changes):
        self.prove(**request_of(rank, **changes))

    def prove(self, **request):
        """Send a request, and prove whose it is."""
        self.send_message(self.proved(request))

    def proved(self, request):
        """Return a request with its proof, for which the other side waits."""
        steps = self._secret.call((HERE, self._port), request)
        self.send_message(next(steps))
        return steps.send(self.receive())

    def take_part(self):
        """Take part in the first round, not as node rank 0; return its `Go`."""
        self.send_message(Join())
        return self.receive()

    def receive(self):
        """Return the next message but heartbeats, or a proof; None at the end."""
        with suppress(ConnectionResetError):
            for line in self._file:
                data = json.loads(line)
                if "proof" in data:
                    return data
                message = wire.decode(FROM_COORDINATOR, data)
                assert wire.to_line(wire.encode(message, FROM_COORDINATOR)) == line
                if not isinstance(message, Heartbeat):
                    return message
        return None

    def close(self):
        self._file.close()
        self._socket.close()


@contextmanager
def other_program(answer, port=0):
    """Serve another program.

    Args:
        answer: What it answers to what it gets; None if it keeps silent.
        port: Where; 0 for any.
    """
    server = listening(port)
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


def proving(answer):
    """Prove to be the coordinator to whoever calls, and then answer like this."""

    def prove_first(data):
        if b'"to":[' not in data:
            return answer(data)
        hello = wire.from_json(data)
        steps = key_of().secret.listen(*hello["to"])
        next(steps)
        return wire.to_line(steps.send(hello))

    return prove_first


def line(message):
    """Answer anything with a message of a coordinator, or plain data."""
    is_plain = isinstance(message, dict)
    data = message if is_plain else wire.encode(message, FROM_COORDINATOR)
    return lambda _: wire.to_line(data)


VERSION = protocol.VERSION
WELCOME = Welcome(0, (0, (0, 0)), 0)
OTHER_PROGRAMS = {
    "one that never answers": lambda _: None,
    "an echo": lambda data: data,
    "one of SSH": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n",
    "one of the web": lambda _: b"HTTP/1.0 400 Bad request\r\n\r\n",
    "noise": lambda _: b"\0\xff\n" * 100,
    "a number": lambda _: b"5\n",
    "a long line": lambda _: b"[" + b"[]," * 2000 + b"[]]\n",
    "a welcome at once": line(WELCOME),
    "a failure at once": line(Ended(Failure(Kind.AGENT, (0,), text="x"))),
    "a refusal at once": line(Refused.TAKEN),
    "a reply of a member at once": line(Standby(0, coordinates=True, has_quorum=True)),
    "a welcome of another version": line({"welcome": VERSION + 1, "round": 0}),
    "a welcome without a round": line({"welcome": {"coordinator": 0}}),
    "a refusal without a reason": line({"refused": "bored"}),
    "a failure that is none": line({"ended": {"failure": 1}}),
    "a failure of nothing": line({"ended": {"failure": {}}}),
    "a heartbeat": line(Heartbeat()),
}


FAILURE_BEFORE = Failure(Kind.AGENT, (0,), text="HPC055 cannot listen")
