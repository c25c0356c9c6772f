"""Agents and their coordinator over loopback: real sockets, no torch, a clock by hand.

Time stands still for all of them until a test lets it pass. Whatever ends before that
did not wait for a limit.
"""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self, Unpack

    from tests.support.simulated_job import Changes
    from torchrun_hpc.failures.failure import Summary
    from torchrun_hpc.rendezvous.peers import Peers
    from torchrun_hpc.rendezvous.protocol import Go
    from torchrun_hpc.rendezvous.search import Find

    Peer = Client | CoordinatorServer
    # What a program answers to what it gets; None if it keeps silent.
    Answers = Callable[[bytes], bytes | None]

T = TypeVar("T")

HERE = "127.0.0.1"
JOB = "19.0"

NOT_YET = "nobody listens (not started there yet, or ended)"

# Seconds of a job's clock, for limits that must not end anything.
LIMIT = 10.0
FOREVER = 1e9


def key_of(value: bytes = b"", launch: str = JOB) -> Key:
    """Return a node's key; without a value, the node has none."""
    key = Key(KeyFile(), launch)
    key.secret = Secret(launch, value)
    return key


def listening(port: int = 0) -> socket.socket:
    """Listen on a port; 0 for any."""
    server = socket.create_server((HERE, port))
    # Accepted sockets inherit this: no message waits for the kernel's own clock.
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return server


# --- threads and time -----------------------------------------------------------------


def started(function: Callable[[], T]) -> Future[T]:
    """Call in a thread; return what it returns, later."""
    later: Future[T] = Future()

    def run() -> None:
        try:
            later.set_result(function())
        except BaseException as error:  # noqa: BLE001 - for who waits
            later.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return later


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Call all at once, in threads; return what they return."""
    return [later.result(PATIENCE) for later in [started(each) for each in functions]]


def waits(client: Client) -> bool:
    """Return whether a thread waits for something to change."""
    changed: Any = client._changed
    return bool(changed._waiters)


def settle(*peers: Peer, aside: bool = True) -> None:
    """Let the threads of clients and servers do all that they can do now."""
    for peer in peers * 3:  # question, answer, and what follows
        for _ in range(2):  # what has arrived is handled after what is called
            done, loop = threading.Event(), peer._loop
            if aside:
                loop.call(loop.call_aside, done.set)  # after what is reported
            else:
                loop.call(done.set)
            while loop._thread.is_alive() and not done.wait(0.05):
                pass


def loop_started() -> Loop:
    """Return a loop whose thread runs."""
    loop = Loop()
    loop.start()
    return loop


class Clock:
    """The time of clients and servers: it stands still until a test lets it pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._peers: list[Peer] = []

    def __call__(self) -> float:
        """Return what time it is."""
        return self.now

    def drive(self, peer: Peer) -> None:
        """Let this be the clock of a client or a server."""
        events: Any = peer._loop.events
        events.time = self
        if isinstance(peer, CoordinatorServer):
            peer._counted = self.now
        self._peers.append(peer)

    def go_on(self, seconds: float, step: float = 1.0) -> None:
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

    def passes_until(self, condition: Callable[[], object], step: float = 0.5) -> None:
        """Let time pass until a condition holds."""

        def holds() -> bool:
            if not (is_so := bool(condition())):
                self.go_on(step, step)
            return is_so

        until(holds)

    def passes_while(
        self, *functions: Callable[[], Any], step: float = 0.5
    ) -> list[Any]:
        """Let time pass until all return, in threads; return what they return."""
        running = [started(each) for each in functions]
        self.passes_until(lambda: all(later.done() for later in running), step)
        return [later.result() for later in running]


# --- the job --------------------------------------------------------------------------


class LoopbackClient(Client):
    """The real client of an agent, which knows how to look for its coordinator.

    Attributes:
        search: The search at the coordinator's expected address.
        peers: The other members, if the job has spares.
    """

    search: Search
    peers: Peers | None = None

    def connect(self, find: Find | None = None, peers: Peers | None = None) -> None:
        """Find the coordinator, and wait until it accepts this agent."""
        super().connect(find or self.search.find, peers or self.peers)


