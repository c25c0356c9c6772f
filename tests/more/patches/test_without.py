"""Several nodes without some of the changes inside torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, HPC, KILL, NODES, ONE_TASK, SCRIPTS, WORLD, read_workers

if TYPE_CHECKING:
    from testbed import Cluster


@pytest.mark.parametrize(
    "name",
    [
        *("state_as_json", "bind_store", "node_order"),
        *("report_missing_nodes", "host_exits_last", "watch_workers"),
    ],
)
def test_nodes_meet_in_torchs_rendezvous_without(unpadded: Cluster, name: str) -> None:
    done = unpadded.srun(
        *("-N3", ONE_TASK, KILL, *HPC, "--hpc-rendezvous=c10d"),
        *(f"--hpc-without-patches={name}", WORLD),
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stderr
    assert {worker["host"] for worker in read_workers(done)} == set(NODES)
    assert f"={name} leaves torch as it is there" in done.stderr


def test_agents_of_torchs_own_meet_in_its_rendezvous(unpadded: Cluster) -> None:
    """In ours each of them would take the end of another one for a failure."""
    done = unpadded.srun(
        *("-N3", ONE_TASK, KILL, *HPC, "--monitor-interval=0.1", "--max-restarts=1"),
        *("--hpc-without-patches=agent", str(SCRIPTS / "restarts.py"), "1"),
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stderr
    assert "c10d rendezvous at n9" in done.stderr
    assert "met: rank 2, attempt 1" in done.stdout
