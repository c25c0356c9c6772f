from __future__ import annotations

import pytest
from loopback import worker_failure
from plans import make_launch_plan

from torchrun_hpc import __version__, wire
from torchrun_hpc.rendezvous import messages
from torchrun_hpc.rendezvous.errors import RefusedError
from torchrun_hpc.rendezvous.protocol import JoinRequest, Refusal


def meeting(node_rank=0, **changes):
    values = {
        "title": "Slurm 19.0",
        "nodes": 3,
        "node_rank": node_rank,
        "workers": 4,
        "report_rank": node_rank,
        "endpoint": "jwb0001i:25592",
        "connect_host": "10.20.0.1",
        "hosts": ("jwb0001", "jwb0002", "jwb0003"),
        "coordinator": 0,
        "launch_id": "19.0",
    }
    return make_launch_plan(**values | changes).meeting


def many(number=1500, **changes):
    return meeting(nodes=number, hosts=tuple(f"n{i}" for i in range(number)), **changes)


N0, N1, N2 = (f"jwb000{n + 1} (node {n})" for n in range(3))

# --- what happens meanwhile ---------------------------------------------------------

FOUND = "port 25592: nobody listens"
STARTED = f"{FOUND}. Check that the job has started there"
REMEDY = (
    "Pass --hpc-site=NAME, or set each variable on all nodes or on none (mpirun: with "
    "or without -x NAME)"
)
EVENTS = {
    "an agent that is refused": (
        {"stranger": [1], "because": "process 7 on n10 instead of process 5 on n10"},
        (
            f"HPC229 refused an agent that claims to be {N1}: process 7 on "
            "n10 instead of process 5 on n10. This job continues"
        ),
    ),
    "an agent of no node that is refused": (
        {"stranger": [], "because": "--hpc-spares=1 instead of 0"},
        (
            "HPC229 refused an unknown agent: --hpc-spares=1 "
            "instead of 0. This job continues"
        ),
    ),
    "waiting for nodes": (
        {"waiting": [1, 2], "seconds": 10},
        f"HPC114 1 of 3 nodes have joined after 10 s. Waiting for {N1}, {N2}",
    ),
    "waiting for nodes, of a job with spares": (
        {"waiting": [1], "seconds": 10},
        f"HPC114 1 of 2 nodes have joined after 10 s. Waiting for {N1}",
    ),
    "waiting for nodes, while others have tried": (
        {"waiting": [1], "seconds": 10, "beside": ["10.0.0.7", "10.0.0.8"]},
        (
            f"HPC114 2 of 3 nodes have joined after 10 s. Waiting for {N1}. Ignored "
            "callers without a proof: 10.0.0.7, 10.0.0.8"
        ),
    ),
    "somebody without a proof": (
        {"unproved": "10.0.0.7", "key": "/home/me/key (0badcafe)"},
        (
            "HPC237 ignored 10.0.0.7, which does not prove that it belongs to this "
            "job. It belongs to another user or job, has another key, or runs an older "
            "torchrun_hpc. Key here: /home/me/key (0badcafe)"
        ),
    ),
    "nodes at work": (
        {"finishing": [1], "seconds": 40},
        (
            "HPC120 2 of 3 nodes have finished, the last one 40 s ago. "
            f"Still running: {N1}"
        ),
    ),
    "silence": (
        {"silent": [1, 2], "left": 90},
        (
            f"HPC121 no answer from {N1}, {N2} for 30 s. The job ends in 90 s if this "
            "continues"
        ),
    ),
    "one that answers again": ({"answering": [1]}, f"HPC160 {N1} answers again"),
    "two that answer": ({"answering": [1, 2]}, f"HPC160 {N1}, {N2} answer again"),
    "an agent that is gone": (
        {"lost": 2},
        f"HPC123 the agent on {N2} is gone. Waiting until it is started again",
    ),
    "a restart": (
        {
            "restart": 1,
            "because": wire.encode(worker_failure(5, code=3)),
        },
        f"HPC128 restart 1 of all workers: worker 5 on {N1} ended with exit code 3",
    ),
    "sites that differ": (
        {"differ": {"derecho": [0], "": [1, 2]}},
        (
            f"HPC163 the nodes have different values: derecho on {N0}; none on {N1}, "
            f"{N2}. {REMEDY}"
        ),
    ),
    "sites that differ, and none on the first node": (
        {"differ": {"": [0], "jsc": [1], "x" * 99 + "\x1b[2J": [2]}},
        (
            f"HPC163 the nodes have different values: none on {N0}; jsc on {N1}; "
            f"{'x' * 50} on {N2}. {REMEDY}"
        ),
    ),
    "threads that differ": (
        {"differ": {"jsc": [0], "jsc, OMP_NUM_THREADS=8": [1, 2]}},
        (
            f"HPC163 the nodes have different values: jsc on {N0}; jsc, "
            f"OMP_NUM_THREADS=8 on {N1}, {N2}. {REMEDY}"
        ),
    ),
    "nothing": ({}, None),
    "what another version may say": ({"weather": "fine", "seconds": 10}, None),
}


@pytest.mark.parametrize("case", EVENTS)
@pytest.mark.parametrize("node_rank", [0, 1])
def test_an_event_is_written_where_it_arrives(case, node_rank):
    message, expected = EVENTS[case]
    spares = int(case.endswith("of a job with spares"))
    written = messages.render(message, meeting(node_rank, spares=spares))
    assert (written and str(written)) == expected


