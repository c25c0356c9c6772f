"""What a person reads about failures."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import planned
from tests.support.raised import CAUSE
from tests.support.simulated_job import worker_failure
from torchrun_hpc import wire
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind, Summary, WorkerPart
from torchrun_hpc.planning.meeting import Meeting

MEETING = planned().meeting
LINES = ("Traceback (most recent call last):", CAUSE)
FIRST = worker_failure(5, text=CAUSE, lines=LINES)
FAILED_AT = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(FIRST.time))
JOB = Meeting(
    "c10d",
    nodes=3,
    endpoint="jwb0001i:25592",
    hosts=("jwb0001", "jwb0002", "jwb0003"),
    coordinator=0,
)

LOST = "RuntimeError: Connection closed by peer"
UNREAD = {"unread": "it is a terminal"}
REPORTS = {
    "one failure": Summary(FIRST),
    "a log file, and stderr that was not read": Summary(
        worker_failure(5, text=CAUSE, log="/logs/3", **UNREAD)
    ),
    "others": Summary(
        FIRST,
        same_as_first=(1,),
        others=(("KeyError: 1", (0, 2, 4)), ("OSError", (5,))),
        unlisted=1,
    ),
    "no cause": Summary(
        worker_failure(5, **UNREAD),
        same_as_first=(1,),
        others=(("ended with exit code 1", (0, 2)),),
    ),
}
SENTENCES = {
    "a cause": FIRST,
    "only a consequence": worker_failure(5, text=LOST),
    "unread": worker_failure(5, **UNREAD),
    "unread, and killed": worker_failure(5, code=-11, **UNREAD),
    "stopped": worker_failure(5, code=-15),
    "alone": worker_failure(5, text=LOST, size=1),
    "another rank did not come": worker_failure(
        5, text=LOST, absent="rank 2 did not call all_reduce 3"
    ),
    "no restart": worker_failure(5, text=LOST, finished=1),
}
IN_DOUBT = {"only a consequence", "unread", "stopped", "no restart"}


def test_reports(capsys, golden):
    texts = {}
    for case, summary in REPORTS.items():
        report.write(summary, MEETING)
        text = capsys.readouterr().err
        texts[case] = text.replace(f" at {FAILED_AT}", " at TIME")
    golden(texts)


def test_sentences(golden):
    texts = {case: report.sentence(each, MEETING) for case, each in SENTENCES.items()}
    assert {
        case for case, text in texts.items() if "may be another" in text
    } == IN_DOUBT
    golden(texts | {"no job": report.sentence(FIRST, planned(None).meeting)})


# --- why a job failed ---------------------------------------------------------------

FAILED = {
    "a worker that exits": worker_failure(5, code=3),
    "a worker that raises": worker_failure(5, code=1, text="ValueError: bad batch 17"),
    "a killed worker": worker_failure(5, code=-9),
    "a worker that crashes": worker_failure(5, code=-11),
    "a worker and a signal without name": worker_failure(5, code=-99),
    "a signal": Failure(Kind.SIGNAL, (1,), code=15),
    "an agent that gives up": Failure(
        Kind.AGENT, (1,), text="No space left on device: /tmp"
    ),
    "a lost agent": Failure(Kind.LOST, (1,)),
    "two lost agents": Failure(Kind.LOST, (1, 2)),
    "two silent agents": Failure(Kind.SILENT, (1, 2), code=120),
    "an excluded node": Failure(
        Kind.EXCLUDED, (1,), text="its health check ended with exit code 1"
    ),
    "two excluded nodes": Failure(Kind.EXCLUDED, (1, 2), text="it was lost 2 times"),
    "a silent agent": Failure(Kind.SILENT, (1,), code=120),
    "a missing node": Failure(Kind.MISSING, (1,), code=900),
    "two missing nodes": Failure(Kind.MISSING, (1, 2), code=900),
    "an agent of another job": Failure(Kind.REFUSED, (1,), text="it has 9 nodes"),
    "an agent of an unknown node": Failure(Kind.REFUSED, (7,), text="it has 9 nodes"),
    "an agent without a node": Failure(Kind.REFUSED, (), text="another release"),
    "the head node is gone": Failure(Kind.COORDINATOR),
    "the head node is silent": Failure(Kind.COORDINATOR, code=120),
    "no restart any more": Failure(Kind.LOST, (1,), finished=1),
    "no restart, of several": Failure(Kind.LOST, (1,), finished=2),
}


def test_why_a_job_failed(golden):
    elsewhere = replace(JOB, node_rank=1, coordinator=None)
    address = report.failed(Failure(Kind.COORDINATOR), elsewhere)
    golden(
        {case: str(report.failed(failure, JOB)) for case, failure in FAILED.items()}
        | {"a head node of which only the address is known": str(address)}
    )


def test_every_kind_of_failure_is_written():
    assert {failure.kind for failure in FAILED.values()} == set(Kind)


@pytest.mark.parametrize("kind", Kind)
def test_a_failure_of_all_nodes_is_no_flood(kind):
    many = tuple(f"n{i}" for i in range(1500))
    failure = Failure(kind, tuple(range(1500)), code=1, text="x" * 500)
    meeting = replace(JOB, nodes=1500, hosts=many)
    assert len(str(report.failed(failure, meeting))) < 1000


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
    message = report.failed(failure, replace(JOB, coordinator=head))
    assert str(message).isprintable()
