"""Somebody else's program: does to a job's ports whatever it can.

    hostile.py SECONDS MARKER IDENTITY HOST:PORT…

Sends garbage and a gigabyte, holds connections open, pretends to be an agent of the
launch of that id, and where it finds a store, overwrites, deletes and appends to
all its keys, with pickles that would create the file MARKER if anybody loaded them.
Says how much of that it did.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from torchrun_hpc.rendezvous.protocol import VERSION

END = time.monotonic() + float(sys.argv[1])
MARKER = sys.argv[2]
JOB = sys.argv[3]
PLACES = [
    (host, int(port)) for host, _, port in (x.partition(":") for x in sys.argv[4:])
]
GIGABYTE = 2**30
did: Counter[str] = Counter()


class Payload:
    """Creates the marker when it is unpickled."""

    def __reduce__(self) -> Any:
        """Tell pickle what to call."""
        return Path.touch, (Path(MARKER),)


def connected(place: tuple[str, int]) -> socket.socket:
    """Connect, and do not wait for long."""
    return socket.create_connection(place, timeout=2)


def garbage(place: tuple[str, int]) -> None:
    """Send invalid messages."""
    lines = [
        b"\x00\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[]\n", b"null\n",
        b'{"protocol":%d}\n' % VERSION, b'{"protocol":%d,"job":[]}\n' % VERSION,
        b"[" * 100000 + b"\n",
        pickle.dumps(Payload()), b'{"failed":{"kind":"worker"}}\n', b'{"join":0}\n',
    ]  # fmt: skip
    for line in lines:
        with contextlib.suppress(OSError), connected(place) as opened:
            did["garbage"] += 1
            opened.sendall(line)
            opened.recv(100)


def flood(place: tuple[str, int]) -> None:
    """Send a gigabyte without a line's end."""
    with contextlib.suppress(OSError), connected(place) as opened:
        for _ in range(GIGABYTE // 2**20):
            opened.sendall(b"x" * 2**20)
            did["megabytes"] += 1


def hold(place: tuple[str, int]) -> None:
    """Hold connections open, and send nothing."""
    held = []
    with contextlib.suppress(OSError):
        for _ in range(300):
            held.append(connected(place))
            did["held"] += 1
    time.sleep(max(END - time.monotonic(), 0))


def pretend(place: tuple[str, int]) -> None:
    """Send the join request of an agent of each node rank."""
    with contextlib.suppress(OSError), connected(place) as opened:
        opened.sendall(b'{"protocol":%d,"job":"?"}\n' % VERSION)
        did["disclosed"] += JOB in opened.makefile().readline()
    for rank in range(3):
        request = {"protocol": VERSION, "job": JOB, "run_id": JOB, "nodes": 3,
                   "rank": rank, "host": "evil", "pid": 1, "release": "1",
                   "site": ""}  # fmt: skip
        with contextlib.suppress(OSError), connected(place) as opened:
            did["pretended"] += 1
            opened.sendall(json.dumps(request).encode() + b"\n")
            opened.recv(1000)


def spoil(place: tuple[str, int]) -> None:
    """Spoil all keys of a store."""
    payload = pickle.dumps(Payload()).decode("latin-1")
    with contextlib.suppress(RuntimeError):
        # Only a store answers this; nobody else is asked to be one.
        store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=2))
        while time.monotonic() < END:
            for number, key in enumerate(store.list_keys()):
                change = (store.set, store.append)[number % 2]
                change(key, payload)
                if number % 3 == 2:
                    store.delete_key(key)
                did["spoiled"] += 1


def main() -> None:
    """Do all at once, until the time is up."""
    attacks = [garbage, flood, hold, pretend]
    rest = PLACES[1:]
    tasks = [(attack, PLACES[0]) for attack in attacks] + [(spoil, p) for p in rest]
    threads = [threading.Thread(target=a, args=(p,), daemon=True) for a, p in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(END - time.monotonic(), 0.1))
    sys.stdout.write(json.dumps(did) + "\n")
    sys.stdout.flush()


main()
