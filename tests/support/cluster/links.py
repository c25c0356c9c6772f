"""Links of the test cluster with a rate, and with faults, on the fast network.

Each function is a context manager, which changes a running cluster at once, and at its
end undoes just that; they can be nested. The faults are in the switch: programs on
hosts see what follows, and no cause but their own end's rate, by ``tc``.

The kernel may have no ``netem``: packets are lost by nftables, and late by a program.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import struct
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.support import ROOT
from tests.support.cluster.testbed import SWITCH, Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TABLES = (f"fault{number}" for number in itertools.count(1))

# <linux/if_tun.h>
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_CHECKSUMS_AND_TSO = 1 | 2 | 4
_LARGEST_FRAME = 1 << 17


@contextlib.contextmanager
def shaped(cluster: Cluster, mbits: int = 1000) -> Iterator[None]:
    """Give the links of all compute nodes a rate, both ways; see `throttled`."""
    with contextlib.ExitStack() as stack:
        for host in cluster.names:
            stack.enter_context(throttled(cluster, host, mbits))
        yield


@contextlib.contextmanager
def throttled(
    cluster: Cluster, host: str, mbits: int = 500, *, egress_only: bool = False
) -> Iterator[None]:
    """Give one host's link a rate in Mbit/s instead of its own.

    Ethernet's headers count; of TCP's data comes through 95.6 % with an MTU of 1500.
    Nothing is dropped: the queue takes whatever is sent in 0.4 s.

    Args:
        cluster: A running cluster.
        host: A compute node.
        mbits: The rate, for each direction.
        egress_only: Whether what the host receives stays as fast as it is.
    """
    ends = [(host, cluster.fast), (SWITCH, cluster.port(host))]
    with contextlib.ExitStack() as stack:
        for end in ends[:1] if egress_only else ends:
            shown = _show(cluster, end, "tc", "qdisc", "root")
            before = shown.get("options", {}).get("rate")  # bytes per second
            stack.callback(_set_rate, cluster, end, before)
            _set_rate(cluster, end, mbits * 125_000)
        yield


@contextlib.contextmanager
def lossy(cluster: Cluster, host: str, one_in: int = 40) -> Iterator[None]:
    """Lose each so many-th of the packets to and from a host.

    A piece of up to 64 KB that TCP sends at once counts as one packet, as long as no
    interface has to cut it: fewer losses, of many segments each, and as many bytes.
    """
    port = cluster.port(host)
    some = f'"{port}" numgen inc mod {one_in} == 0 drop'
    with _dropping(cluster, f"iifname {some}", f"oifname {some}"):
        yield


@contextlib.contextmanager
def firewalled(cluster: Cluster, source: str, target: str) -> Iterator[None]:
    """Drop the TCP connections that one host opens to another; not the other way."""
    ends = ((host, cluster.fast) for host in (source, target))
    ours, theirs = (_show(cluster, end, "ip", "link")["address"] for end in ends)
    addresses = f"ether saddr {ours} ether daddr {theirs}"
    with _dropping(cluster, f"{addresses} tcp flags & (syn | ack) == syn drop"):
        yield


@contextlib.contextmanager
def small_mtu(
    cluster: Cluster, host: str, mtu: int = 1500, ends: int = 9000
) -> Iterator[None]:
    """Lose what is larger than an MTU to and from a host; all believe in a larger one.

    This is for connections that are opened meanwhile. Their segments are packets of
    their own: of larger pieces nobody could tell whether the segments would fit.
    """
    port = cluster.port(host)
    settings = {"mtu": ends, "gso_max_segs": 1}
    with contextlib.ExitStack() as stack:
        for name in cluster.names:
            for end in (SWITCH, cluster.port(name)), (name, cluster.fast):
                shown = _show(cluster, end, "ip", "link")
                before = {key: shown[key] for key in settings}
                stack.callback(_set_link, cluster, end, before)
                _set_link(cluster, end, settings)
        too_large = f'"{port}" meta length > {mtu} drop'
        stack.enter_context(
            _dropping(cluster, f"iifname {too_large}", f"oifname {too_large}")
        )
        yield


@contextlib.contextmanager
def delayed(cluster: Cluster, host: str, milliseconds: float = 5) -> Iterator[None]:
    """Make round trips to and from a host longer, half of it each way.

    The host's link moves to a bridge of its own. Between that and the switch's bridge
    a program forwards frames, whole pieces of TCP at once.
    """
    port = cluster.port(host)
    bridge, near, far = (f"{port}.{name}" for name in ("late", "near", "far"))
    delay_s = milliseconds / 2000
    with contextlib.ExitStack() as stack:
        relay = cluster.popen(
            [sys.executable, "-m", __name__, near, far, str(delay_s)],
            host=SWITCH,
            cwd=ROOT,
        )
        stack.enter_context(relay)  # closes its pipes
        stack.callback(cluster.end, relay)
        assert relay.stdout is not None
        assert relay.stderr is not None
        if relay.stdout.readline() != "ready\n":
            raise ClusterError(f"no delay for {host}: {relay.stderr.read()}")
        lines = [f"link add {bridge} type bridge", f"link set {bridge} up"]
        for tap, master in (near, cluster.fast), (far, bridge):
            lines.append(f"link set {tap} mtu 9000 master {master} up")
        lines.append(f"link set {port} master {bridge}")
        cluster.configure(SWITCH, "ip", "-batch", "-", lines=lines)
        stack.callback(cluster.configure, SWITCH, "ip", "link", "del", bridge)
        stack.callback(cluster.heal, host)
        yield


def _set_rate(cluster: Cluster, end: tuple[str, str], rate: int | None) -> None:
    where, interface = end
    root = ("dev", interface, "root")
    if rate is None:
        cluster.configure(where, "tc", "qdisc", "del", *root)
        return
    # The burst is what a late timer may make up for: a millisecond, and two pieces of
    # TCP, which would be cut if they did not fit.
    cluster.configure(
        *(where, "tc", "qdisc", "replace", *root, "tbf", "rate", f"{rate * 8}bit"),
        *("burst", "128kb", "latency", "400ms"),
    )


def _set_link(cluster: Cluster, end: tuple[str, str], settings: dict[str, int]) -> None:
    where, interface = end
    words = [str(word) for setting in settings.items() for word in setting]
    cluster.configure(where, "ip", "link", "set", "dev", interface, *words)


def _show(cluster: Cluster, end: tuple[str, str], *words: str) -> dict[str, Any]:
    program, thing, *rest = words
    where, interface = end
    command = [program, "-json", "-details", thing, "show", "dev", interface, *rest]
    shown: dict[str, Any] = json.loads(cluster.configure(where, *command))[0]
    return shown


@contextlib.contextmanager
def _dropping(cluster: Cluster, *rules: str) -> Iterator[None]:
    """Apply rules to all that the switch forwards."""
    table = next(_TABLES)
    chain = ["chain forward {", "type filter hook forward priority 0", *rules, "}"]
    lines = [f"table bridge {table} {{", *chain, "}"]
    cluster.configure(SWITCH, "nft", "-f", "-", lines=lines)
    try:
        yield
    finally:
        cluster.configure(SWITCH, "nft", "delete", "table", "bridge", table)


def _tap(name: str) -> int:
    """Make a network interface whose frames this process writes and reads."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS_AND_TSO)
    return tap


def _relay(near: str, far: str, delay_s: float) -> None:
    """Hand frames on from each of two new interfaces to the other, later."""
    taps = [_tap(near), _tap(far)]
    other = dict(zip(taps, reversed(taps), strict=True))
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()  # when, where, what
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        readable, _, _ = select.select(taps, [], [], timeout)
        now = time.monotonic()
        for tap in readable:
            frame = os.read(tap, _LARGEST_FRAME)
            waiting.append((now + delay_s, other[tap], frame))
        while waiting and waiting[0][0] <= now:
            _, tap, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # an interface that is not up yet
                os.write(tap, frame)


if __name__ == "__main__":
    _relay(sys.argv[1], sys.argv[2], float(sys.argv[3]))
