"""NCCL times out: the last rank does not come, or its GPU is busy if it is alone."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=10))
rank, size = dist.get_rank(), dist.get_world_size()
sent = torch.ones(1024, device=device)
dist.all_reduce(sent)
torch.cuda.synchronize()


def late() -> None:
    """Do not come."""
    if size > 1:
        time.sleep(1000)
    for _ in range(1000):
        torch.cuda._sleep(10**9)


if rank == size - 1:
    late()
dist.all_reduce(sent)
torch.cuda.synchronize()
