"""How torch's agent and our rendezvous know of each other."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from torchrun_hpc.planning.plan import LaunchPlan
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous
from torchrun_hpc.rendezvous.protocol import Failure, Kind
from torchrun_hpc.torch_compat.patches import agent, registry, replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Simple: Any = api.SimpleElasticAgent
PLACES = [
    (Simple, "_rendezvous"),
    (Simple, "_exit_barrier"),
    (LocalElasticAgent, "_start_workers"),
    (LocalElasticAgent, "_shutdown"),
]


@pytest.fixture
def torch_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put torch back behind the test."""
    replacing.restore()
    for owner, name in [*PLACES, (Simple, "__init__")]:
        monkeypatch.setattr(owner, name, vars(owner)[name])
    yield
    replacing.restore()


PLAN = LaunchPlan(
    title="", nodes=2, node_rank=0, workers=1, is_reporter=True, endpoint="head:1"
)


class Recording(SchedulerRendezvous):
    """A handler that records what the agent lets it know."""

    def __init__(self, *, restarts: int = 0, ends_well: bool = True) -> None:
        self.calls: list[Any] = []
        self.workers: dict[int, Callable[[], int | None]] = {}
        self._restarts = restarts
        self._ends_well = ends_well

    @property
    def restarts(self) -> int:
        return self._restarts

    def watch(self, workers: Any) -> None:
        self.calls.append("watch")
        self.workers = workers

    def stop_watching(self, *, look: bool) -> None:
        self.calls.append(("stop watching", look))

    def give_up(self, failure: Failure) -> None:
        self.calls.append(failure)

    def finish(self) -> bool:
        self.calls.append("finish")
        return self._ends_well


def _agent(handler: Any, *, max_restarts: int = 3, workers: int = 2) -> Any:
    """Make what the wrapped methods see of an agent on node 1."""
    spec = SimpleNamespace(rdzv_handler=handler, max_restarts=max_restarts)
    ranked = [SimpleNamespace(global_rank=workers + n) for n in range(workers)]
    return SimpleNamespace(
        _worker_group=SimpleNamespace(spec=spec, workers=ranked),
        _remaining_restarts=max_restarts,
        _pcontext=SimpleNamespace(subprocess_handlers={}),
    )


def _original(calls: list[Any], answer: Any = None) -> Any:
    def original(_self: Any, *args: Any, **options: Any) -> Any:
        calls.append(("original", args, options))
        return answer

    return original


# --- whether it fits ----------------------------------------------------------------


def _other(self: Any, worker_group: Any, more: Any) -> None: ...


def _no_arguments(self: Any) -> None: ...


