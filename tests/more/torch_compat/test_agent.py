"""How torch's agent and our rendezvous know of each other."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api as launcher_api

from torchrun_hpc.rendezvous.handler import SchedulerRendezvous
from torchrun_hpc.rendezvous.protocol import Failure, Kind
from torchrun_hpc.torch_compat.patches import agent

if TYPE_CHECKING:
    from collections.abc import Callable


class Recording(SchedulerRendezvous):
    """A handler that records what the agent lets it know."""

    def __init__(self, *, restarts: int = 0, ends_well: bool = True) -> None:
        self.calls: list[Any] = []
        self._restarts = restarts
        self._ends_well = ends_well

    @property
    def restarts(self) -> int:
        return self._restarts

    def give_up(self, failure: Failure) -> None:
        self.calls.append(failure)

    def finish(self) -> bool:
        self.calls.append("finish")
        return self._ends_well


class TorchsAgent(LocalElasticAgent):
    """Stands in for torch's agent: it does nothing, and records that."""

    def __init__(self, handler: Any, max_restarts: int) -> None:
        spec = SimpleNamespace(rdzv_handler=handler, max_restarts=max_restarts)
        self._worker_group: Any = SimpleNamespace(spec=spec)
        self._remaining_restarts = max_restarts
        self.calls: list[Any] = getattr(handler, "calls", [])

    def _rendezvous(self, *args: Any) -> None:
        self.calls.append(("rendezvous", args))

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self.calls.append(("shutdown", args, options))

    def _exit_barrier(self) -> None:
        self.calls.append(("exit barrier",))


@pytest.fixture
def make_agent(
    torch_again: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Make an agent of node 1, as a launch does it."""
    monkeypatch.setattr(launcher_api, "LocalElasticAgent", TorchsAgent)
    agent.apply()

    def make(handler: Any, *, max_restarts: int = 3) -> Any:
        return launcher_api.LocalElasticAgent(handler, max_restarts)

    return make


def test_agents_of_other_rendezvous_are_left_alone(
    make_agent: Callable[..., Any],
) -> None:
    torch_agent = make_agent(object())
    torch_agent._rendezvous("group")
    torch_agent._shutdown("signal")
    torch_agent._exit_barrier()
    assert torch_agent.calls == [
        ("rendezvous", ("group",)),
        ("shutdown", ("signal",), {}),
        ("exit barrier",),
    ]
    assert torch_agent._remaining_restarts == 3


# --- restarts -----------------------------------------------------------------------


@pytest.mark.parametrize(("restarts", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
def test_all_agents_have_the_jobs_restarts_left(
    restarts: int, left: int, make_agent: Callable[..., Any]
) -> None:
    """An agent whose workers did not fail has counted none of them."""
    torch_agent = make_agent(Recording(restarts=restarts))
    torch_agent._rendezvous(torch_agent._worker_group)
    assert len(torch_agent.calls) == 1
    assert torch_agent._remaining_restarts == left


# --- the end of the workers ----------------------------------------------------------


def _raise(number: int) -> None:
    raise SignalException("ended by a signal", signal.Signals(number))


def test_what_ends_the_workers_is_reported_first(
    make_agent: Callable[..., Any],
) -> None:
    """In a restart it is no failure."""
    handler = Recording()
    torch_agent = make_agent(handler)
    torch_agent._shutdown(is_restart=True)
    try:
        _raise(15)
    except SignalException:
        torch_agent._shutdown(15, is_restart=False)
    assert handler.calls == [
        ("shutdown", (), {"is_restart": True}),
        Failure(Kind.SIGNAL, code=15),
        ("shutdown", (15,), {"is_restart": False}),
    ]


# --- the exit barrier ---------------------------------------------------------------


@pytest.mark.parametrize("ends_well", [True, False])
def test_all_wait_for_each_other_in_place_of_the_exit_barrier(
    make_agent: Callable[..., Any], *, ends_well: bool
) -> None:
    handler = Recording(ends_well=ends_well)
    make_agent(handler)._exit_barrier()
    assert handler.calls == ["finish"]
