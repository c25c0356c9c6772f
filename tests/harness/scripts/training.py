"""Train until told to stop: an all-reduce every tenth of a second.

    training.py FOLDER [raises] [saves] [prints] [fails_on=HOST]

Writes the restart count, the number of steps, its node and the clock of that into
FOLDER/beat.RANK after each step. Ends when there is FOLDER/stop; rank 1 fails once when
there is FOLDER/fail. Where a step fails it waits on, as NCCL would, until it is killed.

raises: fails where a step fails, and SIGTERM does not end it before.
saves: takes a second to save its state when it gets SIGTERM, into FOLDER/saved.RANK.
prints: four thousand letters a step, on rank 1.
fails_on: the worker on this node fails after a few steps.
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

import torch
import torch.distributed as dist

folder, words = Path(sys.argv[1]), sys.argv[2:]
host = socket.gethostname()
rank, attempt = (
    int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT")
)


def save() -> None:
    """Save the state when SIGTERM comes, whatever the main thread is at."""
    signalled.recv(1)
    time.sleep(1)
    (folder / f"saved.{rank}").touch()
    os._exit(0)


def beat(steps: int) -> None:
    """Say that this worker is alive."""
    state = {"attempt": attempt, "steps": steps, "clock": time.time(), "host": host}
    text = json.dumps(state)
    (folder / f"new.{rank}").write_text(text)
    (folder / f"new.{rank}").rename(folder / f"beat.{rank}")


if "saves" in words:
    signalled, noting = socket.socketpair()
    noting.setblocking(False)  # noqa: FBT003
    signal.set_wakeup_fd(noting.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=save, daemon=True).start()
if "raises" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
steps = 0
while True:
    done = torch.tensor(float((folder / "stop").exists()))
    try:
        dist.all_reduce(done)
    except RuntimeError:
        if "raises" in words:
            raise
        time.sleep(200)
    if done:
        break
    steps += 1
    beat(steps)
    if rank == 1 and attempt == 0 and (folder / "fail").exists():
        sys.exit(3)
    if f"fails_on={host}" in words and steps == 5:
        sys.exit(3)
    if rank == 1 and "prints" in words:
        print("x" * 4000, flush=True)
    time.sleep(0.1)
dist.destroy_process_group()
