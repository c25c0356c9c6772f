"""What is between two nodes: connections in both directions, latency, bandwidth, loss.

Both nodes come to the same pair at about the same time. Each opens a connection to the
other one, so that both directions are tried; the first node, whose rank is lower,
measures on its own one::

    first                          second
    connection "control"  ───────►
                          ◄───────  connection "control"
                          ◄───────  whether that could be opened; its UDP port;
                                    which other networks are open from there
    its UDP port          ───────►
    packets               ◄──────►  packets: a small one, and one of the size of the MTU
    pings                 ◄──────►  pongs, with its time
    connection "bulk"     ───────►
    bytes                 ───────►
                          ◄───────  bytes
    that all have come    ───────►
                          ◄───────  what it has counted
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from torchrun_hpc import wire
from torchrun_hpc.doctor.results import Link
from torchrun_hpc.host.network import reach
from torchrun_hpc.rendezvous.server import listen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.rendezvous.key import Key
    from torchrun_hpc.rendezvous.proof import Steps

# The problem of a node whose system is alive, and whose doctor is not.
SILENT = "a connection is accepted, but the doctor there does not answer"

# Bytes that go one way at most: to bound the traffic on a fast network.
MOST_BYTES = 64 * 2**20

# Seconds: to open a connection and be answered; until the other node has come to this
# pair, while it is alive, and where that is not known; for a message; of sending.
_OPEN_TIMEOUT = 2.0
_PARTNER_TIMEOUT = 30.0
_BLOCKED_TIMEOUT = 10.0
_MESSAGE_TIMEOUT = 3.0
_SENDING = 0.15
_PACKET_TIMEOUT = 0.3
_POLL = 0.02

# What may be wrong with a connection, and with what comes on it.
_ERRORS = (OSError, ValueError, KeyError, TypeError, OverflowError)

_PINGS, _PINGING = 200, 0.1  # at most so many, and so many seconds
_PING = struct.Struct("!d24x")
_CHUNK = 2**18
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP: bytes
_SMALL, _LARGEST = 64, 65507  # bytes of a packet of UDP
_PACKETS = 3  # of each size: a link may lose one
_MTU_DISCOVER, _MTU_DISCOVER_6 = 10, 23  # IP_ and IPV6_MTU_DISCOVER, linux/in.h
_DO_NOT_FRAGMENT = 3  # IP_PMTUDISC_PROBE, linux/in.h: whatever path MTU is known
_LONGEST_LINE = 4096
_WINDOWS = 6  # of time, in which the bandwidth is measured

# Connections, at most: those that have not named the launch, and those that wait to be
# measured. The next one replaces the oldest.
_UNKNOWN_PEERS, _KNOWN_PEERS = 128, 1024

# struct tcp_info of linux/tcp.h: tcpi_total_retrans and tcpi_data_segs_out.
_INFO_SIZE, _RETRANSMITTED, _SENT = 160, 100, 156


@dataclass(frozen=True)
class Peer:
    """A node that takes part in measuring.

    Attributes:
        rank: Its rank.
        address: Its address for the job.
        port: Where it listens.
        mtu: Of the interface that has the address.
        others: Its addresses on other interfaces, by their names.
    """

    rank: int
    address: str
    port: int
    mtu: int
    others: Mapping[str, str] = field(default_factory=dict)


class _SilentError(ConnectionError):
    """The system of the other node accepts a connection; the doctor there hangs."""


class _Channel:
    """A connection that carries lines of JSON, and sometimes other bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = wire.Lines(_LONGEST_LINE)
        self._messages: list[dict[str, Any]] = []
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_MESSAGE_TIMEOUT)

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(wire.to_line(message))

    def has_arrived(self, timeout: float = 0) -> bool:
        """Say whether there is something to receive, or the end."""
        waiting = select.poll()  # select() takes no file above 1023
        waiting.register(self.socket, select.POLLIN)
        return bool(self._messages or waiting.poll(timeout * 1000))

    def has_message(self, timeout: float = _MESSAGE_TIMEOUT) -> bool:
        """Receive some bytes, if no message is there; say whether one is now."""
        if not self._messages:
            if timeout <= 0:
                raise TimeoutError
            self.socket.settimeout(timeout)
            data = self.socket.recv(_LONGEST_LINE)
            if not data:
                raise ConnectionError("the other node has closed the connection")
            self._messages += self._lines.feed(data)
        return bool(self._messages)

    def receive(self, timeout: float = _MESSAGE_TIMEOUT) -> dict[str, Any]:
        end = time.monotonic() + timeout  # for all bytes of it
        while not self.has_message(end - time.monotonic()):
            pass
        self.socket.settimeout(_MESSAGE_TIMEOUT)
        return self._messages.pop(0)