CHANGES = [
    (Simple, "_rendezvous", _other),
    (Simple, "_rendezvous", None),
    (Simple, "_exit_barrier", _other),
    (Simple, "_exit_barrier", None),
    (Simple, "__init__", _no_arguments),  # it counts the restarts otherwise
    (LocalElasticAgent, "_start_workers", _no_arguments),
    (LocalElasticAgent, "_start_workers", None),
    (LocalElasticAgent, "_shutdown", None),
]


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    ("owner", "name", "changed"),
    CHANGES,
    ids=[f"{name}-{getattr(c, '__name__', c)}" for _, name, c in CHANGES],
)
def test_a_torch_that_has_changed(
    owner: Any, name: str, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    before = [vars(place).get(place_name) for place, place_name in PLACES]
    monkeypatch.setattr(registry, "PATCHES", (agent,))
    (outcome,) = registry.apply_patches(PLAN)
    assert outcome.state is registry.State.DOES_NOT_FIT
    (message,) = registry.left_out([outcome])
    assert (message.code, agent.REASON in message.text) == ("HPC080", True)
    assert [vars(place).get(place_name) for place, place_name in PLACES] == before


@pytest.mark.usefixtures("torch_again")
def test_every_target_is_replaced_and_put_back() -> None:
    before = [vars(owner)[name] for owner, name in PLACES]
    assert agent.fits()
    agent.apply(PLAN)
    after = [vars(owner)[name] for owner, name in PLACES]
    for old, new in zip(before, after, strict=True):
        assert old is not new
        assert new.__wrapped__ is old
    assert agent.fits()  # a second launch in this process
    replacing.restore()
    assert [vars(owner)[name] for owner, name in PLACES] == before


@pytest.mark.parametrize(
    ("wrap", "arguments"),
    [
        (agent._counting, ["group"]),
        (agent._watching, ["group"]),
        (agent._announcing, ["signal"]),
        (agent._waiting, []),
    ],
)
def test_agents_of_other_rendezvous_are_left_alone(
    wrap: Any, arguments: list[str]
) -> None:
    calls: list[Any] = []
    made = _agent(object())
    assert wrap(_original(calls, "answer"))(made, *arguments) == "answer"
    assert calls == [("original", tuple(arguments), {})]
    assert made._remaining_restarts == 3


# --- restarts -----------------------------------------------------------------------


@pytest.mark.parametrize(("restarts", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
def test_all_agents_have_the_jobs_restarts_left(restarts: int, left: int) -> None:
    """An agent whose workers did not fail has counted none of them."""
    calls: list[Any] = []
    made = _agent(Recording(restarts=restarts))
    rendezvous = agent._counting(_original(calls, "answer"))
    assert rendezvous(made, made._worker_group) == "answer"
    assert len(calls) == 1
    assert made._remaining_restarts == left


# --- workers ------------------------------------------------------------------------


def test_the_workers_are_watched_by_their_global_ranks() -> None:
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", program])
        for program in ("raise SystemExit(3)", "import time; time.sleep(60)")
    ]
    handler = Recording()
    made = _agent(handler)
    pids = {local: child.pid for local, child in enumerate(children)}
    made._pcontext.subprocess_handlers = {
        local: SimpleNamespace(proc=child) for local, child in enumerate(children)
    }
    try:
        started = agent._watching(_original([], pids))(made, made._worker_group)
        assert started == pids
        assert list(handler.workers) == [2, 3]
        end = time.monotonic() + 10
        while handler.workers[2]() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert [look() for look in handler.workers.values()] == [3, None]
        assert children[0].wait() == 3  # torch's agent was faster
        assert [look() for look in handler.workers.values()] == [3, None]
    finally:
        children[1].kill()
        children[1].wait()
    assert handler.workers[3]() == -9


def test_workers_of_a_function_are_watched_too() -> None:
    """There torch has no process handlers."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    handler = Recording()
    made = _agent(handler, workers=1)
    del made._pcontext.subprocess_handlers
    agent._watching(_original([], {0: child.pid}))(made, made._worker_group)
    end = time.monotonic() + 10
    while handler.workers[1]() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert handler.workers[1]() == 3
    child.wait()


def _raise(number: int) -> None:
    raise SignalException("told to end", signal.Signals(number))


def test_what_ends_the_workers_is_told_first() -> None:
    handler = Recording()
    shutdown = agent._announcing(_original(handler.calls))
    made = _agent(handler)
    try:
        _raise(15)
    except SignalException:
        shutdown(made, 15, is_restart=False)
    assert handler.calls == [
        ("stop watching", False),
        Failure(Kind.SIGNAL, code=15),
        ("original", (15,), {"is_restart": False}),
    ]


def test_the_end_of_workers_in_a_restart_is_no_failure() -> None:
    handler = Recording()
    agent._announcing(_original(handler.calls))(_agent(handler), is_restart=True)
    assert handler.calls == [
        ("stop watching", True),
        ("original", (), {"is_restart": True}),
    ]


# --- the exit barrier ---------------------------------------------------------------


@pytest.mark.parametrize("ends_well", [True, False])
def test_all_wait_for_each_other_in_place_of_the_exit_barrier(
    *, ends_well: bool
) -> None:
    handler = Recording(ends_well=ends_well)
    agent._waiting(_original(handler.calls))(_agent(handler))
    assert handler.calls == ["finish"]
