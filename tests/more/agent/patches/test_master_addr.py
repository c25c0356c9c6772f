"""Torch does not warn of an option that the user has not set."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import run as torch_run

from tests.support.stock.inside_torch import needs
from torchrun_hpc.agent import patches
from torchrun_hpc.agent.patches.torchrun import MasterAddr
from torchrun_hpc.host import capabilities


def _warns(args: Any) -> Any:
    return getattr(args, "master_addr", None)


def _warned(args: Any, caplog: pytest.LogCaptureFixture) -> tuple[Any, int]:
    caplog.clear()
    config, *_ = torch_run.config_from_args(args)
    texts = [record.getMessage() for record in caplog.records]
    return config, len([text for text in texts if "master_addr is only" in text])


@needs(capabilities.WARNS_OF_DEFAULT, "warning of an option that is its default")
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_torch_warns_of_nothing_that_was_not_set(backend, tmp_path, caplog):
    line = [f"--rdzv-backend={backend}", f"--log-dir={tmp_path}", "train.py"]
    args = torch_run.parse_args(line)
    before = dict(vars(args))
    stock = _warned(args, caplog)
    MasterAddr.apply(None, None)
    try:
        ours = _warned(args, caplog)
    finally:
        patches.restore()
    assert (stock[1], ours[1]) == (int(backend == "c10d"), 0)
    assert ours[0].rdzv_endpoint == stock[0].rdzv_endpoint
    assert vars(args) == before


def test_what_is_patched_already_is_patched_again(monkeypatch):
    """In a second launch of one process."""
    monkeypatch.setattr(torch_run, "config_from_args", _warns)
    there = replace(capabilities.WARNS_OF_DEFAULT, present=True)
    monkeypatch.setattr(capabilities, "WARNS_OF_DEFAULT", there)
    args: Any = types.SimpleNamespace(rdzv_backend="c10d", master_addr="127.0.0.1")
    config: Any = torch_run.config_from_args
    assert config(args) == "127.0.0.1"
    MasterAddr.apply(None, None)
    try:
        assert torch_run.config_from_args(args) is None
        assert not hasattr(capabilities.without_default(args), "master_addr")
    finally:
        patches.restore()
