"""A cluster of two nodes."""

from __future__ import annotations

import pytest

from tests.support.cluster.testbed import Cluster


@pytest.fixture(scope="session")
def cluster(machine):  # noqa: ARG001
    """Two nodes that reach each other on the fast network only."""
    with Cluster(("jwb0001", "jwb0002"), management="closed") as made:
        yield made
