"""Every attempt of the workers gets a store of its own."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.patience import PATIENCE
from tests.support.stock.inside_torch import (
    dist,
    listening_at,
    meet,
    needs_shared_store,
    patch_all,
    two_agents,
)
from torchrun_hpc.host import capabilities


def _two_rounds() -> tuple[int, list[Any]]:
    """Let two agents meet twice, as after a failure of their workers.

    Returns the port of their own store; and for each round that of the workers' store,
    and whether it has their keys before they have started.
    """
    seen: list[Any] = []
    handlers, port = two_agents("127.0.0.1", "127.0.0.1")
    for _ in range(2):
        found = meet(handlers)
        infos = [answer.bootstrap_store_info for answer in found]
        assert infos[0] == infos[1]
        assert sorted(answer.rank for answer in found) == [0, 1]
        workers = dist.TCPStore(
            infos[0].master_addr,
            infos[0].master_port,
            is_master=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        seen.append((infos[0].master_port, workers.check(["worker/0"])))
        workers.set("worker/0", "an address")
        time.sleep(0.05)
    for handler in handlers:
        handler.shutdown()
    return port, seen


@needs_shared_store
@pytest.mark.usefixtures("quick")
def test_stock_keeps_the_store_of_dead_workers():
    port, seen = _two_rounds()
    assert seen[0][0] == seen[1][0]
    assert (seen[0][0] == port) is capabilities.SHARED_RENDEZVOUS_STORE.present
    assert [old for _, old in seen] == [False, True]


@needs_shared_store
@pytest.mark.skipif(
    bool(capabilities.variables()), reason="here the store of workers is worker 0's own"
)
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_every_round_has_a_store_of_its_own(address):
    """With the stores opened by torch, and with those opened on one address."""
    patch_all(local_address=address)
    port, seen = _two_rounds()
    assert len({port, seen[0][0], seen[1][0]}) == 3
    assert [old for _, old in seen] == [False, False]
    assert listening_at(seen[0][0]) == set()  # nobody is led to the old one