class Links:
    """This node's side of all links.

    Args:
        key: This node's key; a connection without its proof is closed.
        address: This node's address for the job; empty if it is not known.
    """

    def __init__(self, key: Key, address: str) -> None:
        self._key = key
        self._listening = listen(address or None, 0)
        self._place = self._listening.getsockname()[:2]
        self.port: int = self._place[1]
        self._arrived: dict[tuple[int, str], _Channel] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name="links", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def measure(
        self, own: Peer, other: Peer, turn: str, *, all_networks: bool = False
    ) -> Link | None:
        """Measure what is between this node and another one, which does the same.

        Args:
            own: This node.
            other: The other one.
            turn: Names this look, the same on both.
            all_networks: Whether to try other interfaces, too.

        Returns:
            The figures; ``None`` on the node of the two whose rank is higher.
        """
        networks = {
            name: reach(address, other.port, _OPEN_TIMEOUT)[0]
            for name, address in other.others.items()
            if all_networks and name in own.others
        }
        if own.rank > other.rank:
            with contextlib.suppress(*_ERRORS):
                self._follow(own, other, turn, networks)
            return None
        try:
            found = self._lead(own, other, turn, networks)
        except _ERRORS as error:
            found = {"problem": _reason(error)}
        return cast("Link", {**_nothing(own, other), "networks": networks, **found})

    # --- connections --------------------------------------------------------------

    def _serve(self) -> None:
        """Greet the nodes of the launch at once, whatever this node does now."""
        # The oldest one is the first.
        unknown: dict[int, tuple[_Channel, Steps, float]] = {}
        while (listening := self._listening.fileno()) >= 0:
            waiting = select.poll()
            for number in (listening, *unknown):
                waiting.register(number, select.POLLIN)
            ready = {number for number, _ in waiting.poll(_POLL * 1000)}
            if listening in ready:
                try:
                    channel = _Channel(self._listening.accept()[0])
                    steps = self._key.secret.listen(*self._place)
                    next(steps)
                    end = time.monotonic() + _OPEN_TIMEOUT
                    unknown[channel.socket.fileno()] = channel, steps, end
                except OSError:  # no files; or the other one has gone already
                    time.sleep(_POLL)
            for number, (channel, steps, end) in [*unknown.items()]:
                if number in ready and self._greet(channel, steps):
                    del unknown[number]
                elif time.monotonic() > end or len(unknown) > _UNKNOWN_PEERS:
                    unknown.pop(number)[0].socket.close()

    def _greet(self, channel: _Channel, steps: Steps) -> bool:
        """Answer a line, and keep a connection that has a proof; say if it is done."""
        try:
            if not channel.has_message():
                return False
            try:
                answer = steps.send(channel.receive())
            except StopIteration as proved:
                key = proved.value["rank"], proved.value["for"]
            else:
                channel.send(answer)
                return False
            if [*map(type, key)] != [int, str]:
                raise wire.WireError("from no node of the launch")
            channel.send({"hello": True})
        except _ERRORS:
            channel.socket.close()
            return True
        with self._changed:
            if key in self._arrived or len(self._arrived) >= _KNOWN_PEERS:
                oldest = key if key in self._arrived else next(iter(self._arrived))
                self._arrived.pop(oldest).socket.close()
            self._arrived[key] = channel
            self._changed.notify_all()
        return True

    def _open(self, rank: int, address: str, port: int, purpose: str) -> _Channel:
        """Open a connection to another node.

        Raises:
            OSError: That is not possible, or nobody answers.
        """
        connection = socket.create_connection((address, port), _OPEN_TIMEOUT)
        try:
            channel = _Channel(connection)
            to = connection.getpeername()[:2]
            request = {"rank": rank, "for": purpose}
            steps = self._key.secret.call(to, request)
            channel.send(next(steps))
            channel.send(steps.send(channel.receive(_OPEN_TIMEOUT)))
            channel.receive(_OPEN_TIMEOUT)
        except TimeoutError:
            connection.close()
            raise _SilentError(SILENT) from None
        except BaseException:
            connection.close()
            raise
        return channel

    def _wait_for(
        self, rank: int, purpose: str, timeout: float, instead: _Channel | None = None
    ) -> _Channel | None:
        """Wait for a connection of another node, or for something on our own one."""
        end = time.monotonic() + timeout
        with self._changed:
            while (rank, purpose) not in self._arrived:
                heard = instead is not None and instead.has_arrived()
                if heard or time.monotonic() > end:
                    return None
                self._changed.wait(_POLL)
            return self._arrived.pop((rank, purpose))

    # --- the two sides ------------------------------------------------------------

    def _lead(
        self, own: Peer, other: Peer, turn: str, networks: Mapping[str, bool]
    ) -> dict[str, Any]:
        try:
            channel = self._open(own.rank, other.address, other.port, turn)
        except OSError as error:
            hangs = isinstance(error, _SilentError)
            limit = _MESSAGE_TIMEOUT if hangs else _BLOCKED_TIMEOUT
            coming = self._wait_for(other.rank, turn, limit)
            if coming is not None:
                coming.socket.close()
            blocked = [own.rank] if coming else [own.rank, other.rank]
            return {"problem": _reason(error), "blocked": blocked}
        with channel.socket:
            answer = self._answer(channel, own, other)
            if answer["blocked"]:
                problem = str(answer["blocked"])
                return {"problem": problem, "blocked": [other.rank]}
            theirs = answer["networks"]
            both = {name: networks[name] and bool(theirs[name]) for name in networks}
            found: dict[str, Any] = {"networks": both}
            found |= self._packets_first(channel, own, other, int(answer["udp"]))
            found |= _ping(channel)
            if found["lost_mtu"]:
                return found  # what TCP sends would be lost, too
            bulk = self._open(own.rank, other.address, other.port, f"{turn}/bulk")
            with bulk.socket:
                _send(bulk.socket)
                found["backward"] = _receive(bulk.socket)
                channel.send({"received": True})
                counted = channel.receive(_MESSAGE_TIMEOUT + _SENDING)
                found["forward"] = float(counted["rate"])
                found["lost"] = max(_lost(bulk.socket), float(counted["lost"]))
                return found

    def _answer(self, channel: _Channel, own: Peer, other: Peer) -> dict[str, Any]:
        """Wait until the other node has come to this pair, while it is alive.

        It may have to wait for others.
        """
        end = time.monotonic() + _PARTNER_TIMEOUT
        while not channel.has_arrived(_OPEN_TIMEOUT) and time.monotonic() < end:
            self._check_alive(own, other)
        return channel.receive()

    def _check_alive(self, own: Peer, other: Peer) -> None:
        """See that the doctor on another node answers.

        Raises:
            OSError: It does not.
        """
        self._open(own.rank, other.address, other.port, "alive").socket.close()

    def _follow(
        self, own: Peer, other: Peer, turn: str, networks: Mapping[str, bool]
    ) -> None:
        problem, outgoing = "", None
        try:
            outgoing = self._open(own.rank, other.address, other.port, turn)
        except OSError as error:
            problem = _reason(error)
        limit = _PARTNER_TIMEOUT if outgoing else _BLOCKED_TIMEOUT
        channel, end = None, time.monotonic() + limit
        while channel is None and time.monotonic() < end:
            channel = self._wait_for(other.rank, turn, _OPEN_TIMEOUT, outgoing)
            if channel is None and outgoing is not None:
                if outgoing.has_arrived():
                    break  # it has given up
                self._check_alive(own, other)
        if outgoing is not None:
            outgoing.socket.close()
        if channel is None:
            return
        with channel.socket, _udp(own) as packets:
            port = packets.getsockname()[1]
            channel.send({"blocked": problem, "udp": port, "networks": networks})
            if problem:
                return
            asked = channel.receive()
            _exchange_packets(packets, other.address, int(asked["udp"]), asked["size"])
            channel.send(_arrived(packets, asked["size"]))
            _pong(channel)
            bulk = self._wait_for(other.rank, f"{turn}/bulk", _MESSAGE_TIMEOUT, channel)
            if bulk is not None:
                with bulk.socket:
                    rate = _receive(bulk.socket)
                    _send(bulk.socket)
                    channel.receive()  # the other one has received all
                    channel.send({"rate": rate, "lost": _lost(bulk.socket)})

    def _packets_first(
        self, channel: _Channel, own: Peer, other: Peer, port: int
    ) -> dict[str, Any]:
        """Find out whether packets of the size of the MTU arrive, both ways."""
        mtu = min(own.mtu, other.mtu)
        with _udp(own) as packets:
            size = min(mtu - _HEADERS[packets.family], _LARGEST)
            channel.send({"udp": packets.getsockname()[1], "size": size})
            _exchange_packets(packets, other.address, port, size)
            here, there = _arrived(packets, size), channel.receive()
        is_lost = any(side["small"] and not side["large"] for side in (here, there))
        return {"lost_mtu": mtu if is_lost else 0}


