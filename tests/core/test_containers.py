"""In containers: no Slurm inside, another host name, stale variables.

The container is a stand-in, scripts/container.sh: namespaces that have just these
properties. Neither Apptainer nor pyxis is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commands import (
    ALL_REDUCE,
    HPC,
    JUELICH,
    ONE_TASK,
    SCRIPTS,
    column,
    lines,
    read_workers,
)

if TYPE_CHECKING:
    from testbed import Cluster

CONTAINER = ("sh", str(SCRIPTS / "container.sh"))


def test_agents(juelich: Cluster) -> None:
    """No scontrol, no files of Slurm's, one host name on all nodes; enroot's hook.

    The hook's MASTER_ADDR is jwb0001, which is in the closed network.
    """
    done = juelich.srun(
        "-N2", "--nodelist=jwb0001,jwb0002", ONE_TASK, *CONTAINER, "--hook", *HPC,
        ALL_REDUCE, env=JUELICH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = read_workers(done)
    assert column(seen, "RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME") == [
        ("0", "0", "2", "jwb0001"),
        ("1", "0", "2", "jwb0002"),
    ], done.stdout
    for worker in seen:
        assert worker["host"] == "container"
        assert worker["slurm"] == []
        assert worker["MASTER_ADDR"] == "10.20.0.1"
        assert int(worker["MASTER_PORT"]) < 61000
        assert worker["GLOO_SOCKET_IFNAME"] == "ib0"
        assert worker["total"] == 1
    assert len(lines(done.stderr)) == 1, done.stderr
