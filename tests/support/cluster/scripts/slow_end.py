"""One rank raises an exception; the others lose it, and end earlier.

    slow_end.py RANK FOLDER

The launcher stops this rank while it runs its exit handlers, after its traceback.
"""

import atexit
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ODD, TOLD = sys.argv[1], Path(sys.argv[2]) / "told"
LONG = 1000  # seconds


def wait() -> None:
    """Wait until the launcher stops this process."""
    TOLD.touch()
    time.sleep(LONG)


dist.init_process_group("gloo")
rank = os.environ["RANK"]
dist.barrier()
if rank == ODD:
    atexit.register(wait)
    try:
        raise ValueError("bad batch 17")
    finally:
        dist.destroy_process_group()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    while not TOLD.exists():
        time.sleep(0.01)
    raise
