"""The meeting of the doctor's tasks, and the rank of a machine without a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.juelich import THREE, step
from tests.support.plans import explicit, planned, planned_at, refused
from torchrun_hpc.doctor import place
from torchrun_hpc.options.options import read
from torchrun_hpc.options.values import SCHEDULER
from torchrun_hpc.planning.head_node import ports_of
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import Task

DIRECT = next(mode for mode in Mode if mode.is_direct)


def tasks_meeting(mode, meeting, task):
    """Return where the tasks meet; what is the same everywhere is checked."""
    found = place._tasks_meeting(mode, meeting, task, "here")
    assert found.backend == SCHEDULER
    assert (found.nodes, found.node_rank) == (task.size, task.rank)
    assert found.report_rank == task.rank
    assert len(found.hosts) == task.size
    assert found.launch_id != meeting.launch_id
    assert not {*found.ports, *found.notice_ports} & {*meeting.ports}
    return found


@pytest.mark.parametrize("rank", range(3))
def test_agents(rank):
    """They meet where those of the job do, on other ports: its own are the launch's."""
    meeting = planned(step(rank)).meeting
    found = tasks_meeting(Mode.SEVERAL_NODES, meeting, Task(rank, 3))
    assert (found.ports, found.notice_ports) == ports_of("19.0 doctor")
    assert (found.hosts, found.connect_host) == (THREE, meeting.connect_host)
    assert (found.is_coordinator, found.coordinator) == (rank == 0, 0)
    assert found.listen == (("10.20.0.1", 0) if rank == 0 else None)


def test_another_node_is_the_host():
    for rank in range(3):
        meeting = planned(
            step(rank), options={"rdzv_endpoint": "jwb0003:29400"}
        ).meeting
        found = tasks_meeting(Mode.SEVERAL_NODES, meeting, Task(rank, 3))
        assert (found.is_coordinator, found.coordinator) == (rank == 2, 2)


@pytest.mark.parametrize("rank", range(4))
def test_tasks_that_are_workers(rank):
    """The first one is the host, and each knows its own name only."""
    meeting = planned_at([0, 0, 1, 1], rank).meeting
    found = tasks_meeting(DIRECT, meeting, Task(rank, 4, rank % 2, 2))
    assert (found.is_coordinator, found.coordinator) == (rank == 0, 0)
    assert [name for name in found.hosts if name] == ["here"]
    assert found.hosts[rank] == "here"
    assert found.ports == ports_of("19.0 doctor")[0]


def test_one_node():
    """It needs no port."""
    found = tasks_meeting(Mode.ONE_NODE, Meeting("c10d", listen=("h", 1)), Task())
    assert found.in_process
    assert not found.notice_ports


@pytest.mark.parametrize("rank", [0, 1])
def test_machines(rank):
    """Which have no job: the endpoint names the launch."""
    where = replace(planned().meeting, backend="etcd", launch_id="", endpoint="h:1")
    found = tasks_meeting(Mode.MANUAL, replace(where, hosts=()), Task(rank, 2))
    assert found.launch_id == "h:1 doctor"
    assert found.is_coordinator is (rank == 0)


@pytest.mark.parametrize(
    ("nodes", "report_rank", "options", "rank"),
    [
        (3, 5, {"node_rank": 2}, 2),
        (3, 0, {"node_rank": 1}, 1),
        (3, 0, {}, 0),  # the host of the endpoint
        (2, 1, {}, 1),
        (2, 0, {}, 0),
    ],
)
def test_the_rank_of_a_machine(nodes, report_rank, options, rank):
    where = Meeting("c10d", nodes=nodes, report_rank=report_rank)
    assert place._explicit_rank(where, read(explicit(options))) == rank


@pytest.mark.parametrize(
    ("code", "backend", "options", "text"),
    [
        ("HPC180", "c10d", {}, "one of 3 machines"),
        ("HPC010", "c10d", {"node_rank": -1}, "--node_rank=-1 is not a node"),
        ("HPC010", "etcd-v2", {"node_rank": 1}, "meet without etcd"),
    ],
)
def test_a_machine_that_has_no_rank(code, backend, options, text):
    where, options = Meeting(backend, nodes=3, report_rank=1), read(explicit(options))
    refused(code, text, place._explicit_rank, where, options)
