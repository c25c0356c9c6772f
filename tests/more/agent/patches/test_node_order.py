"""Nodes are ranked as the scheduler numbers them."""

from __future__ import annotations

import os
import socket
from itertools import permutations
from typing import Any

import pytest

from tests.support.stock.inside_torch import (
    Handler,
    Node,
    State,
    make_executor,
    make_plan,
)
from torchrun_hpc.agent.patches import registry
from torchrun_hpc.agent.patches.c10d import RankedNode
from torchrun_hpc.agent.patches.state_as_json import JsonPickle
from torchrun_hpc.planning.mode import Mode

pytestmark = pytest.mark.usefixtures("torch_again")


def _ranks(nodes: list[Any]) -> dict[str, int]:
    """Let torch rank participants."""
    state = State()
    state.participants = dict.fromkeys(nodes, 0)
    executor = make_executor(nodes[0], state)
    executor._mark_rendezvous_complete()
    return {node.addr: rank for node, rank in state.participants.items()}


NAMES = ("n9", "n10", "n11")


def test_stock_ranks_by_text():
    found = _ranks([Node(name, 1, 0) for name in NAMES])
    assert found == {"n10": 0, "n11": 1, "n9": 2}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_are_ranked_as_the_scheduler_numbers_them(order):
    nodes = []
    for rank in order:
        registry.apply_patches(make_plan(node_rank=rank))
        nodes.append(Handler._node_desc_generator.generate(NAMES[rank]))
    assert _ranks(nodes) == {"n9": 0, "n10": 1, "n11": 2}
    # As every node sees it: through the store.
    state = State()
    state.participants = dict.fromkeys(nodes, 0)
    copied = JsonPickle.loads(JsonPickle.dumps(state))
    assert _ranks(list(copied.participants)) == {"n9": 0, "n10": 1, "n11": 2}


def test_the_original_is_asked_for_the_rest():
    registry.apply_patches(make_plan(node_rank=5))
    first = Handler._node_desc_generator.generate()
    second = Handler._node_desc_generator.generate("name")
    assert (first.addr, first.pid) == (socket.getfqdn(), os.getpid())
    assert second.addr == "name"
    assert second.local_id == first.local_id + 1


@pytest.mark.parametrize(
    "values",
    [{"backend": "static"}, {"mode": Mode.MANUAL}, {"mode": Mode.ONE_NODE}],
)
def test_nodes_that_are_not_to_be_ranked_are_left_alone(values):
    before = Handler._node_desc_generator
    registry.apply_patches(make_plan(**values))
    assert Handler._node_desc_generator is before


def test_two_agents_on_a_node_keep_apart():
    nodes = [RankedNode("n", 2, 0, 1), RankedNode("n", 1, 1, 1), RankedNode("n", 1, 0)]
    assert sorted(nodes) == [nodes[2], nodes[1], nodes[0]]
    assert len({*nodes, RankedNode("n", 1, 0, 0)}) == 3


def test_comparisons_agree_with_each_other():
    first, second = RankedNode("n9", 1, 0, 0), RankedNode("n10", 1, 0, 1)
    assert (first < second, second > first) == (True, True)
    assert (first <= second, second >= first) == (True, True)
    assert (first > second, second < first) == (False, False)
    assert (first >= second, second <= first) == (False, False)
    assert (min(second, first), max(first, second)) == (first, second)


def test_who_joined_from_outside_of_the_job_comes_last():
    """And agents that have no scheduler are ranked as torch does it."""
    nodes = [Node("n1", 1, 0), RankedNode("n9", 1, 0, 1), RankedNode("n10", 1, 0, 0)]
    for order in permutations([*nodes, Node("n11", 1, 0)]):
        assert [node.addr for node in sorted(order)] == ["n10", "n9", "n1", "n11"]


@pytest.mark.parametrize("other", ["n9", 0, None], ids=repr)
def test_another_type_is_not_a_ranked_node(other):
    node = RankedNode("n9", 1, 0, 0)
    assert node != other
    with pytest.raises(TypeError):
        sorted([node, other])
    with pytest.raises(TypeError):
        sorted([other, node])


def test_text_of_a_node_is_as_in_torch():
    """It is part of torch's own messages."""
    assert repr(RankedNode("n9", 12, 3, 0)) == repr(Node("n9", 12, 3))
