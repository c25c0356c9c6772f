"""Rank 0 fails after each attempt, and comes three seconds late to the next one.

    restarts.py N

An attempt is one broadcast over gloo, and a barrier. Says "met" or "missed" for each,
and ends well after N restarts. A worker that meets keys of the attempt before connects
to the sockets of dead workers, and misses.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist

restarts = int(sys.argv[1])
rank = int(os.environ["RANK"])
attempt = torch.tensor(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))  # of this node

if rank == 0 and attempt > 0:
    time.sleep(3)
try:
    dist.init_process_group("gloo")
    dist.broadcast(attempt, src=0)
except Exception as error:  # noqa: BLE001 - whatever gloo raises
    sys.stdout.write(f"missed: rank {rank}, attempt {attempt}: {error}\n")
    sys.exit(1)
sys.stdout.write(f"met: rank {rank}, attempt {attempt}\n")
sys.stdout.flush()
# Rank 0 ends the others when all have said so. They may still be in the barrier then.
with contextlib.suppress(RuntimeError):
    dist.barrier()
if attempt < restarts:
    if rank == 0:
        sys.exit(1)
    time.sleep(900)  # until this node's agent is called to a new round
dist.destroy_process_group()
