"""A cluster of two nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from testbed import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster(machine: None) -> Iterator[Cluster]:  # noqa: ARG001
    """Two nodes that reach each other on the fast network only."""
    with Cluster(("jwb0001", "jwb0002"), management="closed") as made:
        yield made
