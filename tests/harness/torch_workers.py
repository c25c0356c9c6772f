"""Settings of workers that run torch's collective operations, on loopback."""

from __future__ import annotations

import os

from loopback import HERE
from ports import own_port
from waiting import PATIENCE

ENVIRON = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def settings_of(nodes, local_size, **changes):
    """Return the settings of all workers, by rank."""
    port = own_port()
    return [
        {
            "rank": node * local_size + local_rank,
            "size": nodes * local_size,
            "local_rank": local_rank,
            "local_size": local_size,
            "task_size": local_size,
            "node_rank": node,
            "nodes": nodes,
            "host": f"n{node}",
            "address": HERE,
            "port": port,
            "max_bytes": 4096,
            "timeout": float(PATIENCE),
        }
        | changes
        for node in range(nodes)
        for local_rank in range(local_size)
    ]