def _nothing(own: Peer, other: Peer) -> Link:
    return Link(
        first=own.rank,
        second=other.rank,
        problem="",
        blocked=[],
        latency_s=0.0,
        forward=0.0,
        backward=0.0,
        lost=0.0,
        clock_s=0.0,
        lost_mtu=0,
        networks={},
        looks=1,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer, or nothing more"
    if not isinstance(error, OSError):
        return "something else answers there"
    return getattr(error, "strerror", None) or str(error)


# --- packets ------------------------------------------------------------------------


def _udp(own: Peer) -> socket.socket:
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET:
        opened.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _DO_NOT_FRAGMENT)
    else:
        opened.setsockopt(socket.IPPROTO_IPV6, _MTU_DISCOVER_6, _DO_NOT_FRAGMENT)
    opened.bind((own.address, 0))
    return opened


def _exchange_packets(packets: socket.socket, host: str, port: int, size: int) -> None:
    for length in (_SMALL, min(size, _LARGEST)) * _PACKETS:
        with contextlib.suppress(OSError):  # too long for this interface
            packets.sendto(bytes(length), (host, port))


def _arrived(packets: socket.socket, size: int) -> dict[str, bool]:
    """Wait for the packets of the other node; say which have come."""
    end, seen = time.monotonic() + _PACKET_TIMEOUT, set[int]()
    while size not in seen and (left := end - time.monotonic()) > 0:
        packets.settimeout(left)
        with contextlib.suppress(OSError):
            seen.add(len(packets.recv(2**16)))
    return {"small": bool(seen), "large": size in seen}


