"""Train until told to stop: an all-reduce every tenth of a second.

    steady.py FOLDER [SECONDS]

Ends when FOLDER/stop exists, or after SECONDS. Says where the workers met.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
limit = float(sys.argv[2]) if len(sys.argv) > 2 else 120
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 0:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    (folder / f"store{attempt}").write_text(place)
(folder / f"up{rank}.{attempt}").write_text(str(os.getpid()))
end = time.monotonic() + limit
while True:
    done = torch.tensor(float((folder / "stop").exists() or time.monotonic() > end))
    dist.all_reduce(done)
    if done:
        break
    time.sleep(0.1)
sys.stdout.write(f"steady: rank {rank}, attempt {attempt}\n")
dist.destroy_process_group()
