"""The head's server: it carries what agents say to the `Coordinator`, and back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from torchrun_hpc.network import bound_socket
from torchrun_hpc.planning.endpoints import notice_ports
from torchrun_hpc.rendezvous.coordinator import CLOSE, SILENCE, Coordinator, Settings
from torchrun_hpc.rendezvous.protocol import (
    JOIN_REQUEST_LIMIT,
    LINE_LIMIT,
    Lines,
    ProtocolError,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torchrun_hpc.planning.launch_plan import LaunchPlan
    from torchrun_hpc.rendezvous.protocol import Failure

# As many as the kernel allows (net.core.somaxconn): thousands come at once.
BACKLOG = 65535

# Seconds.
_TICK = 1.0
_JOIN_REQUEST_TIMEOUT = 30.0
STAY = 5.0
STAY_FOR_LATE = 30.0  # for nodes that come when the job has failed already

# Connections beside one for each node, of unknown peers: they have not said hello yet.
UNKNOWN_PEERS = 1024

# What accept(2) gives where there is no room for another open file.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

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
    address = plan.rendezvous.listen[0] if plan.rendezvous.listen else None
    terms = Settings(
        job=plan.launch_id,
        run_id="",
        nodes=plan.world.nodes,
        head=plan.world.node_rank,
        max_restarts=0,
        join_timeout=0,
        silence_timeout=SILENCE,
    )
    for port in (*plan.rendezvous.ports, *notice_ports(plan.launch_id)):
        with contextlib.suppress(OSError):
            head = CoordinatorServer(listen(address, port), terms)
            break
    else:
        return
    head.fail(failure)  # before anybody is let in
    head.start()
    head.close(late=limit)


class CoordinatorServer:
    """Serves a meeting, in a thread of its own.

    Args:
        listening: The socket to listen on; bound, and from now on the head's.
        terms: What all agents agree on.
        room: How many connections it may hold beside one for each node. Where there
            are more, the oldest that has not said hello yet makes room for a new one,
            which may be an agent.
        complain: Called from the thread, once, where a connection cannot be taken all
            the same, with the system's reason.
    """

    def __init__(
        self,
        listening: socket.socket,
        terms: Settings,
        room: int = UNKNOWN_PEERS,
        complain: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.meeting = Coordinator(terms)
        self._listening = listening
        self._listening.settimeout(0)
        self._complain = complain
        self._has_complained = False
        self._unknown: dict[Hashable, _Connection] = {}  # the oldest is the first
        self._connections: dict[Hashable, _Connection] = {}
        self._allowed = terms.nodes + room
        self._opening: set[asyncio.Task[Any]] = set()
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
        self._listen()
        self._loop.call_later(_TICK, self._tick)
        try:
            self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self._connections.values():
            connection.end()
        await asyncio.sleep(0)  # sends what it can

    def _listen(self) -> None:
        # Not asyncio's own server, which writes a traceback for each connection for
        # which there is no open file left.
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Take one connection; the loop calls again while there are more."""
        try:
            opened, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM and not self._drop_oldest():
                self._wait_for_room(str(error.strerror))
            return  # it is gone already, or waits
        if len(self._connections) >= self._allowed:
            self._drop_oldest()
        opened.settimeout(0)
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: _Connection(self), opened)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _drop_oldest(self) -> bool:
        """End the oldest connection of an unknown peer, if there is any."""
        oldest = next(iter(self._unknown), None)
        if oldest is None:
            return False
        self._unknown.pop(oldest).drop()
        return True

    def _wait_for_room(self, reason: str) -> None:
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_TICK, self._listen)
        if not self._has_complained:
            self._has_complained = True
            self._complain(reason)

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

    def comes(self, connection: _Connection) -> None:
        """Take note of a new connection."""
        self._unknown[connection.number] = connection
        self._connections[connection.number] = connection

    def has_spoken(self, connection: _Connection) -> None:
        """Take note that a connection has said hello."""
        self._unknown.pop(connection.number, None)

    def lost(self, connection: _Connection) -> None:
        """Take note that a connection has ended."""
        self._unknown.pop(connection.number, None)
        if self._connections.pop(connection.number, None) is not None:
            self.meeting.lost(connection.number)
            self.flush()


class _Connection(asyncio.Protocol):
    """One agent, or somebody else."""

    def __init__(self, head: CoordinatorServer) -> None:
        self._head = head
        self._lines = Lines(JOIN_REQUEST_LIMIT)
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self.number = next(_numbers)  # of no other connection before or after

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._head.comes(self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(_JOIN_REQUEST_TIMEOUT, transport.abort)

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

    def drop(self) -> None:
        self._transport.abort()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._transport.close()
