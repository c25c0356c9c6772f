"""How many open files a launch needs, and what it does with too few."""

from __future__ import annotations

import resource

import psutil
import pytest
from plans import make_launch_plan

from torchrun_hpc.rendezvous import open_files


def plan(**changes):
    values = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": 0,
        "workers": 4,
        "endpoint": "jwb0001i:25592",
        "coordinator": 0,
        "is_coordinator": True,
    }
    return make_launch_plan(**values | changes)


# What is otherwise, whether node 0 has the store, and what is needed beside 10.
NEEDS = {
    "all on node 0": ({}, True, (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 12)),
    "the store is worker 0's": ({}, False, (8 + 8 + 4 + 3,) * 2),
    "the coordinator is node 1": (
        {"is_coordinator": False},
        True,
        (8 + 8 + 16, 8 + 8 + 12 + 12),
    ),
    "node 1, the coordinator": ({"node_rank": 1}, True, (8 + 8 + 4 + 3,) * 2),
    "any other node": ({"node_rank": 1, "is_coordinator": False}, True, (8 + 8,) * 2),
    # Any node may become the coordinator, and have the store.
    "with a spare, node 0": (
        {"spares": 1},
        True,
        (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 8),
    ),
    "with a spare, any other node": (
        {"spares": 1, "node_rank": 2, "is_coordinator": False},
        True,
        (8 + 8 + 4 + 3 + 12 + 4, 8 + 8 + 4 + 3 + 12 + 8),
    ),
    "with a spare, and the store is worker 0's": (
        {"spares": 1, "node_rank": 2, "is_coordinator": False},
        False,
        (8 + 8 + 4 + 3,) * 2,
    ),
    "many nodes": ({"nodes": 400}, True, (436, 436 - 4 + 1600)),
    "many nodes, and many spares": (
        {"nodes": 400, "spares": 100, "node_rank": 9, "is_coordinator": False},
        True,
        (436, 436 - 4 + 1200),
    ),
}


@pytest.mark.parametrize("case", NEEDS)
def test_what_a_node_needs(case, monkeypatch):
    monkeypatch.setattr(psutil.Process, "num_fds", lambda _: 10)
    changes, has_store, expected = NEEDS[case]
    found = open_files.need(plan(**changes), has_store=has_store)
    assert found == tuple(10 + number for number in expected)


@pytest.mark.parametrize(
    ("limits", "raised", "allowed"),
    [
        ((1024, 4096), 3256, 3256),
        ((4096, 4096), None, 4096),
        ((1024, resource.RLIM_INFINITY), 3256, 3256),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 3256),
        ((1024, 2000), 2000, 2000),
        ((2000, 2000), 2000, 2000),
    ],
)
def test_the_limit_is_raised_as_far_as_needed(limits, raised, allowed, monkeypatch):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: made.append(new))
    assert open_files.raise_limit(3256) == allowed
    assert made == ([] if raised is None else [(raised, limits[1])])
