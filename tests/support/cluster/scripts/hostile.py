"""Somebody else's program: does to a job's ports whatever it can.

    hostile.py MARKER IDENTITY HOST:PORT…

It is of another user, who knows what all can know: the number of the job, the names of
the nodes, the ports, and what /proc shows. It sends garbage and a gigabyte, holds
connections open, pretends to be an agent of the launch, and where it finds a store,
overwrites, deletes and appends to all its keys, with pickles that would create
the file MARKER if anybody loaded them.
Says how much of that it did, and then holds its connections until it is ended.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - nobody cannot read it later
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc import __version__, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.key import Secret
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    VERSION,
    Ask,
    Bye,
    Confirm,
    Died,
    Done,
    GaveUp,
    Get,
    Join,
    JoinRequest,
    Present,
    Question,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

NOBODY = 65534

MARKER = sys.argv[1]
JOB = sys.argv[2]
PLACES = [
    (host, int(port)) for host, _, port in (x.partition(":") for x in sys.argv[3:])
]
GIGABYTE = 2**30
CHANGES = 300  # of a store's keys
did: Counter[str] = Counter()
held: list[socket.socket] = []
# Of an agent on this host, if there is one.
PID = max(
    int(file.parent.name)
    for file in Path("/proc").glob("[0-9]*/cmdline")
    if b"torchrun_hpc" in file.read_bytes()
)


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
        pickle.dumps(Payload()), b'{"gave_up":{"failure":{"kind":"worker"}}}\n',
        b'{"join":0}\n',
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
    """Be each agent, with all that others can know, whatever is answered."""
    for rank in range(3):
        request = JoinRequest(JOB, 3, rank, "n9", PID, __version__, "evil")
        failure = Failure(Kind.AGENT, (rank,), text="evil")
        failed, asks = replace(request, failed=failure), replace(request, asks=True)
        for each in request, failed, asks:
            for how in "at once", "without a proof", "with the other's proof":
                did["pretended"] += 1
                with contextlib.suppress(OSError), connected(place) as opened:
                    be_an_agent(opened, wire.encode(each), how, failure)


def be_an_agent(
    opened: socket.socket, request: Mapping[str, Any], how: str, failure: Failure
) -> None:
    """Try to be one; count what is answered beside random numbers."""
    answers = opened.makefile()
    if how != "at once":
        steps = Secret(JOB, b"guessed").call(opened.getpeername(), request)
        opened.sendall(wire.to_line(next(steps)))
        challenge = json.loads(answers.readline())
        did["disclosed"] += challenge.keys() != {"nonce", "proof"}
        reflected = {"proof": challenge["proof"]} if "other" in how else {}
        request = {**request, **reflected}
    store = "198.51.100.66", 6666
    messages = [
        Present(store, done=False, term=(0, 0), round=-1), Join(),
        Confirm((0, 0), 0, store), Ask(1, Get(("a",))), Question(1, "stacks", None),
        Died(failure, 0), GaveUp(failure), Done(0), Bye(),
    ]  # fmt: skip
    lines = [request, *(wire.encode(each, FROM_AGENT) for each in messages)]
    opened.sendall(b"".join(map(wire.to_line, lines)))
    did["disclosed"] += len(answers.readlines())


def spoil(place: tuple[str, int]) -> None:
    """Spoil all keys of a store, some times."""
    import torch.distributed  # noqa: PLC0415 - slow to import

    payload = pickle.dumps(Payload()).decode("latin-1")
    with contextlib.suppress(RuntimeError):
        # Only a store answers this; nobody else is asked to be one.
        make: Any = vars(torch.distributed)["TCPStore"]
        store = make(*place, is_master=False, timeout=timedelta(seconds=60))
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
    if PLACES[1:]:
        import torch.distributed  # noqa: F401, PLC0415 - nobody cannot read it
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
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
