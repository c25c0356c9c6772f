"""The coordinator's server: it passes messages from the agents to it, and back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from torchrun_hpc import wire
from torchrun_hpc.host.network import bound_socket
from torchrun_hpc.rendezvous import members, protocol
from torchrun_hpc.rendezvous.coordinator import Coordinator
from torchrun_hpc.rendezvous.protocol import CLOSE, RESET, Settings
from torchrun_hpc.rendezvous.end import End

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from concurrent.futures import Future

    from torchrun_hpc.failures.failure import Failure
    from torchrun_hpc.planning.meeting import Meeting
    from torchrun_hpc.rendezvous.key_value_store import Answer

# As many as the kernel allows (net.core.somaxconn): thousands connect at once.
BACKLOG = 65535

# Seconds.
_TICK = 1.0
_JOIN_REQUEST_TIMEOUT = 30.0
CLOSE_TIMEOUT = 5.0
LATE_NODES_TIMEOUT = 30.0  # for nodes that connect when the job has failed already

# Connections of unknown peers, which have sent no join request yet, beside one for each
# node.
UNKNOWN_PEERS = 256

# Errors of accept(2) where no other file can be opened.
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Bytes that are kept for an agent that does not read.
_UNSENT_LIMIT = 2 * protocol.LINE_LIMIT


def now() -> float:
    """Return seconds that also pass while this process or its machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def listen(address: str | None, port: int) -> socket.socket:
    """Open a listening socket, on all addresses if none is known.

    Raises:
        OSError: The port is taken, or the address is not this node's.
    """
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    opened = bound_socket(address or "0.0.0.0", port)
    try:
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def serve_failure(meeting: Meeting, failure: Failure, limit: float) -> None:
    """Accept the other nodes only to inform them why this one cannot start.

    Args:
        meeting: Where the nodes meet.
        failure: Why it cannot start.
        limit: Seconds to wait for nodes that have not connected.
    """
    address = meeting.listen[0] if meeting.listen else None
    settings = Settings(
        job=meeting.launch_id,
        run_id="",
        nodes=meeting.nodes,
        coordinator=meeting.node_rank,
        max_restarts=0,
        join_timeout=0,
        silence_timeout=members.SILENCE_REPORT,
        spares=meeting.spares.number,
    )
    for port in (*meeting.ports, *meeting.notice_ports):
        with contextlib.suppress(OSError):
            server = CoordinatorServer(listen(address, port), Coordinator(settings))
            break
    else:
        return
    server.fail(failure)  # before any node is accepted
    server.start()
    server.close(late_timeout=limit)


class Answering(Protocol):
    """What a server asks: a coordinator, or what may become one; see `Coordinator`."""

    settings: Settings
    outbox: list[Answer]

    @property
    def all_informed(self) -> bool:
        """See `Coordinator`."""

    @property
    def expects_nodes(self) -> bool:
        """See `Coordinator`."""

    def receive(self, connection: Hashable, message: Mapping[str, Any]) -> None:
        """See `Coordinator`."""

    def disconnected(self, connection: Hashable, *, ended: bool = False) -> None:
        """See `Coordinator`."""

    def tick(self, seconds: int = 1) -> None:
        """See `Coordinator`."""

    def fail(self, failure: Failure) -> None:
        """See `Coordinator`."""


