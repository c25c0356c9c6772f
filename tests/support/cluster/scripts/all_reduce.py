"""Says what a worker was told, after an all-reduce with all others."""

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("SLURMD_NODENAME", "SLURM_JOB_ID", "TORCH_CPP_LOG_LEVEL", "RES_OPTIONS"),
)

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
slurm = [shutil.which("scontrol"), *map(str, Path("/etc/slurm").glob("*"))]
conf = os.environ.get("SLURM_CONF")
if conf and Path(conf).exists():
    slurm.append(conf)
report = {
    **{name: os.environ.get(name, "") for name in NAMES},
    "total": total.item(),
    "host": socket.gethostname(),
    "slurm": [*filter(None, slurm)],
}
# In one piece: the workers of a node share a pipe.
sys.stdout.write(json.dumps(report) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
time.sleep(0.2)  # gloo's threads outlive it: see examples/ddp.py
