"""An agent answers questions about its workers."""

from __future__ import annotations

import os

import pytest

from tests.support.plans import PLAN
from tests.support.stack_samples import worker
from torchrun_hpc.agent.elastic import Observer
from torchrun_hpc.failures.report import LocalWorld
from torchrun_hpc.stacks import sampling
from torchrun_hpc.stacks.inspection import FORKS, FRAMES, STACKS
from torchrun_hpc.stacks.sampling import WorkerStack, received


@pytest.mark.parametrize(
    ("question", "starts"), [(FORKS, False), (FRAMES, True), (STACKS, True)]
)
def test_which_questions_start_py_spy(question, starts, monkeypatch):
    """The default of the stall report must not: it asks for `FORKS`."""
    started = []
    monkeypatch.setattr(sampling, "_program", lambda: started.append(1))

    def make_world(observer):
        return LocalWorld(PLAN.meeting, observer.explain)

    observer = Observer(PLAN, lambda _: None, make_world)
    observer.watch.begin([worker(os.getpid())], 0)
    (found,) = received(observer.stacks.replies[question](None))
    observer.watch.end()
    observer.relay.close(1)
    assert bool(started) == starts
    if not starts:
        assert found == WorkerStack(5, 1, problem="no answer")
