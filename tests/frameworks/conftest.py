"""A cluster of two nodes, of the kind that ``tests/cluster`` makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from commands import require
from testbed import Cluster, missing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Skip where no cluster can be started; in CI, fail."""
    require(missing())


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes that reach each other on the fast network only."""
    with Cluster(("jwb0001", "jwb0002"), management="closed") as made:
        yield made
