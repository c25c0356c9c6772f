"""The workers meet at the address that the first node has published."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stock.inside_torch import (
    Handler,
    Node,
    State,
    meet,
    needs,
    patch_all,
    two_agents,
)
from tests.support.stock.side_by_side import OURS, STOCK
from torchrun_hpc.agent.patches.c10d import LocalAddr
from torchrun_hpc.host import capabilities


@pytest.mark.usefixtures("torch_again")
@pytest.mark.parametrize(
    ("ranks", "address"),
    [
        ({"n9": 0, "n10": 1}, "n9"),
        ({"n9": 1, "n10": 0}, "n10"),
        # Torch's answer stays if the first node is not known, as while the next round
        # forms, in which all have rank 0 at first.
        ({"n9": 0, "n10": 0}, "n9.cl"),
        ({"n9": 1, "n10": 2}, "n9.cl"),
        ({}, "n9.cl"),
    ],
)
def test_the_workers_meet_where_the_first_node_is(ranks, address, monkeypatch):
    """Whichever node it is, and whatever torch answers."""
    state = State()
    state.participants = {Node(name, 1, 0): rank for name, rank in ranks.items()}
    where = SimpleNamespace(master_addr="n9.cl", master_port=1234)
    answer = SimpleNamespace(bootstrap_store_info=where)
    monkeypatch.setattr(Handler, "next_rendezvous", lambda _self: answer)
    LocalAddr.apply(None, None)
    handler: Any = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
    assert Handler.next_rendezvous(handler) is answer
    assert vars(where) == {"master_addr": address, "master_port": 1234}


@needs(capabilities.RENDEZVOUS_INFO, "answer with the place where the workers meet")
@pytest.mark.usefixtures("torch_again", "quick")
@pytest.mark.parametrize("which", [STOCK, OURS])
def test_workers_meet_at_the_address_of_the_first_node(which, monkeypatch):
    """The second agent to come is the first of the nodes."""
    if which == OURS:
        patch_all(local_address=None, hosts=())
        for name, value in capabilities.variables().items():
            monkeypatch.setenv(name, value.value)
    addresses = ("127.0.0.3", "127.0.0.2")
    handlers, port = two_agents(*addresses)
    found = meet(handlers)
    assert [answer.rank for answer in found] == [1, 0]
    met = {answer.bootstrap_store_info.master_addr for answer in found}
    if which == OURS:
        assert met == {"127.0.0.2"}
    elif capabilities.ADDRESS_IS_LOST.present:
        assert met == {socket.getfqdn()}
    elif capabilities.SHARED_RENDEZVOUS_STORE.present:
        assert met == {"127.0.0.1"}  # where the rendezvous is
        assert found[0].bootstrap_store_info.master_port == port
    else:
        assert met == {"127.0.0.2"}
    for handler in handlers:
        handler.shutdown()