# --- latency and clock ------------------------------------------------------------


def _ping(channel: _Channel) -> dict[str, float]:
    """Send small messages there and back."""
    looks, end = list[tuple[float, float]](), time.monotonic() + _PINGING
    while len(looks) < 2 or (len(looks) < _PINGS and time.monotonic() < end):  # noqa: PLR2004
        sent, start = time.time(), time.perf_counter()
        channel.socket.sendall(_PING.pack(1.0))
        (theirs,) = _PING.unpack(_exactly(channel.socket, _PING.size))
        seconds = time.perf_counter() - start
        looks.append((seconds, theirs - sent - seconds / 2))
    channel.socket.sendall(_PING.pack(0.0))
    seconds, clock = min(looks)
    latency_s, _ = sorted(looks)[len(looks) // 10]
    return {"latency_s": latency_s, "clock_s": clock}


def _pong(channel: _Channel) -> None:
    while _PING.unpack(_exactly(channel.socket, _PING.size))[0]:
        channel.socket.sendall(_PING.pack(time.time()))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other node has closed the connection")
        data += part
    return data


# --- bandwidth --------------------------------------------------------------------


def _send(connection: socket.socket) -> None:
    """Send as much as goes through in a moment."""
    chunk, sent, end = memoryview(bytes(_CHUNK)), 0, time.monotonic() + _SENDING
    connection.settimeout(_MESSAGE_TIMEOUT)
    while sent < MOST_BYTES and time.monotonic() < end:
        sent += connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> float:
    """Receive until there is no more; return bytes per second.

    It is the median of some windows of time: the first one is TCP's slow start, and in
    any other one a busy machine may have had something else to do.
    """
    connection.settimeout(_MESSAGE_TIMEOUT)
    buffer, total, start = bytearray(_CHUNK), 0, time.monotonic()
    marks = [(start, 0)]
    while size := connection.recv_into(buffer):
        total += size
        marks.append((time.monotonic(), total))
    first, last = marks[min(1, len(marks) - 1)][0], marks[-1][0]
    if last <= first:  # next to nothing has come
        return total / (time.monotonic() - start)
    length, rates = (last - first) / _WINDOWS, list[float]()
    edge = marks[1]
    for mark in marks[2:]:
        if mark[0] >= edge[0] + length or mark is marks[-1]:
            rates.append((mark[1] - edge[1]) / max(mark[0] - edge[0], 1e-9))
            edge = mark
    return median(rates[1:] or rates)


def _lost(connection: socket.socket) -> float:
    """Return the share of the segments that this side had to send again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
    if len(info) < _INFO_SIZE:  # Linux before 4.6
        return 0.0
    (again,), (sent,) = (
        struct.unpack_from("I", info, offset) for offset in (_RETRANSMITTED, _SENT)
    )
    return float(again / max(sent, 1))
