"""Which agents the coordinator accepts, and what it tells those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_job import (
    KILLED,
    SimulatedJob,
    go,
    over,
    request_of,
    to,
    welcome,
)
from torchrun_hpc import __version__, limits, wire
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.rendezvous.errors import Refused
from torchrun_hpc.rendezvous.messages import Lost, Stranger
from torchrun_hpc.rendezvous.protocol import (
    Bye,
    Done,
    Ended,
    GaveUp,
    Heartbeat,
    Join,
    Read,
)
from torchrun_hpc.rendezvous.rounds import Phase
from torchrun_hpc.wire import WireError


def refusal(reason, connection="new"):
    """Return what a refused agent is sent: no more than the reason."""
    return {connection: [reason, "close"]}


def second_agent(job, rank=1, connection="second", **changes):
    """Let a second agent claim a node rank; check that the first one is asked."""
    job.heartbeats.clear()
    changes = {"agent": "second"} | changes
    assert job.connect(rank, connection=connection, **changes) == {}
    assert job.heartbeats == [(rank, Heartbeat())]


# --- two agents of one rank ---------------------------------------------------------


@pytest.mark.parametrize("answer", [Heartbeat(), Done(0)])
def test_the_first_one_answers_and_the_second_is_refused(answer):
    """The job continues, and node 0 reports both."""
    job = SimulatedJob().at_work()
    second_agent(job, pid=7, host="n10")
    assert job.send(1, answer) == refusal(Refused.TAKEN, "second")
    text = "process 7 on n10 instead of process 101 on n1"
    assert job.news == [Stranger((1,), text)]
    assert job.send(1, answer) == {}
    assert job.lose("second") == {}
    assert job.failure is None


def test_the_first_one_is_gone_and_the_second_is_accepted():
    job = SimulatedJob(max_restarts=1).at_work()
    second_agent(job)
    sent = job.lose(1)
    assert sent == to((0, 2), over(0)) | {1: ["reset"], "second": [welcome(1)]}
    assert job.news == [Lost(1)]
    job.join(0, 2)
    assert job.send("second", Join())["second"] == [go(1)]


def test_the_first_one_is_gone_and_the_job_with_it():
    job = SimulatedJob().at_work()
    second_agent(job)
    sent = job.lose(1)
    assert sent["second"] == [Ended(Failure(Kind.LOST, (1,)))]


def test_the_first_one_says_nothing_and_the_second_is_accepted():
    """Its node is lost: nothing closes its connection."""
    job = SimulatedJob(max_restarts=1).at_work()
    second_agent(job)
    assert job.wait(limits.CANDIDATE_TIMEOUT - 1, 1) == {}
    sent = to((0, 2), over(0)) | {1: ["reset"], "second": [welcome(1)]}
    assert job.wait(1, 1) == {1: sent}
    assert job.news == [Lost(1)]


def test_the_second_one_does_not_wait():
    job = SimulatedJob().at_work()
    second_agent(job)
    assert job.lose("second") == {}
    assert job.send(1, Heartbeat()) == {}


def test_a_third_one():
    job = SimulatedJob(max_restarts=1).at_work()
    second_agent(job, agent="other")
    job.connect(1, connection="third", agent="second")
    assert job.lose("second") == {}
    assert job.lose(1)["third"][0] == welcome(1)


def test_two_containers_of_one_host_are_two_agents():
    """Each has its own process numbers, so both may have the same one."""
    job = SimulatedJob(max_restarts=1).at_work()
    second_agent(job, host="n1", pid=101)
    assert job.send(1, Heartbeat()) == refusal(Refused.TAKEN, "second")
    text = "process 101 on n1 instead of process 101 on n1"
    assert job.news == [Stranger((1,), text)]
    assert job.is_running


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_connection_does_not_claim_a_second_node_rank(rank):
    job = SimulatedJob(max_restarts=1).at_work()
    second_agent(job)
    with pytest.raises(WireError):
        job.send_line("second", request_of(rank, agent="second"))
    job.lose("second")  # as the server does then
    job.lose(rank)
    job.wait(limits.CANDIDATE_TIMEOUT)
    assert job.coordinator.members.rank_of("second") is None


def test_an_agent_that_connects_anew_is_accepted_first():
    """It knows nothing of the round that ends. Its first connection ends later."""
    job = SimulatedJob(max_restarts=1).at_work()
    sent = job.connect(1, connection="again")
    assert sent == to((0, 2), over(0)) | {1: ["reset"], "again": [welcome(1)]}
    assert job.lose(1) == {}
    assert job.failure is None


# --- which agents are refused -------------------------------------------------------

# The changes of a request; why it is refused; both values.
UNFIT: dict[str, tuple[dict[str, Any], Refused, str]] = {
    "an older protocol": (
        {"protocol": protocol.VERSION - 1},
        Refused.VERSION,
        f"torchrun_hpc 0.1.0 instead of {__version__}",
    ),
    "a newer protocol, of which all else is different": (
        {"protocol": protocol.VERSION + 1, "nodes": None, "run_id": None, "pid": []},
        Refused.VERSION,
        f"torchrun_hpc 0.1.0 instead of {__version__}",
    ),
    "another id": ({"run_id": "x"}, Refused.RUN_ID, "--rdzv_id=x instead of mine"),
    "more nodes": ({"nodes": 4}, Refused.NODES, "4 nodes instead of 3"),
    "fewer nodes": ({"nodes": 2}, Refused.NODES, "2 nodes instead of 3"),
    "spares": ({"spares": 1}, Refused.SPARES, "--hpc-spares=1 instead of 0"),
    "an escape sequence": (
        {"run_id": "\x1b[2Jx\n"},
        Refused.RUN_ID,
        "--rdzv_id= [2Jx  instead of mine",
    ),
    "much text": (
        {"run_id": "x" * 3000},
        Refused.RUN_ID,
        f"--rdzv_id={'x' * 200} instead of mine",
    ),
    "a failure": (
        {"nodes": 4, "failed": wire.encode(Failure(Kind.AGENT, (1,)))},
        Refused.NODES,
        "4 nodes instead of 3",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_agent_that_does_not_fit_ends_a_job_that_starts(case):
    """It is awaited, and so the job cannot start."""
    changes, reason, text = UNFIT[case]
    job = SimulatedJob()
    job.connect(0, 2)
    sent = job.request("new", request_of(1) | changes)
    failed = Failure(Kind.REFUSED, (1,), text=text)
    assert sent == refusal(reason) | job.ended(failed)
    assert job.lose("new") == {}
    # The next one hears nothing of the job but this.
    assert job.request("new", request_of(1) | changes) == refusal(reason)


def starting():
    return SimulatedJob().all_connected()


def running():
    return SimulatedJob(max_restarts=1).at_work()


def restarting():
    """Wait for an agent that is gone."""
    job = running()
    job.lose(1)
    return job


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("start", [starting, running, restarting])
def test_an_agent_that_does_not_fit_ends_nothing(case, start):
    """Its node has an agent, or had one: a worker launches once more, for example."""
    changes, reason, text = UNFIT[case]
    job = start()
    job.news.clear()
    for _ in range(2):
        assert job.request("new", request_of(1) | changes) == refusal(reason)
        assert job.lose("new") == {}
    assert job.news == [Stranger((1,), text)]
    assert job.failure is None


@pytest.mark.parametrize("rank", [None, True, -1, 3, 10**30, "1", 1.0, [1]])
@pytest.mark.parametrize("case", UNFIT)
def test_an_agent_without_a_node_rank_ends_nothing(case, rank):
    """Not even while the job starts."""
    changes, reason, text = UNFIT[case]
    job = SimulatedJob()
    job.connect(0)
    request = request_of(1) | changes | {"rank": rank}
    try:
        sent = job.request("new", request)
    except WireError:
        assert type(rank) is not int or request["protocol"] == protocol.VERSION
        assert rank != 3 or request["nodes"] < 4
    else:
        assert sent == refusal(reason)
        assert job.news == [Stranger((), text)]
    assert job.failure is None


def test_an_agent_of_another_command_ends_nothing():
    """It belongs to another launch in the job. The agent of this launch will come."""
    job = SimulatedJob(started="a.py [1]")
    job.connect(0, started="a.py [1]")
    sent = job.connect(1, connection="new", started="b.py [2]")
    assert sent == refusal(Refused.STARTED)
    assert job.news == [Stranger((1,), "b.py [2] instead of a.py [1]")]
    assert job.lose("new") == {}
    assert job.failure is None
    # An agent sends its command only if the launch id does not tell launches apart.
    for rank, started in (1, "a.py [1]"), (2, ""):
        assert job.connect(rank, started=started)[rank] == [welcome()]


def test_a_second_agent_whose_first_one_leaves():
    """The first one has only looked whether there is a coordinator."""
    job = SimulatedJob()
    job.connect(0)
    second_agent(job, 0, "new")
    assert job.send(0, Bye())["new"] == [welcome()]
    assert job.lose(0) == {}


@pytest.mark.parametrize("start", [SimulatedJob, starting, running, restarting])
def test_a_request_with_nothing_but_a_version_ends_nothing(start):
    """Releases differ in all other fields."""
    job = start()
    assert job.request("new", {"protocol": 2}) == refusal(Refused.VERSION)
    assert job.failure is None


def test_a_stranger_is_reported_once_for_each_reason():
    job = running()
    for number in range(2):
        for changes, reason, _ in UNFIT.values():
            job.news.clear()
            job.request("new", request_of(1) | changes)
            first = next(each for each, why, _ in UNFIT.values() if why is reason)
            is_first = not number and changes == first
            assert bool(job.news) is is_first, changes


def test_a_stranger_is_reported_as_soon_as_somebody_is_there_to_report_it():
    job = SimulatedJob(coordinator=2)
    for ranks in ((), (), (2,), ()):
        job.connect(*ranks)
        sent = job.connect(3, connection="new", nodes=4)
        assert sent == refusal(Refused.NODES)
    assert [each.because for each in job.news] == ["4 nodes instead of 3"]


@pytest.mark.parametrize("end", ["failed", "finished"])
def test_when_a_job_has_ended_a_stranger_is_only_refused(end):
    job = running()
    if end == "failed":
        job.send(2, GaveUp(KILLED))
    else:
        job.finish()
    for changes, reason, _ in UNFIT.values():
        assert job.request("new", request_of(1) | changes) == refusal(reason)
    assert job.news == []


def test_nobody_waits_for_agents_that_were_refused():
    """For example, ``--rdzv-id=$RANDOM`` is different on each node."""
    job = SimulatedJob()
    job.connect(0)
    job.connect(1, connection="one", run_id="one")
    job.send(0, Read())
    assert job.coordinator.expects_nodes
    job.connect(2, connection="two", run_id="two")
    assert job.coordinator.all_informed


@pytest.mark.parametrize(("run_id", "theirs"), [("", "mine"), ("mine", "")])
def test_an_agent_that_cannot_know_the_id_fits(run_id, theirs):
    """A node that cannot start does not know the id. The others must hear of it."""
    job = SimulatedJob(run_id=run_id)
    assert job.connect(0, run_id=theirs) == {0: [welcome()]}
    cannot = Failure(Kind.AGENT, (1,), text="no torch")
    sent = job.connect(1, run_id=theirs, failed=wire.encode(cannot))
    assert sent == job.ended(cannot)
    assert job.connect(2, run_id=theirs) == {2: [Ended(cannot)]}


SECRET: dict[str, Any] = {
    "run_id": "id4711",
    "nodes": 4711,
    "spares": 1147,
    "max_restarts": 1,
}
requests = st.fixed_dictionaries(
    {"protocol": st.sampled_from([2, protocol.VERSION, protocol.VERSION, 5])},
    optional={
        "run_id": st.sampled_from(["id4711", "", "x"]) | st.text(max_size=9),
        "nodes": st.sampled_from([4711, 3]) | st.integers(),
        "spares": st.sampled_from([1147, 0]) | st.integers(),
        "rank": st.integers(-2, 4) | st.just(4711) | st.integers(),
        "pid": st.just(101) | st.integers(),
        "failed": st.just(wire.encode(KILLED)),
    },
)


@given(
    st.lists(requests, min_size=1, max_size=4),
    st.sampled_from(["starts", "runs", "failed", "finished"]),
)
def test_a_refusal_discloses_nothing(asked, phase):
    """It has no name, number, release or other agent of the job."""
    job = SimulatedJob(**SECRET)
    fit = {key: SECRET[key] for key in ("run_id", "nodes", "spares")}
    for rank in (0, 1):
        job.connect(rank, **fit)
    job.rounds.began = -1 if phase == "starts" else 0
    if phase == "finished":
        job.rounds.phase = Phase.FINISHED
    if phase == "failed":
        job.send(1, GaveUp(KILLED))
    for number, changes in enumerate(asked):
        request = request_of(1, agent="second") | fit | changes
        is_fit = request["protocol"] == protocol.VERSION and (
            request["run_id"] in ("", SECRET["run_id"])
            and all(request[key] == SECRET[key] for key in ("nodes", "spares"))
        )
        new = f"new {number}"
        try:
            sent = job.request(new, request)
        except WireError:
            continue
        for messages in sent.values():  # what others hear is short
            assert len(repr(messages)) < 1000
        sent |= job.send(1, Heartbeat())
        if not is_fit or isinstance(sent.get(new, [None])[0], Refused):
            reason = sent[new][0]
            assert sent[new] == [reason, "close"]
            assert (reason is Refused.TAKEN) is is_fit
