"""The coordinator's server, between the agents and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from concurrent import futures
from typing import TYPE_CHECKING, Any

from torchrun_hpc import waiting, wire
from torchrun_hpc.host.network import bound_socket
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.end import End
from torchrun_hpc.rendezvous.loop import now
from torchrun_hpc.rendezvous.proof import NOWHERE
from torchrun_hpc.rendezvous.protocol import CLOSE, RESET

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torchrun_hpc.rendezvous.coordinator import Coordinator
    from torchrun_hpc.rendezvous.key import Key
    from torchrun_hpc.rendezvous.loop import Loop
    from torchrun_hpc.rendezvous.proof import Steps

# The kernel's maximum (net.core.somaxconn): thousands connect at once.
BACKLOG = 65535

# Seconds.
_TICK = 1.0
_END_TIMEOUT = 0.5  # to send the rest
_SIGNAL_TIMEOUT = 0.5  # the main thread acts on a signal only after a wait
_JOIN_REQUEST_TIMEOUT = 30.0
CLOSE_TIMEOUT = 5.0
LATE_NODES_TIMEOUT = 30.0  # for nodes that connect after the job has failed

# Connections without a join request, besides one for each node.
UNKNOWN_PEERS = 256

# Errors of accept(2) when no other file can be opened.
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Bytes kept for an agent that does not read. All replies to a question come at once.
_UNSENT_LIMIT = 2 * protocol.LINE_LIMIT
_REPLY = 64 * 1024


def listen(address: str | None, port: int) -> socket.socket:
    """Open a listening socket; without an address, on all. May raise `OSError`."""
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return bound_socket(address or "0.0.0.0", port, BACKLOG)


class CoordinatorServer:
    """Serves a coordinator.

    It closes `listening`; without it, it serves only connections passed to `take`. A
    caller must prove that it has the same `key`. Beyond `unknown_peers`, it closes the
    oldest connection without a join request: the next caller may be an agent.
    `on_problem` is called aside, once, with the system's reason if a connection still
    cannot be accepted.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the last two are of tests
        self,
        loop: Loop,
        listening: socket.socket | None,
        coordinator: Coordinator,
        key: Key,
        unknown_peers: int = UNKNOWN_PEERS,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.coordinator = coordinator
        self._listening = listening
        self.key = key
        self._place = listening.getsockname()[:2] if listening else NOWHERE
        if listening is not None:
            listening.settimeout(0)
        self._on_problem = on_problem
        self._has_reported = False
        self._unknown: dict[_Connection, float] = {}  # since when, oldest first
        self._connections: dict[Hashable, _Connection] = {}
        nodes = coordinator.settings.nodes
        self._limit = nodes + unknown_peers
        self.unsent_limit = _UNSENT_LIMIT + nodes * _REPLY
        self._opening: set[asyncio.Task[Any]] = set()
        self._loop, self._events = loop, loop.events
        self._next_second: asyncio.TimerHandle | None = None
        self._flushed = asyncio.Event()
        self._end: futures.Future[None] | None = None
        self._counted = now()  # until when the coordinator has counted seconds

    def start(self) -> None:
        """Start serving."""
        self._loop.call(self._tick)

    def close(
        self, timeout: float = CLOSE_TIMEOUT, late_timeout: float = LATE_NODES_TIMEOUT
    ) -> None:
        """Stop serving as soon as all agents know how the job ended.

        Wait up to `timeout` seconds for them, and up to `late_timeout` for nodes that
        have not connected yet.
        """
        end = self._end or asyncio.run_coroutine_threadsafe(
            self._close(timeout, late_timeout), self._events
        )
        self._end = end
        waiting.until(
            lambda: futures.wait([end], _SIGNAL_TIMEOUT).done,
            max(timeout, late_timeout) + _END_TIMEOUT,
            pause=0,
        )

    # --- in the loop --------------------------------------------------------------

    async def _close(self, timeout: float, late_timeout: float) -> None:
        clock = self._events.time
        start = clock()
        while not self.coordinator.all_informed:
            limit = late_timeout if self.coordinator.expects_nodes else timeout
            if (left := start + limit - clock()) <= 0:
                break
            self._flushed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), left)
        if self._next_second is not None:
            self._next_second.cancel()
        if self._listening is not None:
            self._events.remove_reader(self._listening)
            self._listening.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        await asyncio.sleep(0)  # sends what it can

    def _accept(self, listening: socket.socket) -> None:
        try:
            opened, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_FILES and not self._abort_oldest():
                self._pause_accepting(listening, str(error.strerror))
            return  # it has already ended, or waits
        if len(self._connections) >= self._limit:
            self._abort_oldest()
        self.take(opened)

    def take(self, opened: socket.socket) -> None:
        """Serve an open connection."""
        opened.settimeout(0)
        connection = _Connection(self, self.key.secret.listen(*self._place))
        task = self._events.create_task(
            self._events.connect_accepted_socket(lambda: connection, opened)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _abort_oldest(self) -> bool:
        oldest = next(iter(self._unknown), None)
        if oldest is not None:
            del self._unknown[oldest]
            oldest.abort()
        return oldest is not None

    def _pause_accepting(self, listening: socket.socket, reason: str) -> None:
        self._events.remove_reader(listening)
        if not self._has_reported:
            self._has_reported = True
            self._loop.call_aside(lambda: self._on_problem(reason))

    def _tick(self) -> None:
        self._next_second = self._events.call_later(_TICK, self._tick)
        # asyncio's server writes a traceback for each connection without a free file.
        if self._listening is not None:
            self._events.add_reader(self._listening, self._accept, self._listening)
        expired = self._events.time() - _JOIN_REQUEST_TIMEOUT
        for connection, since in self._unknown.items():
            if since <= expired:
                connection.abort()
        if self.coordinator.members.unproved and not self.key.secret.key:
            self._loop.call_aside(self.key.attempt)  # the caller may have made it
        self.catch_up(1)
        self.flush()

    def catch_up(self, least: int = 3) -> None:
        """Let the coordinator count the seconds that have passed, if enough have.

        Count before reading anything, because messages may be as old.
        """
        if (seconds := int(now() - self._counted)) >= least:
            self._counted += seconds
            self.coordinator.tick(seconds)

    def flush(self) -> None:
        """Send what the coordinator has put into its outbox."""
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
                if message is not last:  # otherwise all get the same
                    last, line = message, wire.to_line(message)
                connection.send(line)
        self._flushed.set()

    def connected(self, connection: _Connection) -> None:
        """Keep a new connection."""
        self._unknown[connection] = self._events.time()
        self._connections[connection] = connection

    def received(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        """Pass a message to the coordinator, and send its answers."""
        self._unknown.pop(connection, None)
        self.coordinator.receive(connection, message)
        self.flush()

    def disconnected(self, connection: _Connection) -> None:
        """Forget an ended connection."""
        self._unknown.pop(connection, None)
        if self._connections.pop(connection, None) is not None:
            self.catch_up()
            self.coordinator.disconnected(connection, ended=connection.at_end)
            self.flush()


class _Connection(End):
    def __init__(self, server: CoordinatorServer, steps: Steps) -> None:
        super().__init__()
        self._server = server
        self._steps: Steps | None = steps  # until the caller has proved itself
        next(steps)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        self._server.catch_up()
        try:
            for message in self.lines.feed(data):
                if self.transport.is_closing():  # refused, or left
                    break
                self._receive(message)
        except wire.WireError:
            if self._steps is not None:
                peer = self.transport.get_extra_info("peername") or ["?"]  # reset
                self._server.coordinator.came_unproved(peer[0].removeprefix("::ffff:"))
                self._server.flush()
            self.abort()

    def _receive(self, message: Mapping[str, Any]) -> None:
        if self._steps is not None:
            try:
                answer = self._steps.send(message)
            except StopIteration as proved:
                message, self._steps = proved.value, None
            else:
                self.send(wire.to_line(answer))
                return
        self.lines.limit = protocol.LINE_LIMIT  # after the join request
        self._server.received(self, message)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._server.disconnected(self)

    def send(self, line: bytes) -> None:
        if self.transport.get_write_buffer_size() > self._server.unsent_limit:
            self.abort()
        elif not self.transport.is_closing():
            self.transport.write(line)
