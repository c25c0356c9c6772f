"""What the tasks tell each other goes before what their launcher says."""

from __future__ import annotations

import pytest
from nodes import tasks_at

from torchrun_hpc.schedulers.job import Task
from torchrun_hpc.schedulers.pmi import Exchanged
from torchrun_hpc.schedulers.process import Process
from torchrun_hpc.schedulers.task_layout import TaskLayout, with_exchanged

# -hosts a,b,a: MPICH takes it for three nodes.
HOSTS = ("a", "b")
PLACES = (0, 1, 0)


def told(task, exchanged):
    layout = TaskLayout(task=task, provenance={"task": "RANK", "tasks": "SIZE"})
    return layout, with_exchanged(
        layout, Process({}, "a", exchange=lambda _environ: exchanged)
    )


def test_without_a_process_manager():
    layout, found = told(Task(1, 3), None)
    assert found is layout


@pytest.mark.parametrize("rank", range(3))
def test_a_host_that_is_there_twice_is_one_node(rank):
    _, found = told(Task(rank, 3), Exchanged("a", "0badcafe", PLACES, HOSTS))
    assert found.task == tasks_at(PLACES)[rank]
    assert (found.nodes, found.node_rank, found.hosts) == (2, PLACES[rank], HOSTS)
    assert (found.head_candidates, found.instance) == (("a",), "0badcafe")
    assert found.pmi_is_open
    assert found.provenance == {
        "task": "RANK",
        "tasks": "SIZE",
        "head": "PMI",
        "launch_id": "PMI",
        "node_rank": "PMI",
        "local_rank": "PMI",
        "local_size": "PMI",
    }


def test_a_process_manager_that_does_not_know_the_nodes():
    layout, found = told(Task(1, 3), Exchanged("a", "0badcafe"))
    assert (found.task, found.nodes, found.node_rank) == (layout.task, None, None)
    assert (found.head_candidates, found.pmi_is_open) == (("a",), True)
    assert "node_rank" not in found.provenance
