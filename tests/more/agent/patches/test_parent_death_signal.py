"""A worker ends when its agent ends."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from tests.support.stock.inside_torch import make_plan
from torchrun_hpc.agent import patches
from torchrun_hpc.agent.patches import agent
from torchrun_hpc.agent.patches.agent import ParentDeathSignal
from torchrun_hpc.preload.worker import end_with_parent

HOMES = {
    "by name": {"Popen": subprocess.Popen},
    "by module": {"subprocess": subprocess},
}


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize("home", HOMES)
def test_workers_are_tied_wherever_torch_starts_them(home, monkeypatch):
    """Older ones ask the module, which all others keep as it is."""
    module: Any = types.ModuleType("home")
    vars(module).update(HOMES[home])

    class Handler:
        def _popen(self, args: Any, env: Any) -> Any:
            if home == "by name":
                return module.Popen(args, env=env)
            return module.subprocess.Popen(args, env=env)

    Handler.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(multiprocessing_api, "SubprocessHandler", Handler)
    before, real = dict(vars(module)), subprocess.Popen
    assert ParentDeathSignal.fits()
    ParentDeathSignal.apply(make_plan(), None)
    options: list[Any] = []

    def noted(pid: int) -> Any:
        options.append(pid)
        return end_with_parent(pid)

    monkeypatch.setattr(agent, "end_with_parent", noted)
    child = Handler()._popen([sys.executable, "-S", "-c", ""], dict(os.environ))
    assert child.wait() == 0
    assert options == [os.getpid()]
    assert subprocess.Popen is real
    if home == "by module":
        assert module.subprocess.TimeoutExpired is subprocess.TimeoutExpired
    patches.restore()
    assert vars(module) == before