@pytest.mark.parametrize(
    ("node_rank", "seconds"),
    [(1, [10, 40, 70, 100]), (2, [60, 90]), (0, [60, 90])],
)
def test_looking_for_the_head_node_is_reported_soon_by_one_node(node_rank, seconds):
    written = {
        second: messages.render({"looking": second, "found": FOUND}, meeting(node_rank))
        for second in range(1, 101)
    }
    assert [second for second, message in written.items() if message] == seconds
    assert str(written[90 if node_rank != 1 else 100]) == (
        "HPC113 still waiting for the head node at jwb0001i:25592 (10.20.0.1) after "
        f"{90 if node_rank != 1 else 100} s: {STARTED}"
    )


KILL = "srun --kill-on-bad-exit=1"
SILENT = "port 25592: no answer to the connection"
DOWN = "interface ib0, which has 10.20.0.2, is down"
CLOSED = "tried from eth0 (10.10.0.2); up here, too: ib0"


@pytest.mark.parametrize(
    ("found", "problem", "expected"),
    [
        ("", "", "no answer yet. Name the network"),
        (
            FOUND,
            CLOSED,
            f"{STARTED}. {KILL} ends all tasks when one fails",
        ),
        (SILENT, "", f"{SILENT}. Name the network"),
        (SILENT, CLOSED, f"{SILENT}; {CLOSED}. Name the network"),
        (SILENT, DOWN, DOWN),
        ("", DOWN, DOWN),
    ],
)
def test_the_cause_is_named(monkeypatch, found, problem, expected):
    monkeypatch.setattr(
        messages, "path_problem", lambda *_where: (problem, problem == DOWN)
    )
    hint = f"{KILL} ends all tasks when one fails"
    hints = meeting(1, hint=hint, network_hint="Name the network")
    assert messages._search_problem(found, hints) == expected


@pytest.mark.parametrize(
    ("head", "reporters"), [(0, [1]), (1, [0]), (2, [0]), (None, [0, 1])]
)
@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"coordinator_silent": 30, "left": 90},
            (
                "HPC121 no answer from the head node at jwb0001i:25592 for 30 s. The "
                "job ends in 90 s if this continues"
            ),
        ),
        (
            {"coordinator_answers": 42},
            "HPC160 the head node at jwb0001i:25592 answers again after 42 s",
        ),
        (
            {"looking": 10, "found": FOUND},
            (
                "HPC113 still waiting for the head node at jwb0001i:25592 (10.20.0.1) "
                f"after 10 s: {STARTED}"
            ),
        ),
    ],
)
def test_one_node_reports_what_the_coordinator_cannot(head, reporters, message, text):
    written = [
        messages.render(message, meeting(rank, coordinator=head)) for rank in range(3)
    ]
    expected = [text if rank in reporters else None for rank in range(3)]
    assert [message and str(message) for message in written] == expected


# --- which agents are refused -------------------------------------------------------

HEAD_NODE = "the head node at 10.20.0.1:25593"

# Code, own value, and remedy.
REFUSED = {
    Refusal.VERSION: ("HPC116", f"torchrun_hpc {__version__}", "Load the same env"),
    Refusal.RUN_ID: ("HPC117", "--rdzv_id=mine", "Leave it out if each node"),
    Refusal.STARTED: ("HPC232", "b.py [0badcafe]", "Give each launch its own port"),
    Refusal.NODES: ("HPC118", "3 nodes", "Start one job step"),
    Refusal.TAKEN: ("HPC115", "node 1", "Start torchrun_hpc once on each node"),
    Refusal.UNPROVED: ("HPC119", "/home/me/key (0badcafe)", "Pass the same --hpc-key"),
    Refusal.SPARES: ("HPC206", "--hpc-spares=1", "Start one job step"),
}
THERE = JoinRequest(
    *("mine", 3, 1, "jwb0002", 102, __version__, "agent 1"),
    spares=1,
    started="b.py [0badcafe]",
)


def refused(reason, environ):
    """Return what an agent says that is refused."""
    known = RefusedError(reason, 25593), meeting(1, spares=1), THERE
    return messages.refusal(*known, environ, "/home/me/key (0badcafe)")


@pytest.mark.parametrize("reason", Refusal)
def test_why_an_agent_is_refused(reason):
    error = refused(reason, {})
    code, own, remedy = REFUSED[reason]
    assert error.code == code
    assert HEAD_NODE in str(error)
    assert own in str(error)
    assert f". {remedy}" in str(error)
    assert error.others_know


# Of which launch a worker's variables are, and for which reasons its agent is refused
# when it launches once more. A coordinator does not say its own id.
INSIDE = {
    "the same id": ({"TORCHELASTIC_RUN_ID": "mine", "RANK": "5"}, {Refusal.TAKEN}),
    "another id": ({"TORCHELASTIC_RUN_ID": "outer", "RANK": "5"}, {Refusal.RUN_ID}),
    "no worker": ({"TORCHELASTIC_RUN_ID": "outer"}, set()),
    "no worker of an agent": ({"RANK": "5"}, set()),
    "neither": ({}, set()),
}


@pytest.mark.parametrize("case", INSIDE)
def test_an_agent_that_was_started_inside_a_worker(case):
    environ, expected = INSIDE[case]
    inside = {each for each in Refusal if refused(each, environ).code == "HPC164"}
    assert inside == expected


def test_the_cause_of_a_restart():
    cause = worker_failure(5, text="Connection closed by peer [::1]:7")
    for event in {"restart": 1}, {"replaced": [], "round": 1}:
        because = {**event, "because": wire.encode(cause)}
        assert messages.cause_of(because) == cause
        assert messages.cause_of({**event, "because": None}) is None
    assert messages.cause_of({"excluded": 1, "because": "bad"}) is None
    assert messages.cause_of({"looking": 1}) is None
