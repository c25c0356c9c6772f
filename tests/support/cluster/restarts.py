"""A job whose workers fail, and start again with a late rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.cluster.commands import FORMS, SCRIPTS
from tests.support.cluster.real_job import launch

if TYPE_CHECKING:
    from tests.support.cluster.testbed import Cluster

SCRIPT = str(SCRIPTS / "restarts.py")
# With each, all nodes import torch; forks do not.
RESTARTS = {"exec": 1, "fork": 2}


def all_meet(cluster: Cluster, rendezvous: str, form: str, nodes: int = 3) -> None:
    """See that all workers meet in each attempt."""
    restarts = RESTARTS[form]
    # Up to torch 2.3 an agent looks after its workers every 5 s.
    options = (f"--hpc-rendezvous={rendezvous}", "--monitor-interval=0.1")
    done = launch(
        cluster,
        *(*options, f"--max-restarts={restarts}"),
        script=[SCRIPT, str(restarts)],
        nodes=nodes,
        environ=FORMS[form],
    )
    assert done.returncode == 0
    assert "HPC169" not in done.stderr
    # Some releases of torch have gloo speak on stdout.
    told = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]
    assert sorted(told) == sorted(
        f"met: rank {rank}, attempt {attempt}"
        for attempt in range(restarts + 1)
        for rank in range(nodes)
    )
