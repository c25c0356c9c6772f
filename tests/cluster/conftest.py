"""Clusters for tests: each is started by the first test that asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import launchers
import pytest
import testbed
from commands import ENVIRON, FORMS, JUELICH, require
from launchers import LAUNCHERS, Launcher
from testbed import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs root and an installed Slurm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook sees the tests of all folders.
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")
            for marker in item.iter_markers("release"):  # for tests/matrix.py
                item.user_properties.append(("release", marker.args[0]))


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Skip where no cluster can be started; in CI, fail."""
    require(testbed.missing())


@pytest.fixture(scope="session")
def juelich() -> Iterator[Cluster]:
    """Three nodes as in JUWELS Booster: Slurm alone may use the management network."""
    with Cluster(("jwb0001", "jwb0002", "jwb0003"), management="closed") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def unpadded() -> Iterator[Cluster]:
    """Three nodes whose names, sorted as text, are not in the scheduler's order."""
    with Cluster(("n9", "n10", "n11"), management="open") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def bare() -> Iterator[Cluster]:
    """Three nodes without a scheduler, and no order in their names as text."""
    with Cluster(("n9", "n10", "n11"), management="open", slurm=False) as cluster:
        yield cluster


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start the workers in both forms; say in which."""
    for name, value in FORMS[request.param].items():
        for environ in (ENVIRON, JUELICH):
            monkeypatch.setitem(environ, name, value)
    return str(request.param)


@pytest.fixture(params=LAUNCHERS, ids=str)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """Each MPI launcher in turn; of a test's own choice with ``indirect=True``."""
    require(launchers.missing())
    chosen: Launcher = request.param
    return chosen
