"""How torch's agent and our rendezvous know of each other."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests.support.stock.inside_torch import NO_HOOKS, RecordedAgent, launcher_api
from torchrun_hpc.agent.patches.agent import ActTogether, extend
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.handler import SchedulerRendezvous

RESTARTS = 3


@pytest.fixture
def seen():
    """Record what our handler gets to know, and what torch's agent does."""
    return Mock(handler=Mock(spec=SchedulerRendezvous, restarts=0))


@pytest.fixture
def make_agent(torch_again, seen, monkeypatch):  # noqa: ARG001
    """Make an agent, as a launch does it; by default with our handler."""
    monkeypatch.setattr(launcher_api, "LocalElasticAgent", RecordedAgent)
    extend([ActTogether], None, NO_HOOKS)

    def make(handler: Any = seen.handler) -> Any:
        group = SimpleNamespace(
            spec=SimpleNamespace(rdzv_handler=handler, max_restarts=RESTARTS)
        )
        return launcher_api.LocalElasticAgent(
            seen.torch, _worker_group=group, _remaining_restarts=RESTARTS
        )

    return make


def test_agents_of_other_rendezvous_are_left_alone(make_agent, seen):
    torch_agent = make_agent(object())
    torch_agent._rendezvous("group")
    torch_agent._shutdown("signal")
    torch_agent._exit_barrier()
    torch = call.torch
    expected = [
        torch.rendezvous("group"), torch.shutdown("signal"), torch.exit_barrier()
    ]  # fmt: skip
    assert seen.mock_calls == expected
    assert torch_agent._remaining_restarts == RESTARTS


@pytest.mark.parametrize(("restarts", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
def test_all_agents_have_the_jobs_restarts_left(restarts, left, make_agent, seen):
    """An agent whose workers did not fail has counted none of them."""
    seen.handler.restarts = restarts
    torch_agent = make_agent()
    torch_agent._rendezvous(torch_agent._worker_group)
    assert seen.mock_calls == [call.torch.rendezvous(torch_agent._worker_group)]
    assert torch_agent._remaining_restarts == left


def _raise(number: int) -> None:
    raise SignalException("ended by a signal", signal.Signals(number))


def test_what_ends_the_workers_is_reported_first(make_agent, seen, monkeypatch):
    """In a restart it is no failure."""
    torch_agent = make_agent()
    torch_agent._shutdown(is_restart=True)
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    try:
        _raise(15)
    except SignalException:
        torch_agent._shutdown(15, is_restart=False)
    assert seen.mock_calls == [
        call.torch.shutdown(is_restart=True),
        call.handler.give_up(Failure(Kind.SIGNAL, code=15, time=1.7e9)),
        call.torch.shutdown(15, is_restart=False),
    ]


def test_all_wait_for_each_other_in_place_of_the_exit_barrier(make_agent, seen):
    make_agent()._exit_barrier()
    assert seen.mock_calls == [call.handler.finish()]
