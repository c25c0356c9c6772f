"""How many open files a launch needs, and what it does with too few."""

from __future__ import annotations

import resource

import pytest
from plans import make_launch_plan

from torchrun_hpc.host import procfs
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


# What an agent opens itself, and two logs of each of its 4 workers.
AGENT = 8 + 8
# What the store opens itself; each worker has a connection to it, too.
STORE = 12
# What the coordinator opens itself, and a connection from each of 3 nodes.
COORDINATOR = AGENT + 4 + 3
ELSEWHERE = {"is_coordinator": False}
SPARE = ELSEWHERE | {"spares": 1, "node_rank": 2}
MANY = {"nodes": 400, "spares": 100}
WITH_SPARE = (COORDINATOR + STORE + 4, COORDINATOR + STORE + 8)
# What is otherwise, whether node 0 has the store, and what is needed beside 10: at
# least, and with a connection from each worker of the job to the store.
NEEDS = {
    "all on node 0": ({}, True, (COORDINATOR + STORE + 4, COORDINATOR + STORE + 12)),
    "the store is worker 0's": ({}, False, (COORDINATOR,) * 2),
    "another coordinates": (ELSEWHERE, True, (AGENT + STORE + 4, AGENT + STORE + 12)),
    "node 1, the coordinator": ({"node_rank": 1}, True, (COORDINATOR,) * 2),
    "any other node": (ELSEWHERE | {"node_rank": 1}, True, (AGENT,) * 2),
    # Any node may become the coordinator, and have the store.
    "with a spare, node 0": ({"spares": 1}, True, WITH_SPARE),
    "with a spare, any other node": (SPARE, True, WITH_SPARE),
    "with a spare, and the store is worker 0's": (SPARE, False, (COORDINATOR,) * 2),
    "many nodes": ({"nodes": 400}, True, (436, 436 - 4 + 1600)),
    "many nodes and spares": (SPARE | MANY, True, (436, 436 - 4 + 1200)),
}


@pytest.mark.parametrize("case", NEEDS)
def test_what_a_node_needs(case, monkeypatch):
    monkeypatch.setattr(procfs, "open_files", lambda: set(range(10)))
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
