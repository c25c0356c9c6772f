"""A death signal, while torch ends the workers of a job that has failed elsewhere."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

from tests.support.stock.inside_torch import NO_HOOKS, RecordedAgent, launcher_api
from torchrun_hpc import limits
from torchrun_hpc.agent.patches.agent import DeferSignals, extend
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous.errors import JobFailedError

FAILED = JobFailedError(Failure(Kind.LOST, (1,)))
STOPPED = SignalException("SIGINT", signal.SIGINT)


class TwiceSignalled(RecordedAgent):
    """Gets a second signal while it ends its workers."""

    def __init__(self) -> None:
        super().__init__(Mock(), _worker_group=None)

    def _shutdown(self, *_args: Any, **_options: Any) -> None:
        context: Any = self
        PContext.close(context)


@pytest.fixture
def signals(monkeypatch, torch_again):  # noqa: ARG001
    """Send SIGTERM while workers are ended."""
    monkeypatch.setattr(limits, "SIGNAL_TIMEOUT", 0.02)
    monkeypatch.setattr(launcher_api, "LocalElasticAgent", TwiceSignalled)
    monkeypatch.setattr(PContext, "close", lambda _: signal.raise_signal(15))
    held = DeathSignals()
    extend([DeferSignals], None, replace(NO_HOOKS, death_signals=held))
    before = signal.signal(15, multiprocessing._terminate_process_handler)
    yield held
    held.end()
    signal.signal(15, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("problem", [FAILED, STOPPED])
def test_the_end_of_a_failed_job_is_not_interrupted(problem):
    """What follows reads the workers' last words."""
    agent = launcher_api.LocalElasticAgent()
    steps = []

    def run() -> None:
        try:
            raise problem
        finally:
            agent._shutdown()
            time.sleep(0.1)
            steps.append("read")

    with pytest.raises(type(problem)):
        run()
    assert steps == ["read"]


@pytest.mark.usefixtures("signals")
def test_a_job_that_has_not_failed_ends():
    agent = launcher_api.LocalElasticAgent()
    with pytest.raises(SignalException):
        agent._shutdown()
