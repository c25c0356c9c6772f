"""Node 0 reports that it waits for others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from tests.support.patience import NEVER_S, until
from tests.support.stock.inside_torch import Handler, make_plan
from torchrun_hpc import limits
from torchrun_hpc.agent.patches.c10d import ReportMissingNodes

SUSPICION = "is --node_rank=0 set on every node?"
REPORT = "torchrun_hpc: note[HPC084]: waiting at head:1 for all 3 nodes, 0 s so far"


@pytest.mark.usefixtures("torch_again", "soon")
@pytest.mark.parametrize(
    ("values", "waits", "lines"),
    [
        ({}, True, [REPORT]),
        ({"hint": SUSPICION}, True, [f"{REPORT}; {SUSPICION}"]),
        ({"report_rank": 1, "node_rank": 1}, True, []),
        ({}, False, []),
    ],
)
def test_node_0_says_that_it_waits_for_others(
    values, waits, lines, capsys, monkeypatch
):
    """As long as they have not met, and not later."""
    found: list[str] = []

    def meet(_handler: Any) -> None:
        if waits and not lines:  # nobody is there who would say it
            assert threading.enumerate() == before

        def is_reported() -> bool:
            found.append(capsys.readouterr().err)
            return bool("".join(found)) or not lines

        until(is_reported)
        raise RendezvousTimeoutError

    if not waits:
        monkeypatch.setattr(limits, "FIRST_REPORT", NEVER_S)
    monkeypatch.setattr(Handler, "next_rendezvous", meet)
    ReportMissingNodes.apply(make_plan(**values), None)
    before = threading.enumerate()
    with pytest.raises(RendezvousTimeoutError):
        Handler.next_rendezvous(None)
    until(lambda: threading.enumerate() == before)
    found.append(capsys.readouterr().err)
    assert "".join(found).splitlines() == lines
