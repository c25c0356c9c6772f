"""Says what a worker was told, as one line of JSON; imports no torch."""

import json
import os
import socket
import sys
import time

variables = {
    name: value
    for name, value in os.environ.items()
    if name.endswith(("RANK", "WORLD_SIZE", "_SOCKET_IFNAME", "OMP_NUM_THREADS"))
    or name.startswith(("MASTER_", "TORCH", "NCCL_", "PET_", "SLURM_NODEID"))
}
report = {
    **variables,
    "host": socket.gethostname(),
    "argv": sys.argv[1:],
    "cpus": sorted(os.sched_getaffinity(0)),
}
# In one piece: the workers of a node share a pipe.
sys.stdout.write(json.dumps(report) + "\n")
sys.stdout.flush()
if "--sleep" in sys.argv:
    time.sleep(float(sys.argv[sys.argv.index("--sleep") + 1]))
