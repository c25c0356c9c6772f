"""Another user's program on the head node, which has the first port of the job.

    imposter.py FOLDER ADDRESS

It is there before the coordinator, which takes the second port. It pretends to be the
coordinator for each second connection, and passes the others on to the real one, in
both directions. Its files in FOLDER: ``first`` when it has the port, ``second`` when
the coordinator listens, and ``pretended`` and ``passed_on``.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - nobody cannot read it later
import itertools
import os
import socket
import sys
import threading
import time
from pathlib import Path

from torchrun_hpc import wire
from torchrun_hpc.planning.head_node import ports_of
from torchrun_hpc.rendezvous.protocol import FROM_COORDINATOR, Welcome

FOLDER, ADDRESS = Path(sys.argv[1]), sys.argv[2]
FIRST, SECOND, *_ = ports_of(
    f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
)[0]
NOBODY = 65534

FOLDER.chmod(0o777)
folder = os.open(FOLDER, os.O_DIRECTORY)  # nobody has no right to those above


def say(name: str) -> None:
    """Make a file."""
    os.close(os.open(name, os.O_CREAT, 0o644, dir_fd=folder))


def pretend(opened: socket.socket) -> None:
    """Accept whoever comes, without the secret."""
    lines = opened.makefile("rb")
    lines.readline()
    opened.sendall(wire.to_line({"nonce": "0" * 32, "proof": "0" * 64}))
    if b"rank" in lines.readline():
        say("believed")
    welcome = wire.encode(Welcome(0, (0, (0, 0)), 0), FROM_COORDINATOR)
    opened.sendall(wire.to_line(welcome))
    say("pretended")


def pass_on(opened: socket.socket) -> None:
    """Pass all on to the coordinator, and its answers back."""
    with socket.create_connection((ADDRESS, SECOND)) as there:
        backward = threading.Thread(target=copy, args=(there, opened))
        backward.start()
        copy(opened, there)
        backward.join()
    say("passed_on")


def copy(one: socket.socket, other: socket.socket) -> None:
    """Copy what one sends to the other one."""
    with contextlib.suppress(OSError):
        while data := one.recv(4096):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


def see_coordinator() -> None:
    """Say when the coordinator listens."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((ADDRESS, SECOND)),
        ):
            say("second")
            return
        time.sleep(0.1)


def serve(opened: socket.socket, number: int) -> None:
    """Serve one connection."""
    with contextlib.suppress(OSError), opened:
        (pass_on if number % 2 else pretend)(opened)


os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
listening = socket.create_server((ADDRESS, FIRST))
say("first")
threading.Thread(target=see_coordinator, daemon=True).start()
for number in itertools.count():
    accepted, _ = listening.accept()
    threading.Thread(target=serve, args=(accepted, number), daemon=True).start()
