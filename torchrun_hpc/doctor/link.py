"""The link between two nodes: connections in both directions, latency, bandwidth, loss.

Task 0 asks both nodes of a pair at once. Each connects to the other, which tries both
directions. Then they measure::

    first (its rank is lower)     second
    connection 1          ───────►
                          ◄───────  connection 2
    pings on 1            ◄──────►  pongs, with its time
    bytes on 1            ───────►
                          ◄───────  that all have come
                          ◄───────  bytes on 2
    that all have come    ───────►

If no byte follows the small messages, packets of the MTU's size are lost. Each node
returns its half of the link, and `merged` joins both.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits, wire
from torchrun_hpc.doctor.results import Link
from torchrun_hpc.rendezvous.key import UnprovedError
from torchrun_hpc.rendezvous.loop import Loop
from torchrun_hpc.rendezvous.protocol import JOIN_REQUEST_LIMIT
from torchrun_hpc.rendezvous.server import UNKNOWN_PEERS, Caller, Server, listen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.rendezvous.key import Key

# The problem of a node whose system runs, but not its doctor.
SILENT = "a connection is accepted, but the doctor there does not answer"

# Bytes per direction at most: this bounds the traffic on a fast network.
MOST_BYTES = 64 * 2**20

_ERRORS = (OSError, ValueError, OverflowError)

_ACCEPTED = b"+"
_PINGS = 200  # at most
_PING = struct.Struct("!d24x")
_CHUNK = 2**18
_WINDOWS = 6  # of time, for the bandwidth

# struct tcp_info of linux/tcp.h: tcpi_total_retrans and tcpi_data_segs_out.
_INFO = struct.Struct("100xI52xI")


class _NothingComesError(Exception):
    """Small messages arrive, but large ones do not."""


@dataclass(frozen=True)
class Peer:
    """A node that measures; ``mtu`` belongs to the interface with its address."""

    rank: int
    address: str
    port: int
    mtu: int


@dataclass(frozen=True)
class _LinkRequest:
    """A node's request for a link, for a turn."""

    rank: int
    turn: str


def merged(first: Link, second: Link) -> Link:
    """Join the two halves of a link, one from each node."""
    lost_mtu = max(first.lost_mtu, second.lost_mtu)
    halves = sorted((first, second), key=lambda half: not half.blocked)
    problems = [half.problem for half in halves if half.problem]
    return replace(
        first,
        problem="" if lost_mtu else next(iter(problems), ""),
        blocked=first.blocked + second.blocked,
        forward=second.forward,
        lost=max(first.lost, second.lost),
        lost_mtu=lost_mtu,
    )


