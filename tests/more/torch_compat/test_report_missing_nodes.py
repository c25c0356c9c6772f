"""Node 0 reports that it waits for others."""

from __future__ import annotations

import time
from typing import Any

import pytest
from inside_torch import free_port, parameters_at, patch_all
from torch.distributed.elastic.rendezvous import (
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
)

from torchrun_hpc.reporting import intervals

SOON = 0.3
ENDED = 3.0  # the report_missing_nodes, which is to last for one second
SUSPICION = "is it --node_rank=0 on every node?"
REPORT = "torchrun_hpc: HPC084 waiting at head:1 for other nodes of 3, for 0 s"


@pytest.mark.usefixtures("torch_again", "soon", "quick")
@pytest.mark.parametrize(
    ("values", "first_report", "lines"),
    [
        ({}, SOON, [REPORT]),
        ({"hint": SUSPICION}, SOON, [f"{REPORT}; {SUSPICION}"]),
        ({"report_rank": 1, "node_rank": 1}, SOON, []),
        ({}, ENDED, []),
    ],
)
def test_node_0_says_that_it_waits_for_others(
    values: dict[str, Any],
    first_report: float,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "FIRST_REPORT", first_report)
    patch_all(**values)
    parameters = parameters_at(
        f"127.0.0.2:{free_port('127.0.0.2')}", is_host=1, nodes=2, join_timeout=1
    )
    parameters.local_addr = "127.0.0.2"
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    start = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        handler.next_rendezvous()
    if first_report == ENDED:
        assert time.monotonic() - start < ENDED
        time.sleep(start + ENDED + SOON - time.monotonic())
    assert capsys.readouterr().err.splitlines() == lines
