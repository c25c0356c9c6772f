"""An agent that stops its workers for a restart keeps the rendezvous open."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.support.stock.inside_torch import NO_HOOKS, launcher_api
from torchrun_hpc.agent.patches.agent import KeepOpenOnRestart, extend


@pytest.mark.usefixtures("torch_again")
def test_a_restart_leaves_the_rendezvous_open(monkeypatch):
    stopped = []
    monkeypatch.setattr(
        LocalElasticAgent,
        "_stop_workers",
        lambda self, group: stopped.append((self._rdzv_handler, group)),
    )
    extend([KeepOpenOnRestart], None, NO_HOOKS)
    agent: Any = object.__new__(launcher_api.LocalElasticAgent)
    agent._rdzv_handler = "handler"
    agent._stop_workers("group")
    assert stopped == [(None, "group")]
    assert agent._rdzv_handler == "handler"  # the agent closes it at its end
