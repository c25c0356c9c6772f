"""In containers: no Slurm inside, another host name, stale variables.

The container is a stand-in: neither Apptainer nor pyxis is started.
"""

from __future__ import annotations

from tests.support.cluster.commands import (
    ALL_REDUCE,
    CONTAINER,
    JUELICH,
    column,
    lines,
    read_workers,
)
from tests.support.cluster.real_job import launch


def test_agents(juelich):
    """No scontrol, no files of Slurm's, one host name on all nodes; enroot's hook.

    The hook's MASTER_ADDR is jwb0001, which is in the closed network.
    """
    inside = (*CONTAINER, "--hook")
    done = launch(juelich, script=[ALL_REDUCE], srun=inside, environ=JUELICH)
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME") == [
        ("0", "0", "2", "jwb0001"),
        ("1", "0", "2", "jwb0002"),
    ]
    for worker in seen:
        assert worker["host"] == "container"
        assert worker["slurm"] == []
        assert worker["MASTER_ADDR"] == "10.20.0.1"
        assert int(worker["MASTER_PORT"]) < 61000
        assert worker["GLOO_SOCKET_IFNAME"] == "ib0"
        assert worker["total"] == 1
    assert len(lines(done.stderr)) == 1
