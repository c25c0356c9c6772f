"""The coordinator's server, between the agents and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from concurrent import futures
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.host.network import bound_socket
from torchrun_hpc.rendezvous.key import NOWHERE
from torchrun_hpc.rendezvous.loop import End, now, within
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    LINE_LIMIT,
    Close,
    read_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torchrun_hpc.rendezvous.coordinator import Coordinator
    from torchrun_hpc.rendezvous.key import Key, Steps
    from torchrun_hpc.rendezvous.loop import Loop
    from torchrun_hpc.rendezvous.protocol import FromCoordinator

# The kernel's maximum (net.core.somaxconn): thousands connect at once.
BACKLOG = 65535

# Connections without a join request, besides one for each node.
UNKNOWN_PEERS = 256

# Errors of accept(2) when no other file can be opened.
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Bytes kept for an agent that does not read. All replies to a question come at once.
_UNSENT_LIMIT = 2 * LINE_LIMIT
_REPLY = 64 * 1024


def listen(address: str | None, port: int) -> socket.socket:
    """Open a listening socket; without an address, on all. May raise `OSError`."""
    if address is None and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return bound_socket(address or "0.0.0.0", port, BACKLOG)


class Server:
    """Accepts connections whose callers prove that they have the same `key`.

    It closes `listening` at the end. Without `listening`, it serves only connections
    passed to `take`. Beyond `most` connections, it closes the oldest one without a
    proof, because the next caller may be an agent. If a connection still cannot be
    accepted, `on_problem` is called aside, once, with the system's reason. Subclasses
    handle requests and messages.
    """

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket | None,
        key: Key,
        most: int,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.key = key
        self._listening = listening
        self._place = listening.getsockname()[:2] if listening else NOWHERE
        if listening is not None:
            listening.settimeout(0)
        self._most = most
        self._on_problem = on_problem
        self._has_reported = False
        self._unproved: dict[Caller, float] = {}  # since when, oldest first
        self._callers: dict[Hashable, Caller] = {}
        self._opening: set[asyncio.Task[Any]] = set()
        self._loop, self._events = loop, loop.events
        self._next_second: asyncio.TimerHandle | None = None
        self._end: futures.Future[None] | None = None

    def start(self) -> None:
        """Start serving."""
        self._loop.call(self._tick)

    def close(
        self,
        timeout: float = limits.CLOSE_TIMEOUT,
        late_timeout: float = limits.LATE_NODES_TIMEOUT,
    ) -> None:
        """Stop serving as soon as `may_close` returns, which gets both limits."""
        end = self._end or asyncio.run_coroutine_threadsafe(
            self._close(timeout, late_timeout), self._events
        )
        self._end = end
        waiting.until(
            lambda: futures.wait([end], limits.SERVER_SIGNAL_TIMEOUT).done,
            max(timeout, late_timeout) + limits.SEND_TIMEOUT,
            pause=0,
        )

    # --- what subclasses do, in the loop ------------------------------------------

    async def may_close(self, timeout: float, late_timeout: float) -> None:
        """Wait until nobody has to be informed."""

    def tick(self) -> None:
        """Do what is due each second."""

    def catch_up(self) -> None:
        """Do what is due before received data are handled."""

    def proved(self, caller: Caller, request: Mapping[str, Any]) -> None:
        """Handle a caller's request. After a `WireError` it is aborted."""

    def received(self, caller: Caller, message: Mapping[str, Any]) -> None:
        """Handle a caller's further message. After a `WireError` it is aborted."""

    def unproved(self, address: str) -> None:
        """Handle a caller without a proof."""

    def ended(self, caller: Caller) -> None:
        """Handle the end of a connection."""

    # --- in the loop --------------------------------------------------------------

    async def _close(self, timeout: float, late_timeout: float) -> None:
        await self.may_close(timeout, late_timeout)
        if self._next_second is not None:
            self._next_second.cancel()
        if self._listening is not None:
            self._events.remove_reader(self._listening)
            self._listening.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for caller in self._callers.values():
            caller.close()
        await asyncio.sleep(0)  # sends what it can

    def _accept(self, listening: socket.socket) -> None:
        try:
            opened, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_FILES and not self._abort_oldest():
                self._events.remove_reader(listening)  # until the next second
                self._report(str(error.strerror))
            return  # the connection has ended, or waits
        if len(self._callers) >= self._most:
            self._abort_oldest()
        self.take(opened)

    def take(self, opened: socket.socket) -> None:
        """Serve an open connection."""
        opened.settimeout(0)
        caller = Caller(self, self.key.secret.listen(*self._place))
        task = self._events.create_task(
            self._events.connect_accepted_socket(lambda: caller, opened)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _abort_oldest(self) -> bool:
        oldest = next(iter(self._unproved), None)
        if oldest is not None:
            del self._unproved[oldest]
            oldest.abort()
        return oldest is not None

    def _report(self, reason: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._loop.call_aside(lambda: self._on_problem(reason))

    def _tick(self) -> None:
        self._next_second = self._events.call_later(limits.TICK, self._tick)
        # asyncio's server writes a traceback for each connection without a free file.
        if self._listening is not None:
            self._events.add_reader(self._listening, self._accept, self._listening)
        expired = self._events.time() - limits.JOIN_REQUEST_TIMEOUT
        for caller, since in self._unproved.items():
            if since <= expired:
                caller.abort()
        self.tick()

    def connected(self, caller: Caller) -> None:
        """Keep a new connection."""
        self._unproved[caller] = self._events.time()
        self._callers[caller] = caller

    def trust(self, caller: Caller) -> None:
        """Take note that a caller has proved itself."""
        self._unproved.pop(caller, None)

    def disconnected(self, caller: Caller) -> None:
        """Forget an ended connection."""
        self._unproved.pop(caller, None)
        if self._callers.pop(caller, None) is not None:
            self.ended(caller)


class Caller(End):
    """The end of a connection that a caller has opened."""

    def __init__(self, server: Server, steps: Steps) -> None:
        super().__init__()
        self._server = server
        self._steps: Steps | None = steps  # until the caller has proved itself
        next(steps)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the proof."""
        super().connection_made(transport)
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        """Handle received data: first the proof, then messages."""
        self._server.catch_up()
        try:
            for message in self.lines.feed(data):
                if self.transport.is_closing():  # refused, or left
                    break
                self._receive(message)
        except wire.WireError:
            if self._steps is not None:
                peer = self.transport.get_extra_info("peername") or ["?"]  # reset
                self._server.unproved(peer[0].removeprefix("::ffff:"))
            self.abort()

    def _receive(self, message: Mapping[str, Any]) -> None:
        if self._steps is None:
            self._server.received(self, message)
            return
        try:
            answer = self._steps.send(message)
        except StopIteration as proved:
            self._steps, self.lines.limit = None, LINE_LIMIT
            self._server.trust(self)
            self._server.proved(self, proved.value)
        else:
            self.transport.write(wire.to_line(answer))

    def connection_lost(self, error: Exception | None) -> None:
        """Inform the server."""
        super().connection_lost(error)
        self._server.disconnected(self)


class CoordinatorServer(Server):
    """Serves a coordinator. `unknown_peers` may be connected besides its agents."""

    def __init__(  # noqa: PLR0913, PLR0917 - the last two are for tests
        self,
        loop: Loop,
        listening: socket.socket | None,
        coordinator: Coordinator,
        key: Key,
        unknown_peers: int = UNKNOWN_PEERS,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        nodes = coordinator.settings.nodes
        super().__init__(loop, listening, key, nodes + unknown_peers, on_problem)
        self.coordinator = coordinator
        self._unsent_limit = _UNSENT_LIMIT + nodes * _REPLY
        self._has_strangers = False
        self._flushed = asyncio.Event()
        self._counted = now()  # until when the coordinator has counted seconds

    async def may_close(self, timeout: float, late_timeout: float) -> None:
        """Wait until all agents know how the job ended.

        Wait up to `timeout` seconds for them, and up to `late_timeout` for nodes that
        have not connected yet.
        """
        clock = self._events.time
        start = clock()
        while not self.coordinator.all_informed:
            limit = late_timeout if self.coordinator.expects_nodes else timeout
            if (left := start + limit - clock()) <= 0:
                break
            self._flushed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._flushed.wait())

    def tick(self) -> None:
        """Let the coordinator count a second."""
        if self._has_strangers and not self.key.secret.key:
            self._loop.call_aside(self.key.attempt)  # the caller may have made it
        self.catch_up(1)
        self.flush()

    def catch_up(self, least: int = 3) -> None:
        """Let the coordinator count the passed seconds, if they are at least so many.

        It counts them before it handles messages, which may be as old.
        """
        if (seconds := int(now() - self._counted)) >= least:
            self._counted += seconds
            self.coordinator.tick(seconds)

    def proved(self, caller: Caller, request: Mapping[str, Any]) -> None:
        """Pass a join request to the coordinator, and send its answers."""
        self.coordinator.request(caller, read_request(request))
        self.flush()

    def received(self, caller: Caller, message: Mapping[str, Any]) -> None:
        """Pass a message to the coordinator, and send its answers."""
        self.coordinator.receive(caller, wire.decode(FROM_AGENT, message))
        self.flush()

    def unproved(self, address: str) -> None:
        """Let the coordinator's node report a caller."""
        self._has_strangers = True
        self.coordinator.members.came_unproved(address, self.key.name)
        self.flush()

    def ended(self, caller: Caller) -> None:
        """Let the coordinator handle the end of a connection."""
        self.catch_up()
        self.coordinator.disconnected(caller, ended=caller.at_end)
        self.flush()

    def flush(self) -> None:
        """Send what the coordinator has put into its outbox."""
        outbox = [*self.coordinator.outbox]
        self.coordinator.outbox.clear()
        last: FromCoordinator | None = None
        line = b""
        for connection, message in outbox:
            caller = self._callers.get(connection)
            if caller is None:
                continue
            if message is Close.CLOSE:
                caller.close()
            elif message is Close.RESET:
                caller.abort()
            else:
                if message is not last:  # otherwise all get the same
                    last = message
                    line = wire.to_line(wire.encode(message, FROM_COORDINATOR))
                self._send(caller, line)
        self._flushed.set()

    def _send(self, caller: Caller, line: bytes) -> None:
        if caller.transport.get_write_buffer_size() > self._unsent_limit:
            caller.abort()
        elif not caller.transport.is_closing():
            caller.transport.write(line)
