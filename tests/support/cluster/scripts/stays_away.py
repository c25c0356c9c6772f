"""One rank does not come to a collective, in another way after each restart.

    stays_away.py CASES RANK

All ranks call three collectives first. Then this rank does something else. The cases
are separated by commas.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

CASE = sys.argv[1].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
ODD = int(sys.argv[2])
LIMIT = timedelta(seconds=8)
LONG = 1000  # seconds
SENT = torch.ones(1024)  # until the end: gloo's threads hold it a moment longer


class Slow(Dataset[int]):
    """One sample, which never comes."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 1

    def __getitem__(self, _: int) -> int:
        """Sleep."""
        time.sleep(LONG)
        return 0


def together() -> None:
    """Call what all ranks should call."""
    dist.all_reduce(SENT)


def odd() -> None:
    """Do something else instead."""
    if CASE == "skipped":
        dist.barrier()
    elif CASE == "order":
        dist.broadcast(SENT, 0)
        together()
    elif CASE == "shape":
        dist.all_reduce(torch.ones(2048))
    elif CASE == "group":
        dist.all_reduce(SENT, group=two)
    elif CASE in ("sleep", "overflow", "monitored"):
        time.sleep(LONG)
    elif CASE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif CASE == "loader":
        next(iter(DataLoader(Slow(), num_workers=1)))
    elif CASE == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif CASE == "gone":
        os._exit(0)  # gloo may abort a worker that ends with a process group


dist.init_process_group("gloo", timeout=LIMIT)
rank, size = dist.get_rank(), dist.get_world_size()
two = dist.new_group([(ODD - 1) % size, ODD], timeout=LIMIT)
for _ in range(33 if CASE == "overflow" else 3):
    together()
if rank == ODD:
    odd()
elif CASE == "skipped":
    together()
    dist.barrier()
elif CASE == "order":
    together()
    dist.broadcast(SENT, 0)
elif CASE == "monitored":
    dist.monitored_barrier(timeout=LIMIT)
else:
    together()
