"""What a person reads about failures."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import make_launch_plan, planned
from tests.support.raised import CAUSE
from tests.support.simulated_job import worker_failure
from torchrun_hpc import wire
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, Summary, WorkerPart

MEETING = planned().meeting
LINES = ("Traceback (most recent call last):", CAUSE)
FIRST = worker_failure(5, text=CAUSE, lines=LINES)
HEAD = (
    r"torchrun_hpc: error\[HPC125\]: the job has failed: worker 5 on jwb0002 "
    r"\(node 1\) ended with exit code 1 "
    r"\(local rank 1, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
)


N0, N1, N2 = (f"jwb000{n + 1} (node {n})" for n in range(3))


def job(**changes):
    """Return where three nodes meet."""
    values = {
        "nodes": 3,
        "workers": 4,
        "endpoint": "jwb0001i:25592",
        "hosts": ("jwb0001", "jwb0002", "jwb0003"),
        "coordinator": 0,
    }
    return make_launch_plan(**values | changes).meeting


def written(capsys, summary, meeting=MEETING):
    report.write(summary, meeting)
    return capsys.readouterr().err.splitlines()


def test_the_first_failure_alone(capsys):
    head, *rest = written(capsys, Summary(FIRST))
    assert re.fullmatch(HEAD + r"\)", head)
    assert rest == [f"    {line}" for line in LINES]


def test_where_the_rest_is(capsys):
    failure = worker_failure(5, text=CAUSE, log="/logs/3", unread="it is a terminal")
    head, line = written(capsys, Summary(failure))
    assert re.fullmatch(HEAD + r", log file /logs/3\)", head)
    text = "look for its stderr in the output: it is a terminal. Pass --tee=3 to show"
    assert line == f"torchrun_hpc:     {text} it here"


def test_others(capsys):
    summary = Summary(
        FIRST,
        same_as_first=(1,),
        others=(("KeyError: 1", (0, 2, 4)), ("OSError", (5,))),
        unlisted=1,
    )
    assert written(capsys, summary)[3:] == [
        "torchrun_hpc:     the same on 1 other rank: 1",
        "torchrun_hpc:     ranks 0,2,4 of 12: KeyError: 1",
        "torchrun_hpc:     rank 5 of 12: OSError",
        "torchrun_hpc:     and 1 other rank with other causes",
    ]


def test_in_one_line():
    where = "worker 5 on jwb0002 (node 1)"
    assert report.sentence(FIRST, MEETING) == f"{where} ended with exit code 1: {CAUSE}"
    alone = report.sentence(FIRST, planned(job=None).meeting)
    assert alone == f"worker 5 ended with exit code 1: {CAUSE}"


LOST = "RuntimeError: Connection closed by peer"
WHERE = "the first to end was worker 5 on jwb0002 (node 1), which"
DOUBT = "the cause may be another rank"
IN_DOUBT = {
    "only a consequence": (
        worker_failure(5, text=LOST),
        f"{WHERE} ended with exit code 1: {LOST} ({DOUBT})",
    ),
    "unread": (
        worker_failure(5, unread="it is a terminal"),
        f"{WHERE} ended with exit code 1 (its stderr was not read; {DOUBT})",
    ),
    "unread, and killed": (
        worker_failure(5, code=-11, unread="it is a terminal"),
        "worker 5 on jwb0002 (node 1) was killed by SIGSEGV (11)",
    ),
    "stopped": (
        worker_failure(5, code=-15),
        f"{WHERE} was killed by SIGTERM (15) ({DOUBT})",
    ),
    "alone": (
        worker_failure(5, text=LOST, size=1),
        f"worker 5 on jwb0002 (node 1) ended with exit code 1: {LOST}",
    ),
    "who did not come": (
        worker_failure(5, text=LOST, absent="rank 2 did not call all_reduce 3"),
        "rank 2 did not call all_reduce 3",
    ),
    "no restart": (
        worker_failure(5, text=LOST, finished=1),
        (
            f"{WHERE} ended with exit code 1: {LOST} ({DOUBT}); no restart, because 1 "
            "node had already finished"
        ),
    ),
}


@pytest.mark.parametrize("name", IN_DOUBT)
def test_whether_the_cause_is_known(name):
    failure, expected = IN_DOUBT[name]
    assert report.sentence(failure, MEETING) == expected


def test_a_report_without_the_cause(capsys):
    failure = worker_failure(5, unread="it is a terminal")
    others = (("ended with exit code 1", (0, 2)),)
    head, *rest = written(capsys, Summary(failure, same_as_first=(1,), others=others))
    assert head.startswith(f"torchrun_hpc: error[HPC125]: the job has failed: {WHERE}")
    assert head.endswith(f"(its stderr was not read; {DOUBT})")
    assert rest[1:] == [
        "torchrun_hpc:     the same on 1 other rank: 1",
        "torchrun_hpc:     ranks 0,2 of 12: ended with exit code 1",
    ]


# --- why a job failed ---------------------------------------------------------------

GONE = (
    f"the agent on {N1} is gone without a message: it was killed, or the node is lost"
)
FAILED = {
    "a worker that exits": (
        worker_failure(5, code=3),
        f"worker 5 on {N1} ended with exit code 3",
    ),
    "a worker that raises": (
        worker_failure(5, code=1, text="ValueError: bad batch 17"),
        f"worker 5 on {N1} ended with exit code 1: ValueError: bad batch 17",
    ),
    "a worker that is killed": (
        worker_failure(5, code=-9),
        f"worker 5 on {N1} was killed by SIGKILL (9): probably out of memory",
    ),
    "a worker that crashes": (
        worker_failure(5, code=-11),
        f"worker 5 on {N1} was killed by SIGSEGV (11)",
    ),
    "a worker and a signal without name": (
        worker_failure(5, code=-99),
        f"worker 5 on {N1} was killed by signal 99",
    ),
    "a signal": (
        Failure(Kind.SIGNAL, (1,), code=15),
        f"the agent on {N1} received SIGTERM (15)",
    ),
    "an agent that cannot go on": (
        Failure(Kind.AGENT, (1,), text="No space left on device: /tmp"),
        f"the agent on {N1} gave up: No space left on device: /tmp",
    ),
    "an agent that is gone": (Failure(Kind.LOST, (1,)), GONE),
    "two agents that are gone": (
        Failure(Kind.LOST, (1, 2)),
        (
            f"the agents on {N1}, {N2} are gone without a message: they "
            "were killed, or the nodes are lost"
        ),
    ),
    "two agents that are silent": (
        Failure(Kind.SILENT, (1, 2), code=120),
        f"the agents on {N1}, {N2} did not answer for 120 s",
    ),
    "a node that is out": (
        Failure(Kind.EXCLUDED, (1,), text="its health check ended with exit code 1"),
        f"{N1} is excluded: its health check ended with exit code 1",
    ),
    "two nodes that are out": (
        Failure(Kind.EXCLUDED, (1, 2), text="it was lost 2 times"),
        f"{N1}, {N2} are excluded: it was lost 2 times",
    ),
    "an agent that is silent": (
        Failure(Kind.SILENT, (1,), code=120),
        f"the agent on {N1} did not answer for 120 s",
    ),
    "a node that is missing": (
        Failure(Kind.MISSING, (1,), code=900),
        f"1 node did not join within 900 s (join_timeout): {N1}",
    ),
    "two nodes that are missing": (
        Failure(Kind.MISSING, (1, 2), code=900),
        f"2 nodes did not join within 900 s (join_timeout): {N1}, {N2}",
    ),
    "an agent that does not belong to this job": (
        Failure(Kind.REFUSED, (1,), text="it has 9 nodes"),
        f"the agent on {N1} does not belong to this job (it has 9 nodes)",
    ),
    "an agent of a node that there is not": (
        Failure(Kind.REFUSED, (7,), text="it has 9 nodes"),
        "the agent on node 7 does not belong to this job (it has 9 nodes)",
    ),
    "an agent of nobody knows where": (
        Failure(Kind.REFUSED, (), text="another release"),
        "the agent on another node does not belong to this job (another release)",
    ),
    "the head node is gone": (
        Failure(Kind.COORDINATOR),
        f"the agent on the head node, {N0}, is gone",
    ),
    "the head node is silent": (
        Failure(Kind.COORDINATOR, code=120),
        f"the agent on the head node, {N0}, did not answer for 120 s",
    ),
    "no restart any more": (
        Failure(Kind.LOST, (1,), finished=1),
        f"{GONE}; no restart, because 1 node had already finished",
    ),
    "no restart, of several": (
        Failure(Kind.LOST, (1,), finished=2),
        f"{GONE}; no restart, because 2 nodes had already finished",
    ),
}


@pytest.mark.parametrize("case", FAILED)
def test_why_a_job_failed(case):
    failure, expected = FAILED[case]
    message = report.failed(failure, job())
    assert str(message) == f"HPC125 the job has failed: {expected}"


def test_every_kind_of_failure_is_written():
    assert {failure.kind for failure, _ in FAILED.values()} == set(Kind)


def test_the_head_node_where_only_its_address_is_known():
    message = report.failed(
        Failure(Kind.COORDINATOR), job(node_rank=1, coordinator=None)
    )
    assert message.text.endswith("the agent on the head node, jwb0001i:25592, is gone")


@pytest.mark.parametrize("kind", Kind)
def test_a_failure_of_all_nodes_is_no_flood(kind):
    many = tuple(f"n{i}" for i in range(1500))
    failure = Failure(kind, tuple(range(1500)), code=1, text="x" * 500)
    assert len(str(report.failed(failure, job(nodes=1500, hosts=many)))) < 1000


@given(
    kind=st.sampled_from(Kind),
    nodes=st.lists(st.integers(), max_size=20).map(tuple),
    code=st.integers(-(2**32), 2**32),
    text=st.text(),
    finished=st.integers(),
    head=st.sampled_from([None, 0, 2]),
)
def test_any_failure_is_one_line(kind, head, **values):
    worker = WorkerPart(5) if kind is Kind.WORKER else None
    sent = wire.encode(Failure(kind, **values, worker=worker))
    failure = wire.decode(Failure, sent)
    message = report.failed(failure, job(coordinator=head))
    assert str(message).isprintable()
