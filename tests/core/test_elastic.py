"""A range of nodes: the job starts with those that come."""

from __future__ import annotations

import pytest

from tests.support.cluster.commands import NODES, column
from tests.support.cluster.real_job import launch
from tests.support.patience import PATIENCE


@pytest.mark.release
def test_an_elastic_range(unpadded):
    """Two of the nodes, and then all; it is always torch's own rendezvous."""
    for nodes, last_call_s in (NODES[1:], 2), (NODES, PATIENCE):
        conf = f"--rdzv_conf=last_call_timeout={last_call_s}"
        done = launch(unpadded, "--nnodes=2:3", conf, hosts=nodes)
        address = f"10.10.0.{1 + NODES.index(nodes[0])}"
        assert column(done, "RANK", "host", "MASTER_ADDR") == [
            (str(rank), name, address) for rank, name in enumerate(nodes)
        ], done
