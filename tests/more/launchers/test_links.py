"""The links of the test cluster have the faults that they should, and no others."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest
from links import delayed, firewalled, lossy, shaped, small_mtu, throttled
from testbed import SWITCH, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

TIMED_OUT = 3
MBITS = 200  # of each link: little for a slow machine
LOOKS = 10  # at what a busy machine may spoil

# Answers to datagrams, and after a stream with its rate: the median of many short
# times, as on a busy machine the first and the last can be long.
SERVE = """
import socket, statistics, threading, time
server = socket.create_server(("", 29500))
echo = socket.socket(type=socket.SOCK_DGRAM)
echo.bind(("", 29500))
def answer():
    while True:
        message, client = echo.recvfrom(1 << 16)
        echo.sendto(message[:1], client)
threading.Thread(target=answer, daemon=True).start()
print("listening", flush=True)
buffer = bytearray(1 << 20)
while True:
    connection, _ = server.accept()
    with connection:
        rates, count, start = [0.0], 0, time.perf_counter()
        try:
            while size := connection.recv_into(buffer):
                count += size
                passed = time.perf_counter() - start
                if passed > 0.03:
                    rates.append(count * 8e-6 / passed)
                    count, start = 0, start + passed
            connection.sendall(b"%f" % statistics.median(rates))
        except ConnectionResetError:
            pass  # the client has given up
"""
STREAM = f"""
import json, socket, struct, sys, time
block = bytes(1 << 18)
connection = socket.socket()
# What has not arrived at the end shall not come later, beside the next stream.
connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
connection.settimeout(float(sys.argv[2]))
try:
    connection.connect((sys.argv[1], 29500))
    start = time.perf_counter()
    while time.perf_counter() < start + 0.3:
        connection.send(block)
    connection.shutdown(socket.SHUT_WR)
    mbits = float(connection.recv(100))
except TimeoutError:
    sys.exit({TIMED_OUT})
info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
print(json.dumps([mbits, *struct.unpack_from("I", info, 100)]))  # tcpi_total_retrans
"""
PING = f"""
import socket, sys, time
IP_MTU_DISCOVER, IP_PMTUDISC_DO = 10, 2
connection = socket.socket(type=socket.SOCK_DGRAM)
connection.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
connection.settimeout(0.3)
connection.connect((sys.argv[1], 29500))
times = []
for _ in range(20):
    start = time.perf_counter()
    connection.send(bytes(int(sys.argv[2])))
    try:
        connection.recv(1)
    except TimeoutError:
        sys.exit({TIMED_OUT})
    times.append(time.perf_counter() - start)