class LoopbackJob:
    """A simulated job, if it is started, whose agents are real clients.

    Attributes:
        server: The server of the coordinator, once it is started.
        simulated: The simulated job with this coordinator.
        port: The server's port.
        events: What each node's agent must report, by node: news, and summaries.
    """

    server: CoordinatorServer
    simulated: SimulatedJob
    port: int

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[list[Any]] = [[], [], []]
        self._clients: list[LoopbackClient] = []
        self._ends = ExitStack()
        self._ends.enter_context(mock.patch.object(servers, "now", self.clock))

    def unused_port(self) -> int:
        """Return a port that only the job itself may listen on."""
        bound = self._ends.enter_context(closing(socket.socket()))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HERE, 0))
        return int(bound.getsockname()[1])

    def start_server(
        self,
        port: int = 0,
        unknown_peers: int = servers.UNKNOWN_PEERS,
        key: Key | None = None,
        clock: Clock | None = None,
        **changes: Unpack[Changes],
    ) -> None:
        """Start the coordinator, with changed settings of the job."""
        server = listening(port)
        self.port = server.getsockname()[1]
        settings: Changes = {"join_timeout": 60, "silence_timeout": 120, **changes}
        self.simulated = SimulatedJob(**settings)
        self.server = CoordinatorServer(
            loop_started(),
            server,
            self.simulated.coordinator,
            key or key_of(),
            unknown_peers,
        )
        (clock or self.clock).drive(self.server)
        self.server.start()
        self._ends.callback(self.end_server)

    def end_server(self) -> None:
        """End the coordinator and its thread without a word, as its death does."""
        if self.server._loop._thread.is_alive():
            self.server.close(0, 0)
            self.server._loop.close()

    def fail(self, failure: Failure) -> None:
        """Let the coordinator end the job, although none of its agents gives up."""
        self.server._loop.call(self.server.coordinator.fail, failure)
        self.server._loop.call(self.server.flush)

    def client(  # noqa: PLR0913 - what differs
        self,
        rank: int,
        ports: Sequence[int] | None = None,
        *,
        host: str = HERE,
        timeout: float = LIMIT,
        notice_ports: Sequence[int] = (),
        listener: Listener | None = None,
        silence_timeout: int = 120,
        loop: Loop | None = None,
        key: Key | None = None,
        **changes: Any,
    ) -> LoopbackClient:
        """Make the client of an agent, by default of node ``rank`` of the job.

        Args:
            rank: Its node rank.
            ports: The coordinator's possible ports; by default, the port of the server.
            host: The coordinator's host.
            timeout: The limit of the search.
            notice_ports: The ports on which the coordinator tells that it cannot start.
            listener: What it does with news; by default, it adds them to `events`.
            silence_timeout: After which time a silent coordinator is lost.
            loop: The loop, if it is not a new one.
            key: The node's key; by default, it has none.
            **changes: Changes of its join request.
        """
        request = replace(REQUEST, **agent_of(rank) | changes)
        client = LoopbackClient(
            loop or loop_started(),
            request,
            Member(rank, first_record(request.nodes, request.spares, 0)),
            silence_timeout,
            listener or self._listener(rank),
        )
        ports = ports or (self.port,)
        address = CoordinatorAddress(host, ports, timeout, notice_ports)
        client.search = Search(request, address, key or key_of(), client.tell)
        self.clock.drive(client)
        self._clients.append(client)
        return client

    def connect(self, rank: int, **options: Any) -> LoopbackClient:
        """Make the client of an agent as `client` does, and connect it."""
        client = self.client(rank, **options)
        client.connect()
        return client

    def _listener(self, rank: int) -> Listener:
        events = self.events[rank]

        def report(summary: Summary) -> Failure:
            events.append(summary)
            return summary.first

        return Listener(events.append, report)

    def connected(
        self, *ranks: int, **changes: Unpack[Changes]
    ) -> list[LoopbackClient]:
        """Start the coordinator, and agents that connect to it: by default, all."""
        self.start_server(**changes)
        clients = [self.client(rank) for rank in ranks or range(3)]
        together(*(client.connect for client in clients))
        return clients

    def at_work(self, **changes: Unpack[Changes]) -> list[LoopbackClient]:
        """Start the coordinator, and all agents; let them join the first round."""
        clients = self.connected(**changes)
        join_all(clients)
        return clients

    def close(self) -> None:
        """End all clients, and the coordinator."""
        for client in self._clients:
            if client.state.is_running:
                client._loop.call(client._disconnect)
                until(partial(_has_ended, client))
            client._loop.close()
        self._ends.close()


def _has_ended(client: Client) -> bool:
    return not client.state.is_running


def take_part(client: Client) -> Go:
    """Wait for the next round; return the coordinator's `Go`."""
    return client.take_part(lambda: STORE)[0]


def join_all(clients: Iterable[Client]) -> list[Go]:
    """Let all agents wait for the next round; return what they get."""
    return together(*(partial(take_part, client) for client in clients))


