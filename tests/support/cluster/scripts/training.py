"""Train until told to stop: an all-reduce every tenth of a second.

    training.py FOLDER [gloo] [raises] [saves] [prints]

Writes the restart count, the number of steps, its node and the clock of that into
FOLDER/beat.RANK after each step. Ends when there is FOLDER/stop. Rank 1 fails once when
there is FOLDER/fail, and the worker on HOST as long as there is FOLDER/fail.HOST. If a
step fails it waits on, as NCCL would, until it is killed.

gloo: the all-reduce is torch's; otherwise rank 0 asks the others, over plain sockets.
raises: fails if a step fails, and SIGTERM does not end it before.
saves: takes a second to save its state when it gets SIGTERM, into FOLDER/saved.RANK.
prints: four thousand letters a step, on rank 1.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER_S = 900  # no worker ends by itself
folder, words = Path(sys.argv[1]), sys.argv[2:]
host = socket.gethostname()
rank, attempt, world_size = (
    int(os.environ[name])
    for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
)


def save() -> None:
    """Save the state when SIGTERM comes, whatever the main thread is at."""
    signalled.recv(1)
    time.sleep(1)
    (folder / f"saved.{rank}").touch()
    os._exit(0)


def write(name: str, text: str) -> None:
    """Replace a file that others read meanwhile."""
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)


def beat(steps: int) -> None:
    """Write that this worker is alive."""
    state = {"attempt": attempt, "steps": steps, "clock": time.time(), "host": host}
    write(f"beat.{rank}", json.dumps(state))


def over_gloo() -> Callable[[int], int]:
    """Return an all-reduce of torch."""
    import torch  # noqa: PLC0415 - not for the others
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo", timeout=timedelta(seconds=NEVER_S))

    def any_of_all(value: int) -> int:
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        return int(tensor)

    return any_of_all


def over_sockets() -> Callable[[int], int]:
    """Return an all-reduce over one connection from rank 0 to each other rank."""
    address, file = os.environ["MASTER_ADDR"], f"port.{attempt}"
    if rank == 0:
        server = socket.create_server((address, 0))
        write(file, str(server.getsockname()[1]))
        peers = [server.accept()[0] for _ in range(1, world_size)]
    else:
        while not (folder / file).exists():
            time.sleep(0.02)
        port = int((folder / file).read_text())
        peers = [socket.create_connection((address, port))]

    def receive(peer: socket.socket) -> int:
        received = peer.recv(1)
        if not received:
            raise ConnectionResetError
        return received[0]

    def any_of_all(value: int) -> int:
        if rank == 0:
            value = max([value, *map(receive, peers)])
        for peer in peers:
            peer.sendall(bytes([value]))
        return value if rank == 0 else receive(peers[0])

    return any_of_all


if "saves" in words:
    signalled, noting = socket.socketpair()
    noting.setblocking(False)  # noqa: FBT003
    signal.set_wakeup_fd(noting.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=save, daemon=True).start()
if "raises" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
any_of_all = over_gloo() if "gloo" in words else over_sockets()
steps = 0
while True:
    try:
        is_over = any_of_all(int((folder / "stop").exists()))
    except (RuntimeError, OSError):
        if "raises" in words:
            raise
        time.sleep(NEVER_S)
    if is_over:
        break
    steps += 1
    beat(steps)
    if rank == 1 and attempt == 0 and (folder / "fail").exists():
        sys.exit(3)
    if steps > 5 and (folder / f"fail.{host}").exists():
        sys.exit(3)
    if rank == 1 and "prints" in words:
        print("x" * 4000, flush=True)
    time.sleep(0.1)
# Without gloo's threads, which may still hold the last tensor.
os._exit(0)
