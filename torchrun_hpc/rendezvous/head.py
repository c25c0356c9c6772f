"""The head's server: it carries what agents say to the `Meeting`, and back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from torchrun_hpc.endpoints import notice_ports
from torchrun_hpc.network import bound_socket
from torchrun_hpc.rendezvous.meeting import CLOSE, SILENCE, Meeting, Terms
from torchrun_hpc.rendezvous.protocol import (
    HELLO_LIMIT,
    LINE_LIMIT,
    Lines,
    ProtocolError,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torchrun_hpc.plan import LaunchPlan
    from torchrun_hpc.rendezvous.protocol import Failure

# As many as the kernel allows (net.core.somaxconn): thousands come at once.
BACKLOG = 65535

# Seconds.
_TICK = 1.0
_HELLO_TIMEOUT = 30.0
STAY = 5.0
STAY_FOR_LATE = 30.0  # for nodes that come when the job has failed already

# Connections, beside one for each node, that have not said hello yet.
STRANGERS = 1024

_numbers = itertools.count()

# Bytes that wait for an agent that does not read.
_UNSENT = 2 * LINE_LIMIT


def listen(address: str | None, port: int) -> socket.socket:
    """Open a listening socket, on all addresses if none is known.

    Raises:
        OSError: The port is taken, or the address is not this node's.
    """
    if address is not None:
        opened = bound_socket(address, port)
    elif socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    else:
        opened = bound_socket("0.0.0.0", port)
    try:
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def serve_failure(plan: LaunchPlan, failure: Failure, limit: float) -> None:
    """Let the other nodes in, only to tell them why the head cannot start.

    Args:
        plan: Where they look for it.
        failure: Why.
        limit: Seconds to stay for those that have not come.
    """
    address = plan.listen[0] if plan.listen else None
    terms = Terms(
        job=plan.identity,
        run_id="",
        nodes=plan.nodes,
        head=plan.node_rank,
        max_restarts=0,
        join_timeout=0,
        silence_timeout=SILENCE,
    )
    for port in (*plan.ports, *notice_ports(plan.identity)):
        with contextlib.suppress(OSError):
            head = Head(listen(address, port), terms)
            break
    else:
        return
    head.fail(failure)  # before anybody is let in
    head.start()
    head.close(late=limit)


class Head:
    """Serves a meeting, in a thread of its own.

    Args:
        listening: The socket to listen on; bound, and from now on the head's.
        terms: What all agents agree on.
    """

    def __init__(self, listening: socket.socket, terms: Terms) -> None:
        self.meeting = Meeting(terms)
        self._listening = listening
        self._strangers: set[_Connection] = set()
        self._connections: dict[Hashable, _Connection] = {}
        self._allowed = terms.nodes + STRANGERS
        self._loop = asyncio.new_event_loop()
        self._all_know = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(self, limit: float = STAY, late: float = STAY_FOR_LATE) -> None:
        """Stop to serve as soon as all agents know how it ended.

        Args:
            limit: Seconds after which they have to do without.
            late: The same for nodes that are still on their way.
        """
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._leave)
        start = time.monotonic()
        while not self._all_know.wait(0.05):
            if time.monotonic() - start > (late if self.meeting.some_come else limit):
                break
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1)

    def fail(self, failure: Failure) -> None:
        """End the job, also where this node's own agent cannot say so any more."""
        self._loop.call_soon_threadsafe(self._fail, failure)

    # --- in the thread ------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(
                lambda: _Connection(self), sock=self._listening, backlog=BACKLOG
            )
        )
        self._loop.call_later(_TICK, self._tick)
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for connection in (*self._strangers, *self._connections.values()):
                connection.end()
            self._loop.run_until_complete(asyncio.sleep(0))  # sends what it can
            self._loop.close()

    def _tick(self) -> None:
        self._loop.call_later(_TICK, self._tick)
        self.meeting.tick()
        self.flush()

    def _leave(self) -> None:
        self._leaving = True
        self.flush()

    def _fail(self, failure: Failure) -> None:
        self.meeting.fail(failure)
        self.flush()

    def flush(self) -> None:
        """Send what the meeting has left to be sent."""
        outbox, self.meeting.outbox = self.meeting.outbox, []
        for number, message in outbox:
            connection = self._connections.get(number)
            if connection is None:
                continue
            if message is CLOSE:
                connection.end()
            else:
                connection.send(message)
        if self._leaving and self.meeting.all_know:
            self._all_know.set()

    def may_come(self, connection: _Connection) -> bool:
        """Take a new connection, if there are not too many."""
        if len(self._strangers) >= self._allowed:
            return False
        self._strangers.add(connection)
        self._connections[connection.number] = connection
        return True

    def has_spoken(self, connection: _Connection) -> None:
        """Take note that a connection has said hello."""
        self._strangers.discard(connection)

    def lost(self, connection: _Connection) -> None:
        """Take note that a connection has ended."""
        self._strangers.discard(connection)
        if self._connections.pop(connection.number, None) is not None:
            self.meeting.lost(connection.number)
            self.flush()


class _Connection(asyncio.Protocol):
    """One agent, or somebody else."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._lines = Lines(HELLO_LIMIT)
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self.number = next(_numbers)  # of no other connection before or after

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self._head.may_come(self):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_HELLO_TIMEOUT, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            for message in self._lines.feed(data):
                if self._deadline is not None:
                    self._deadline.cancel()
                    self._deadline = None
                    self._lines.limit = LINE_LIMIT
                    self._head.has_spoken(self)
                self._head.meeting.receive(self.number, message)
        except ProtocolError:
            self._transport.abort()
        self._head.flush()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._head.lost(self)

    def send(self, message: Mapping[str, Any]) -> None:
        if self._transport.get_write_buffer_size() > _UNSENT:
            self._transport.abort()
        else:
            self._transport.write(encode(message))

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._transport.close()
