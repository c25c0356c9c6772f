"""Settings of all tests, and the clusters that they share.

A cluster is started by the first test that asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cluster import mpi as launchers
from tests.support.cluster import testbed
from tests.support.cluster.commands import ENVIRON, FORMS, JUELICH, require
from tests.support.cluster.mpi import LAUNCHERS
from tests.support.cluster.testbed import Cluster
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cluster.mpi import Launcher

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)

pytest_plugins = ["tests.support.golden"]

# Pytest also shows for these modules what an assertion compares.
pytest.register_assert_rewrite("tests.support.stock", "tests.support.plans")

# A busy machine is no failure. Otherwise as before: CI has a profile of its own.
settings.register_profile(
    "patient",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Take Ctrl-C also when a shell has started the tests behind `&`.

    There SIGINT is ignored, and so it would be in every program that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let xdist see the groups of tests: it writes them where pytest 9.2 never looks.

    https://github.com/pytest-dev/pytest-xdist: `WorkerInteractor` of release 3.8.
    """
    for item in items:
        grouped: str | None = getattr(item, "_nodeid", None)
        if grouped is not None and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Put back the handlers that a command leaves, because its process would end."""
    numbers = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def machine() -> None:
    """Skip if no cluster can be started; in CI, fail."""
    require(testbed.missing())


@pytest.fixture(scope="session")
def juelich(machine: None) -> Iterator[Cluster]:  # noqa: ARG001
    """Three nodes as in JUWELS Booster: Slurm alone may use the management network."""
    with Cluster(("jwb0001", "jwb0002", "jwb0003"), management="closed") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def unpadded(machine: None) -> Iterator[Cluster]:  # noqa: ARG001
    """Three nodes whose names, sorted as text, are not in the scheduler's order."""
    with Cluster(("n9", "n10", "n11"), management="open") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def bare(machine: None) -> Iterator[Cluster]:  # noqa: ARG001
    """Three nodes without a scheduler, and no order in their names as text."""
    with Cluster(("n9", "n10", "n11"), management="open", slurm=False) as cluster:
        yield cluster


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start the workers in both forms; return the form's name."""
    for name, value in FORMS[request.param].items():
        for environ in (ENVIRON, JUELICH):
            monkeypatch.setitem(environ, name, value)
    return str(request.param)


@pytest.fixture(params=LAUNCHERS, ids=str)
def mpi(request: pytest.FixtureRequest) -> Launcher:
    """Each MPI launcher in turn; of a test's own choice with ``indirect=True``."""
    chosen: Launcher = request.param
    require(launchers.missing(chosen))
    return chosen


NOBODY = 65534  # user and group


@pytest.fixture
def as_nobody() -> Callable[..., object]:
    """Call functions as another user, in a fork; return what they return."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def call(function: Callable[..., object], *args: object) -> object:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(PATIENCE)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                os.write(writing, json.dumps(function(*args)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        return json.loads(text)

    return call


@pytest.fixture
def beside_nobody(as_nobody: Callable[..., object]) -> Callable[..., Any]:
    """Let a function run as another user; it says when it is ready, and waits."""

    @contextlib.contextmanager
    def beside(function: Callable[..., object]) -> Iterator[None]:
        (has_begun, begin), (may_end, end) = os.pipe(), os.pipe()

        def run() -> None:
            function(lambda: os.write(begin, b"."), lambda: os.read(may_end, 1))

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(as_nobody, run)
            assert os.read(has_begun, 1) == b"."
            try:
                yield
            finally:
                os.write(end, b".")
            running.result(PATIENCE)
        for file in (has_begun, begin, may_end, end):
            os.close(file)

    return beside