print(1000 * min(times))
"""


class Stream(NamedTuple):
    share: float  # of the link's rate
    retransmitted: int


@pytest.fixture(scope="module")
def cluster(bare: Cluster) -> Iterator[Cluster]:
    """Healthy links; each host answers to `stream` and `ping`."""
    servers = [
        bare.popen([sys.executable, "-c", SERVE], host=host) for host in bare.names
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
        before = state(bare)
        with shaped(bare, MBITS):
            yield bare
        assert state(bare) == before
    finally:
        for server in servers:
            bare.end(server)


def _say(
    cluster: Cluster, source: str, program: str, target: str, *words: str
) -> str | None:
    command = [sys.executable, "-ISc", program, cluster.fast_names(target), *words]
    done = cluster.run(command, host=source, timeout=20)
    if done.returncode == TIMED_OUT:
        return None
    assert done.returncode == 0, done
    return done.stdout


def stream(
    cluster: Cluster, source: str, target: str, timeout: float = 0.5
) -> Stream | None:
    """Send for 0.3 s; None if nothing got through for some seconds."""
    said = _say(cluster, source, STREAM, target, str(timeout))
    if said is None:
        return None
    mbits, retransmitted = json.loads(said)
    return Stream(mbits / MBITS, retransmitted)


def ping(cluster: Cluster, source: str, target: str, size: int = 100) -> float | None:
    """Return the shortest round trip in ms of datagrams; None if one is lost."""
    said = _say(cluster, source, PING, target, str(size))
    return None if said is None else float(said)


def round_trip(cluster: Cluster, source: str, target: str, most: float) -> float:
    """Return the shortest of some round trips: up to the first that is short enough."""
    found = [float("inf")]
    while min(found) > most and len(found) < LOOKS:
        found.append(ping(cluster, source, target) or float("inf"))
    return min(found)


def share(cluster: Cluster, source: str, target: str, least: float = 0.85) -> float:
    """Return which share of the link's rate the best of some lossless streams had.

    It is up to the first one with the rate that is wanted: on a busy machine a stream
    may be slow, or TCP may send a segment again that was only late.
    """
    found = [0.0]
    while max(found) < least and len(found) < LOOKS:
        sent = stream(cluster, source, target, timeout=5)
        assert sent is not None
        found.append(sent.share * (sent.retransmitted <= 3))
    return max(found)


def state(cluster: Cluster) -> list[object]:
    """What faults change: interfaces, their queues, packet filters, programs."""
    found: list[object] = [set(cluster._programs)]
    for host in (SWITCH, *cluster.names):
        links = json.loads(cluster.configure(host, "ip", "-json", "-d", "link", "show"))
        keys = ("ifname", "mtu", "master", "gso_max_segs")
        found.append([[link.get(key) for key in keys] for link in links])
        queues = json.loads(cluster.configure(host, "tc", "-json", "qdisc", "show"))
        keys = ("dev", "kind", "options")
        found.append([[queue[key] for key in keys] for queue in queues])
        found.append(cluster.configure(host, "nft", "--stateless", "list", "ruleset"))
    return found


def test_a_healthy_link(cluster: Cluster) -> None:
    assert 0.85 < share(cluster, "n9", "n10") < 0.98
    assert 0.85 < share(cluster, "n10", "n9") < 0.98
    assert round_trip(cluster, "n9", "n10", 1) < 1


def test_throttled(cluster: Cluster) -> None:
    with throttled(cluster, "n10", MBITS // 2):
        assert 0.425 < share(cluster, "n9", "n10", 0.425) < 0.49
        assert 0.425 < share(cluster, "n10", "n9", 0.425) < 0.49
        assert 0.85 < share(cluster, "n9", "n11") < 0.98
    with throttled(cluster, "n10", MBITS // 2, egress_only=True):
        assert 0.85 < share(cluster, "n9", "n10") < 0.98
        assert 0.425 < share(cluster, "n10", "n9", 0.425) < 0.49


def test_lossy(cluster: Cluster) -> None:
    with lossy(cluster, "n10", one_in=20):  # of one in 100, it could be none
        for source, target in ("n9", "n10"), ("n10", "n9"):
            sent = stream(cluster, source, target, timeout=10)
            assert sent is not None
            assert sent.retransmitted > 0
        assert share(cluster, "n9", "n11") > 0.85


def test_delayed(cluster: Cluster) -> None:
    with delayed(cluster, "n10"):
        for source, target in ("n9", "n10"), ("n10", "n9"):
            assert 5 < round_trip(cluster, source, target, 7) < 7
            assert 0.75 < share(cluster, source, target, 0.75) < 0.98
        assert round_trip(cluster, "n9", "n11", 1) < 1


def test_small_mtu(cluster: Cluster) -> None:
    with small_mtu(cluster, "n10"):
        for source, target in ("n9", "n10"), ("n10", "n9"):
            assert ping(cluster, source, target, 1472) is not None
            assert ping(cluster, source, target, 1473) is None
        assert stream(cluster, "n9", "n10") is None
        assert ping(cluster, "n9", "n11", 8972) is not None
        assert share(cluster, "n9", "n11") > 0.85


def test_firewalled(cluster: Cluster) -> None:
    with firewalled(cluster, "n9", "n10"):
        assert stream(cluster, "n9", "n10") is None
        assert ping(cluster, "n9", "n10") is not None
        assert share(cluster, "n10", "n9") > 0.85
        assert share(cluster, "n11", "n10") > 0.85


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        (shaped, [100]),
        (throttled, ["n10"]),
        (lossy, ["n10"]),
        (delayed, ["n10"]),
        (small_mtu, ["n10"]),
        (firewalled, ["n9", "n10"]),
    ],
)
def test_each_fault_is_undone(
    cluster: Cluster,
    fault: Callable[..., AbstractContextManager[None]],
    arguments: list[str | int],
) -> None:
    before = state(cluster)
    with suppress(KeyboardInterrupt), fault(cluster, *arguments):
        assert state(cluster) != before
        raise KeyboardInterrupt
    assert state(cluster) == before
