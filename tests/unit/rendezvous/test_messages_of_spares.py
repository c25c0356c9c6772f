"""What the user reads about spares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loopback import worker_failure
from plans import make_launch_plan

from torchrun_hpc import wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.planning.meeting import Spares
from torchrun_hpc.rendezvous import messages

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")
NEXT = "Exclude them from the next job:"
N0, N1, N2, N3 = (f"{host} (node {node})" for node, host in enumerate(HOSTS))
LOST = wire.encode(Failure(Kind.LOST, (1,)))
WORKER = wire.encode(worker_failure(5, text="ValueError: bad"))


def meeting(node_rank=1, **changes):
    values = {
        "nodes": 4,
        "spares": 1,
        "node_rank": node_rank,
        "workers": 4,
        "report_rank": node_rank,
        "endpoint": "jwb0001i:25592",
        "connect_host": "10.20.0.1",
        "hosts": HOSTS,
        "coordinator": 0,
    }
    return make_launch_plan(**values | changes).meeting


def replaced(*who, number=1, because=None):
    return {"replaced": [[*each] for each in who], "round": number, "because": because}


EVENTS = {
    "a spare at the start": (
        replaced((1, 1, 3), number=0),
        f"HPC207 {N3} replaces {N1} as node rank 1",
    ),
    "a spare for a node that is lost": (
        replaced((1, 1, 3), because=LOST),
        (
            f"HPC207 restart 1 of all workers: the agent on {N1} is gone without a "
            "message: it was killed, or the node is lost. "
            f"{N3} replaces {N1} as node rank 1"
        ),
    ),
    "two spares": (
        replaced((0, 0, 3), (2, 1, 2), number=2, because=WORKER),
        (
            f"HPC207 restart 2 of all workers: worker 5 on {N1} ended with exit code "
            f"1: ValueError: bad. {N3} replaces {N0} as node rank 0; "
            f"{N2} replaces {N1} as node rank 2"
        ),
    ),
    "a spare for a cause that was reported before": (
        replaced((1, 1, 3), number=3),
        (f"HPC207 restart 3 of all workers: {N3} replaces {N1} as node rank 1"),
    ),
    "a node that looks for the others": (
        {"seeks": 40, "left": 860},
        (
            "HPC218 jwb0002 has looked for the coordinator for 40 s. It gives up in "
            "860 s"
        ),
    ),
    "it looks for them, between two reports": ({"seeks": 41, "left": 859}, None),
    "an excluded node": (
        {"excluded": 2, "because": "its disk is full"},
        f"HPC208 {N2} is excluded from this job: its disk is full",
    ),
    "a node that is no longer excluded": (
        {"excluded": 2, "because": ""},
        (
            f"HPC208 {N2} is a spare again, because the script also failed on another "
            "node"
        ),
    ),
    "this node is excluded": (
        {"out": "its disk is full"},
        "HPC208 jwb0002 is excluded from this job: its disk is full",
    ),
    "this node is no longer excluded": ({"out": ""}, "HPC208 jwb0002 is a spare again"),
    "this node was suspended": (
        {"suspended": 61},
        (
            "HPC210 jwb0002 was suspended for up to 61 s. Its workers are killed, "
            "because another node may have replaced it"
        ),
    ),
    "a node is silent": (
        {"silent": [2], "left": 90},
        (
            f"HPC121 no answer from {N2} for 30 s. It counts as lost in 90 s if this "
            "continues"
        ),
    ),
    "this node takes over": (
        {"takes_over": 0},
        (
            f"HPC212 jwb0002 cannot reach the coordinator on {N0}, and takes over "
            "if enough nodes follow"
        ),
    ),
    "workers may still run": (
        {"leased": [0, 2], "left": 120},
        (
            f"HPC214 workers of an earlier round may still run on {N0}, {N2}. The "
            "next round waits for them, for up to 120 s"
        ),
    ),
    "the coordinator is silent": (
        {"coordinator_silent": 30, "left": 90, "of": 0},
        (
            "HPC121 no answer from the coordinator on jwb0001 (node 0) for 30 s. "
            "Another node takes over in 90 s if this continues"
        ),
    ),
    "it is silent, which another node reports": (
        {"coordinator_silent": 30, "left": 90, "of": 2},
        None,
    ),
    "nothing": ({}, None),
    "what another version may say": ({"weather": "fine"}, None),
}


@pytest.mark.parametrize("case", EVENTS)
def test_an_event(case):
    event, expected = EVENTS[case]
    message = messages.render(event, meeting())
    assert (message and str(message)) == expected
    assert message is None or messages.is_warning(event, meeting())


@pytest.mark.parametrize(
    ("ranks", "exclude", "expected"),
    [
        ((1,), "--exclude=", f"{N1}. {NEXT} --exclude=jwb0002"),
        ((0, 3), "-x ", f"{N0}, {N3}. {NEXT} -x jwb0001,jwb0004"),
        ((1,), "", N1),
    ],
)
def test_nodes_that_the_next_job_had_better_do_without(ranks, exclude, expected):
    known = replace(meeting(), spares=Spares(1, 60, exclude=exclude))
    message = messages.bad_nodes(ranks, known)
    assert str(message) == f"HPC213 lost or excluded nodes: {expected}"


def test_nodes_where_the_scheduler_cannot_exclude_them():
    message = messages.bad_nodes((1,), meeting())
    assert str(message) == f"HPC213 lost or excluded nodes: {N1}"


@pytest.mark.parametrize("key", ["silent", "coordinator_silent", "waiting", "lost"])
def test_what_is_no_warning_without_spares(key):
    assert not messages.is_warning({key: [2]}, meeting(spares=0))
    assert messages.is_warning({key: [2]}, meeting()) is key.endswith("silent")