class Links(Server):
    """This node's side of all links; callers must prove that they have its ``key``."""

    def __init__(self, key: Key, address: str, nodes: int) -> None:
        listening = listen(address or None, 0)
        self.port: int = listening.getsockname()[1]
        self.loop = Loop()
        self.loop.start()
        super().__init__(self.loop, listening, key, nodes + UNKNOWN_PEERS)
        self._nodes = nodes
        self._arrived: dict[int, tuple[str, socket.socket]] = {}
        self._changed = threading.Condition()
        self.start()

    def stop(self) -> None:
        """Stop listening."""
        self.close()
        self.loop.close()

    def measure(self, this: Peer, other: Peer, turn: str) -> Link:
        """Measure the link to another node, which uses the same ``turn``.

        Return the half that this node sees: what it receives.
        """
        half = Link(min(this.rank, other.rank), max(this.rank, other.rank))
        try:
            mine = self._open(this, other, turn)
        except _ERRORS as error:
            return replace(half, problem=_reason(error), blocked=(this.rank,))
        measure = _as_first if this.rank == half.first else _as_second
        try:
            with mine, self._wait(other.rank, turn) as theirs:
                return measure(half, mine, theirs)
        except _NothingComesError:
            return replace(half, lost_mtu=min(this.mtu, other.mtu))
        except _ERRORS as error:
            return replace(half, problem=_reason(error))

    def _open(self, this: Peer, other: Peer, turn: str) -> socket.socket:
        address = other.address, other.port
        opened = socket.create_connection(address, limits.LINK_OPEN_TIMEOUT)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = wire.encode(_LinkRequest(this.rank, turn))
            steps = self.key.secret.call(opened.getpeername()[:2], request)
            opened.sendall(wire.to_line(next(steps)))
            opened.sendall(wire.to_line(steps.send(_answer(opened))))
            _exactly(opened, len(_ACCEPTED))
        except BaseException as error:
            opened.close()
            if isinstance(error, TimeoutError):
                raise ConnectionError(SILENT) from None
            raise
        opened.settimeout(limits.LINK_MESSAGE_TIMEOUT)
        return opened

    def proved(self, caller: Caller, request: Mapping[str, Any]) -> None:
        """Keep the latest connection of a node that belongs to the job."""
        node = wire.decode(_LinkRequest, request)
        if node.rank not in range(self._nodes):
            raise wire.WireError(f"there is no node {node.rank}")
        try:
            kept = caller.transport.get_extra_info("socket").dup()
        except OSError as error:  # no file is left
            raise wire.WireError(str(error)) from None
        caller.transport.abort()
        try:
            kept.send(_ACCEPTED)
            kept.settimeout(limits.LINK_MESSAGE_TIMEOUT)  # asyncio has set TCP_NODELAY
        except OSError:  # it is already closed
            kept.close()
            return
        with self._changed:
            if node.rank in self._arrived:
                self._arrived[node.rank][1].close()
            self._arrived[node.rank] = node.turn, kept
            self._changed.notify_all()

    def _wait(self, rank: int, turn: str) -> socket.socket:
        """Return a node's connection, or raise `ConnectionError` after some seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrived.get(rank, ("",))[0] == turn,
                limits.PARTNER_TIMEOUT,
            )
            name, connection = self._arrived.pop(rank, ("", None))
        if connection is None or name != turn:
            raise ConnectionError("the other node did not connect")
        return connection


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer, or no more data"
    if isinstance(error, UnprovedError) or not isinstance(error, OSError):
        return "another program answers there"
    return getattr(error, "strerror", None) or str(error)


def _answer(connection: socket.socket) -> Mapping[str, Any]:
    lines = wire.Lines(JOIN_REQUEST_LIMIT)
    end = time.monotonic() + limits.LINK_OPEN_TIMEOUT
    while True:
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        message = next(lines.feed(_exactly(connection, 1)), None)
        if message is not None:
            return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the other node closed the connection")
        data += part
    return data


def _as_first(half: Link, mine: socket.socket, theirs: socket.socket) -> Link:
    latency_s, clock_s = _ping(mine)
    half = replace(half, latency_s=latency_s, clock_s=clock_s, lost=_send(mine))
    return replace(half, backward=_receive(theirs))


def _as_second(half: Link, mine: socket.socket, theirs: socket.socket) -> Link:
    _pong(theirs)
    half = replace(half, forward=_receive(theirs))
    return replace(half, lost=_send(mine))


# --- latency and clock ------------------------------------------------------------


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Exchange small messages; return latency and the other clock's lead in seconds."""
    looks, end = list[tuple[float, float]](), time.monotonic() + limits.PING_TIME
    while len(looks) < 2 or (len(looks) < _PINGS and time.monotonic() < end):  # noqa: PLR2004
        sent, start = time.time(), time.perf_counter()
        connection.sendall(_PING.pack(1.0))
        (theirs,) = _PING.unpack(_exactly(connection, _PING.size))
        seconds = time.perf_counter() - start
        looks.append((seconds, theirs - sent - seconds / 2))
    connection.sendall(_PING.pack(0.0))
    _, clock = min(looks)
    latency_s, _ = sorted(looks)[len(looks) // 10]
    return latency_s, clock


def _pong(connection: socket.socket) -> None:
    while _PING.unpack(_exactly(connection, _PING.size))[0]:
        connection.sendall(_PING.pack(time.time()))


# --- bandwidth --------------------------------------------------------------------


def _send(connection: socket.socket) -> float:
    """Send for some time; return the share of segments that TCP sent again."""
    chunk, sent, end = memoryview(bytes(_CHUNK)), 0, time.monotonic() + limits.SEND_TIME
    while not sent or (sent < MOST_BYTES and time.monotonic() < end):
        sent += connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)
    _exactly(connection, len(_ACCEPTED))
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:  # Linux before 4.6
        return 0.0
    again, segments = _INFO.unpack(info)
    return float(again / max(segments, 1))


def _receive(connection: socket.socket) -> float:
    """Receive until the end, and confirm it; return bytes per second.

    It is the median of some windows of time. The first window is TCP's slow start. In
    any other, a busy machine can pause.
    """
    connection.settimeout(limits.FIRST_BYTE_TIMEOUT)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        raise _NothingComesError from None
    connection.settimeout(limits.LINK_MESSAGE_TIMEOUT)
    buffer, total, start = bytearray(_CHUNK), 0, time.monotonic()
    marks = list[tuple[float, int]]()
    while size := connection.recv_into(buffer):
        total += size
        marks.append((time.monotonic(), total))
    connection.sendall(_ACCEPTED)
    if not marks or marks[-1][0] <= marks[0][0]:  # almost nothing arrived
        return total / (time.monotonic() - start)
    length, rates = (marks[-1][0] - marks[0][0]) / _WINDOWS, list[float]()
    edge = marks[0]
    for mark in marks[1:]:
        if mark[0] >= edge[0] + length or mark is marks[-1]:
            rates.append((mark[1] - edge[1]) / max(mark[0] - edge[0], 1e-9))
            edge = mark
    return median(rates[1:] or rates)