def failure_of(client: Any) -> Failure:
    """Wait until an agent, or its handler, hears why the job failed."""
    failure: Failure = until(lambda: client.state.failure)
    return failure


# --- other programs -------------------------------------------------------------------


class Raw:
    """A peer that writes and reads lines."""

    def __init__(
        self, port: int, timeout: float = PATIENCE, key: Key | None = None
    ) -> None:
        self._port, self._secret = port, (key or key_of()).secret
        self._socket = socket.create_connection((HERE, port), timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send anything."""
        self._socket.sendall(data)

    def send_message(self, message: Any) -> None:
        """Send a message, or plain data as they are."""
        if not isinstance(message, dict):
            data = wire.encode(message, FROM_AGENT)
            assert wire.decode(FROM_AGENT, json.loads(json.dumps(data))) == message
            message = data
        self.send(wire.to_line(message))

    def request(self, rank: int, **changes: Any) -> None:
        """Send the join request of a node's agent, with a proof."""
        self.prove(**request_of(rank, **changes))

    def prove(self, **request: Any) -> None:
        """Send a request, and prove whose it is."""
        self.send_message(self.proved(request))

    def proved(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request with its proof, for which the other side waits."""
        steps = self._secret.call((HERE, self._port), request)
        self.send_message(next(steps))
        return steps.send(self.receive())

    def accepted(self, rank: int, **changes: Any) -> Self:
        """Send a node's join request; see that the coordinator accepts it."""
        self.request(rank, **changes)
        assert isinstance(self.receive(), Welcome)
        return self

    def take_part(self) -> Any:
        """Take part in the first round, not as node rank 0; return its `Go`."""
        self.send_message(Join())
        return self.receive()

    def receive(self) -> Any:
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

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


@contextmanager
def other_program(answer: Answers, port: int = 0) -> Iterator[int]:
    """Serve another program; yield its port.

    Args:
        answer: What it answers.
        port: The port; 0 for any.
    """
    server = listening(port)
    connections: list[socket.socket] = []

    def talk(connection: socket.socket) -> None:
        with suppress(OSError):
            while data := connection.recv(4096):
                answered = answer(data)
                if answered is not None:
                    connection.sendall(answered)

    def serve() -> None:
        with suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                started(partial(talk, connections[-1]))

    started(serve)
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in connections:
            connection.close()


def after_proof(answer: Answers) -> Answers:
    """Prove to be the coordinator to whoever calls, and then answer like this."""

    def prove_first(data: bytes) -> bytes | None:
        if b'"to":[' not in data:
            return answer(data)
        hello = wire.from_json(data)
        steps = key_of().secret.listen(*hello["to"])
        next(steps)
        return wire.to_line(steps.send(hello))

    return prove_first


def answer_with(message: Any) -> Answers:
    """Answer anything with a message of a coordinator, or plain data."""
    is_plain = isinstance(message, dict)
    data = message if is_plain else wire.encode(message, FROM_COORDINATOR)
    return lambda _: wire.to_line(data)


VERSION = protocol.VERSION
WELCOME = Welcome(0, (0, (0, 0)), 0)
OTHER_PROGRAMS: dict[str, Answers] = {
    "one that never answers": lambda _: None,
    "an echo": lambda data: data,
    "one of SSH": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n",
    "one of the web": lambda _: b"HTTP/1.0 400 Bad request\r\n\r\n",
    "noise": lambda _: b"\0\xff\n" * 100,
    "a number": lambda _: b"5\n",
    "a long line": lambda _: b"[" + b"[]," * 2000 + b"[]]\n",
    "a welcome at once": answer_with(WELCOME),
    "a failure at once": answer_with(Ended(Failure(Kind.AGENT, (0,), text="x"))),
    "a refusal at once": answer_with(Refused.TAKEN),
    "a member at once": answer_with(Standby(0, coordinates=True, has_quorum=True)),
    "a welcome of another version": answer_with({"welcome": VERSION + 1, "round": 0}),
    "a welcome without a round": answer_with({"welcome": {"coordinator": 0}}),
    "a refusal without a reason": answer_with({"refused": "bored"}),
    "a failure that is none": answer_with({"ended": {"failure": 1}}),
    "a failure of nothing": answer_with({"ended": {"failure": {}}}),
    "a heartbeat": answer_with(Heartbeat()),
}


FAILURE_BEFORE = Failure(Kind.AGENT, (0,), text="HPC055 cannot listen")