class CoordinatorServer:
    """Serves a coordinator, in a thread of its own.

    Args:
        listening: The socket to listen on; bound, and closed by this server.
        coordinator: Decides what is answered.
        unknown_peers: How many connections it may hold beside one for each node. Where
            there are more, the oldest one without a join request is closed, because
            the next one may be an agent.
        on_problem: Called from the thread, once, where a connection cannot be accepted
            all the same, with the system's reason.
    """

    def __init__(
        self,
        listening: socket.socket,
        coordinator: Answering,
        unknown_peers: int = UNKNOWN_PEERS,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.coordinator = coordinator
        self._listening = listening
        listening.settimeout(0)
        self._on_problem = on_problem
        self._has_reported = False
        self._unknown: dict[Hashable, _Connection] = {}  # the oldest is the first
        self._connections: dict[Hashable, _Connection] = {}
        self._limit = coordinator.settings.nodes + unknown_peers
        self._opening: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._all_informed = threading.Event()
        self._is_closing = False
        self._expects_nodes = False
        self._counted = now()  # until when the coordinator has counted seconds
        self._thread = threading.Thread(
            target=self._run, name="coordinator", daemon=True
        )

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(
        self, timeout: float = CLOSE_TIMEOUT, late_timeout: float = LATE_NODES_TIMEOUT
    ) -> None:
        """Stop to serve as soon as all agents know how the job ended.

        Args:
            timeout: Seconds to wait for that.
            late_timeout: The same for nodes that have not connected yet.
        """
        if not self._thread.is_alive():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self.flush)
        start = self._loop.time()
        while not self._all_informed.wait(0.05):
            limit = late_timeout if self._expects_nodes else timeout
            if self._loop.time() - start > limit:
                break
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1)

    def fail(self, failure: Failure) -> None:
        """End the job, also where this node's own agent is not connected any more."""
        self._loop.call_soon_threadsafe(self.coordinator.fail, failure)
        self._loop.call_soon_threadsafe(self.flush)

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call something of the coordinator in the thread; return the result, later."""

        async def called() -> Any:
            try:
                return function(*args)
            finally:
                self.flush()

        return asyncio.run_coroutine_threadsafe(called(), self._loop)

    # --- in the thread ------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._listen()
        self._loop.call_later(_TICK, self._tick)
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._loop.run_until_complete(self._close_all())
            self._loop.close()

    async def _close_all(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        await asyncio.sleep(0)  # sends what it can

    def _listen(self) -> None:
        # Not asyncio's own server, which writes a traceback for each connection for
        # which no file can be opened.
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accept one connection; the loop calls again while there are more."""
        try:
            opened, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_FILES and not self._abort_oldest():
                self._pause_accepting(str(error.strerror))
            return  # it has ended already, or waits
        if len(self._connections) >= self._limit:
            self._abort_oldest()
        opened.settimeout(0)
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: _Connection(self), opened)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _abort_oldest(self) -> bool:
        """Abort the oldest connection of an unknown peer; say whether there is one."""
        oldest = next(iter(self._unknown), None)
        if oldest is not None:
            self._unknown.pop(oldest).abort()
        return oldest is not None

    def _pause_accepting(self, reason: str) -> None:
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_TICK, self._listen)
        if not self._has_reported:
            self._has_reported = True
            self._on_problem(reason)

    def _tick(self) -> None:
        self._loop.call_later(_TICK, self._tick)
        self.catch_up(1)
        self.flush()

    def catch_up(self, least: int = 3) -> None:
        """Let the coordinator count the seconds that have passed, if so many have.

        Late ones come before anything that is read, which may be as old.
        """
        if (seconds := int(now() - self._counted)) >= least:
            self._counted += seconds
            self.coordinator.tick(seconds)

    def flush(self) -> None:
        """Send what the coordinator has left to be sent."""
        outbox = [*self.coordinator.outbox]
        self.coordinator.outbox.clear()
        last: Mapping[str, Any] | None = None
        line = b""
        for key, message in outbox:
            connection = self._connections.get(key)
            if connection is not None and message is CLOSE:
                connection.close()
            elif connection is not None and message is RESET:
                connection.abort()
            elif connection is not None:
                if message is not last:  # else all get the same
                    last, line = message, wire.to_line(message)
                connection.send(line)
        self._expects_nodes = self.coordinator.expects_nodes
        if self._is_closing and self.coordinator.all_informed:
            self._all_informed.set()

    def connected(self, connection: _Connection) -> None:
        """Keep a new connection."""
        self._unknown[connection] = self._connections[connection] = connection

    def identified(self, connection: _Connection) -> None:
        """Take note that a connection has sent its first line."""
        self._unknown.pop(connection, None)

    def disconnected(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self._unknown.pop(connection, None)
        if self._connections.pop(connection, None) is not None:
            self.catch_up()
            self.coordinator.disconnected(connection, ended=connection.at_end)
            self.flush()


class _Connection(End):
    """The connection of an agent, or of an unknown peer."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._server = server
        self._lines = wire.Lines(protocol.JOIN_REQUEST_LIMIT)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connected(self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_JOIN_REQUEST_TIMEOUT, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._server.catch_up()
        try:
            for message in self._lines.feed(data):
                if self._transport.is_closing():  # it is refused, or has left
                    break
                if self._deadline is not None:
                    self._deadline.cancel()
                    self._deadline = None
                    self._lines.limit = protocol.LINE_LIMIT
                    self._server.identified(self)
                self._server.coordinator.receive(self, message)
                self._server.flush()
        except wire.WireError:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.disconnected(self)

    def send(self, line: bytes) -> None:
        if self._transport.get_write_buffer_size() > _UNSENT_LIMIT:
            self.abort()
        else:
            self._transport.write(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._transport.close()
